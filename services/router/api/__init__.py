"""The public APIs (gRPC RouterService, OpenAI-compatible HTTP) and the admin APIs. Handlers admit a
request, run its choices and format the response; they contain no policy. Imported by the
assembly alone.
"""
