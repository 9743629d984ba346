"""The exchange's CUDA C++ compiled for the host, and devices that run it there, threads in any order."""
