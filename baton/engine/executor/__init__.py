"""Launches planned steps on a device, and accounts for those that have ended: streams, events, first tokens,
watchdogs. Imported by `services.worker.engine` and benchmarks."""
