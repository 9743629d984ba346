"""Sampling of next tokens: the reference sampler, logit edits and logprobs, and the sampler over slots.
Imported by the decode loops and by the first token's draw in `prefill`."""
