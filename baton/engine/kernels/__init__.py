"""Arithmetic on tensors: `reference` in plain torch, `gpu` in Triton and CUDA. `fusion` names what products
fuse. Imported by `model` (references), `forward`, `prefill`, `decode` and `sampling`; imports nothing of
them."""
