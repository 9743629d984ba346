"""The wire format of links, as pure functions and values: frames and their checksums, how blocks are cut into
pieces, tickets, endpoints, and what the two ends compare and prove when they open a link.

Imported by everything in `kvtransfer` and by the workers; imports nothing of `kvtransfer`, no torch and no
transport.
"""
