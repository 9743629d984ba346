"""Triton kernels that move blocks; `kvtransfer.moving` has what they do in plain torch, and chooses."""
