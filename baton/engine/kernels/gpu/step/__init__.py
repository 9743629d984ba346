"""The parts of a decode step besides the model: mailbox, plan, output ring; and the row operations between
products. Imported by `decode`, `prefill` and `forward`, and by the kernels of `sampling`; imports those of
`attention` and `gemm`."""
