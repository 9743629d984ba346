"""The model: configuration, tensors, weights and the modules they are composed into, and the reference
forward pass in plain torch. Imported by the passes of `prefill` and `decode`, and by what loads and plans a
model. `config`, `families`, `rope_config`, `source` and `tensors` are free of torch."""
