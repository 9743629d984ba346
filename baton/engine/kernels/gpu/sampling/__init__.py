"""The full sampler of a decode step: logit edits, filters, draws and logprobs."""
