"""Plans of the next step as data: the planners of prefill and decode steps, and the state they read. Free of
torch. Imported by `baton.engine.prefill`, `decode` and `executor`, by `services.worker.engine` and
benchmarks."""
