"""Code that a worker's front and its engine process share: how the engine is launched, the channel between
the two, the front's client of it, and the keys and messages that both use. Imported by `services.worker`,
`services.prefill` and `services.decode`; torch-free."""
