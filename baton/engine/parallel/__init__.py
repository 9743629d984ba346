"""Exchange among a worker's devices within a step: by kernels over memory that all of them reach, and its
double on a CPU, which computes for one device after the other. Imported by `baton.engine.model`."""
