"""Computed blocks kept for prompts that begin alike: on the device, in host memory and on disk. Imported by
the prefill scheduler and by what sets up a worker."""
