"""`baton demo`: a cluster, a few streamed prompts, a summary. Only `services.cli.main` imports it."""
