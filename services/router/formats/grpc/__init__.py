"""The gRPC API: GenerateRequest and its conversation as a `ParsedRequest`. Imported by the router's `api` and
`tokenization`.
"""
