"""Measures which kernel computes each matrix product of a model fastest on the GPU at hand, for shapes that
no table has. Imported by a worker's start and by benchmarks; of the engine it imports `model`, `forward` and
`kernels` alone."""
