"""The engine of a worker process: a model's forward passes on one device, its KV cache, and the loops that
run prefill and decode. It has neither network nor requests: `services.worker.engine` drives it, and
`services.worker.front` reads its rings. Its folders import one another downwards only: prefill and decode
import forward, sampling and prefix_cache; these import model, memory and rings; all import kernels."""
