"""The router alone: fake workers before it, clients that only count bytes behind it. Imports `bench.cluster`;
nothing imports it.
"""
