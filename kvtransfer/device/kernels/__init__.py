"""Triton kernels that move and quantise blocks, and the torch-free constants they share with their callers.

Imported by `kvtransfer.device` alone.
"""
