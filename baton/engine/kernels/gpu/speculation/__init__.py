"""Kernels of a decode step for drafts: rows for them, and which of these count. Imported by
`baton.engine.decode` alone; imports the kernels of `step`.
"""
