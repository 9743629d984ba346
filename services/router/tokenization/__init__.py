"""Tokenising off the event loop: threads for short texts, helper processes for large requests, and the
reader of request bodies that chooses between them. Imported by `lifecycle`, `api` and the assembly.
"""
