"""The parts of a forward pass on a GPU that prefill and decode share: the layer program, its workspace, and
matrix products by measured kernel choices. Imported by the GPU passes of `prefill` and `decode`, and by
benchmarks."""
