"""Weights in fewer bits: what a checkpoint says about them, how the formats in use store them, and how the
engine quantises others. `scheme` and what reads configurations are torch-free; `unpack` and `quantize` are
imported by what loads weights."""
