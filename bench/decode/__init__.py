"""Measures decode steps of one engine on a GPU: with drafts too, and attention, products, experts and lookups
by themselves. Imported by `bench.transfer`.
"""
