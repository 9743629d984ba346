"""`baton demo`: a cluster, a few streamed prompts, a summary. Only `baton.cli.main` imports it."""
