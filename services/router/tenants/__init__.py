"""Tenants: which API keys each one has, what it may use, and what it has used. Knows nothing of requests or
APIs. Imported by `auth`, which finds a call's tenant, by `lifecycle`, which has its limits judged, and by
`queue` and `tokenization`, where tenants share places.
"""
