"""The kinds of layers: one file a kind, with its tensors, its modules and its reference in plain torch. Its
launch has the same name in `forward.layers`. Imported by `model`, `forward`, `prefill`, `decode` and
`tuning`.
"""
