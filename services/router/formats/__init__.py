"""Wire formats of requests and responses: OpenAI's JSON bodies, vLLM's tokenize bodies, GenerateRequest,
logprobs and incremental JSON. Pure conversion without I/O, except that `json_bodies` sends. Imported by
`api`, `tokenization` and `lifecycle.admission`.
"""
