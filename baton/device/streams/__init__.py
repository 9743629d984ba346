"""Streams and events of a device, and what they order: captured graphs, uploads, and writes to another
process's memory. `stream` and `link_device` are interfaces without torch; the `cuda_` modules implement them.

Imported where `baton.device` is; it imports only the modules beside it.
"""
