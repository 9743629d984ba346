"""Output for people: terminal, HTML, Markdown. Imports `loadgen.goodput` and `loadgen.analysis`;
`loadgen.commands` imports it.
"""
