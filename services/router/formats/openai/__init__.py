"""OpenAI's JSON bodies for completions and chats with vLLM's extensions, of /tokenize and /detokenize too,
the format of their responses, and the JSON schemas of all bodies. Imported by `responses` and `grpc` beside
it, and by the router's `api`, `tokenization` and `lifecycle.admission`.
"""
