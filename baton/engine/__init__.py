"""The engine of a worker process: a model's forward passes on one device, its KV cache, and the loops that
run prefill and decode. It has neither network nor requests. Imported by `services.worker.engine`, which
drives it, by benchmarks, and, the torch-free parts only, by the processes beside it, which read its rings and
its model's configuration. Its folders import one another downwards only: executor imports prefill and decode;
these import plan, forward, sampling and prefix_cache; these import model, memory and shared_memory; all
import kernels.
"""
