"""Arrivals, prompts and traces. Independent of targets and of sending; imports only `loadgen.common`."""
