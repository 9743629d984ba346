"""Attention over the paged KV cache: split decode attention, and prompt attention in parts that are joined
by their sums of exponentials."""
