"""One token a slot and step: slots, their state on the device, the decode pass, and two loops of steps, one
of CUDA graphs and one in plain torch. Imported by `baton.engine.executor` and `services.worker.engine`.
`slots` is free of torch."""
