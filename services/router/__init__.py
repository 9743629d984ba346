"""The router: it admits requests of both public APIs, places them on workers, and returns their output.
Torch-free; it reaches workers by gRPC only. `app` assembles the packages below; nothing outside imports
them.
"""
