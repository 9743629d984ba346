"""The processes of a cluster: router, workers, and what they share. Imported by `baton.cli` and
`baton.cluster`, which start them, and by nothing below."""
