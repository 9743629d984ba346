"""The gRPC API: GenerateRequest and its conversation as a `ParsedRequest`, and plain responses as bytes.
Imported by the router's `api` and `tokenization`.
"""
