"""Drafts of tokens and what becomes of them: who proposes them, the history that they are looked up in, how
many rows of a step they get, the rule by which it accepts them. Imported by the decode loops, the planner,
the slots' state and benchmarks."""
