"""Prompts to first tokens: the forward pass over packed chunks, and the loop that pipelines steps. Imported
by `services.worker.engine`."""
