"""OpenAI's Responses API: the request body, the response object and the events of a stream. Imported by the
router's `api`, `tokenization` and `lifecycle.admission`.
"""
