"""Weights in fewer bits: what a checkpoint's configuration says about them, how the formats in use store
them, and how the engine quantises others. `quantize` and `unpack` need torch, the rest does not. Imported by
the model's `families` and `config`, which read a configuration, by `weight_formats`, and by `checkpoint` and
`weights`, which load; it imports nothing of the model.
"""
