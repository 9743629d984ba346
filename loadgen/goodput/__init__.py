"""The search for the highest arrival rate that meets the limits. May import `loadgen.generator`,
`loadgen.analysis` and below."""
