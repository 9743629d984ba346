"""The full sampler of a decode step: logit edits, filters, draws and logprobs. Imported by
`baton.engine.decode` alone; imports the kernels of `step`.
"""
