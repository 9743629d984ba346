"""Prompts to first tokens: the forward pass over packed chunks, and the draw behind it. Imported by
`baton.engine.executor`, `services.worker.engine` and benchmarks."""
