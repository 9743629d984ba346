"""What prefill and decode share of a forward pass on a GPU: the layer program, its workspace, and matrix
products by measured kernel choices. Imported by the GPU passes of `prefill` and `decode`, and by
benchmarks."""
