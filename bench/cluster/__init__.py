"""Measures whole clusters: overhead of router and workers with fake engines, clusters on GPUs, guided outputs
beside free ones. Nothing imports it.
"""
