"""What the device computes next, as data: the planners of prefill and decode steps, and what they know. Free
of torch. Imported by `baton.engine.prefill`, `decode` and `executor`, by `services.worker.engine` and
benchmarks."""
