"""Launches of each kind of layer on a GPU; the kinds have the same names in `model.layers`. Imported by
`forward`, `prefill`, `decode` and `tuning`."""
