"""Code that both ends of every link share, whatever its transport: the interfaces that a transport
implements, staging memory and its owners, frame queues, and requests for links.

Imported by `sender`, `receiver` and `transports`; imports only `protocol` and `baton.device`'s interfaces.
"""
