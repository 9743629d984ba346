"""The `baton` command: one module or folder per subcommand, dispatched by `main`.

It starts router and workers as child processes and calls them over gRPC, so it imports neither torch, Ray,
`services.router` nor `services.cluster`. No other package imports it.
"""
