"""The arithmetic of a forward pass in plain torch: exact in every dtype, on any device, and what the GPU
kernels are tested against."""
