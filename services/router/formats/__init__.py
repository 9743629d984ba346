"""Wire formats of requests and responses: what all APIs share is here (the table of fields, ignored and
grammar fields, JSON, an answer's headers), and `openai`, `responses` and `grpc` have those of one API each.
Pure conversion without I/O, except that `json_bodies` sends. Imported by `api`, `tokenization` and the
assembly, and by the folders inside it, of which it imports none.
"""
