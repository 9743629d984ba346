"""Files of compiled kernels: where they are cached between starts, what they were compiled with, and folders
of them that an image ships.

Imported by `baton.device`, `baton.engine`, the workers' start, `baton model compile` and benchmarks; imports
nothing of them.
"""
