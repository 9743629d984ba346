"""The ipc transport: frames and pieces through memory that two processes of one host map, with a Unix socket
for wake-ups; between devices, pieces through device memory that the sender's device writes.

Imported by `transports.registry` alone.
"""
