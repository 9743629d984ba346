"""The router alone: fake workers before it, clients that only count bytes behind it. Nothing imports it."""
