"""The choice of the kernel that computes a matrix product: the kinds of kernels, and tables of measured
choices. Imported by `forward`, `decode`, `prefill`, `tuning` and by the worker's start-up."""
