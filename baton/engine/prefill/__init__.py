"""Prompts to first tokens: scheduling into steps, the forward pass over packed chunks, and the loop that
pipelines steps. Imported by `services.worker.engine`. `scheduler`, `step` and `cost` are free of
torch."""
