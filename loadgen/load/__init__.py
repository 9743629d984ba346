"""Arrivals, prompts and traces, independent of sending. Imports `loadgen.common` alone."""
