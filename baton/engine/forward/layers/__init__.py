"""How each kind of layer is launched on a GPU; the kinds have the same names in `model.layers`. Imported by
`forward`, `prefill`, `decode` and `tuning`.
"""
