"""Decode, one token a slot and step: slots, their state on the device, and the decode pass and its graphs.
Imported by `baton.engine.executor` and `services.worker.engine`. `slots` is free of torch."""
