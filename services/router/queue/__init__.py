"""The queue of requests that wait for a pair of workers with room: who is next, and how many may wait.
Imported by `lifecycle` and `observability`; `tokenization` orders its jobs by `request_order`.
"""
