"""Which prompt tokens a step computes, in which order, and what that should take; free of torch. Imported by
`baton.engine.prefill`, `services.worker.engine` and benchmarks."""
