"""The processes of a cluster: router, workers, and what they share. Imported by `services.cli` and
`services.cluster`, which start them, and by nothing below."""
