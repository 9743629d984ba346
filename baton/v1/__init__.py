"""Messages and stubs generated from `proto/baton/v1`; every package may import them."""
