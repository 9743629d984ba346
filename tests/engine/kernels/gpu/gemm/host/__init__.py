"""CUDA C++ compiled for the host and run there, so that a kernel's logic is tested without a GPU."""
