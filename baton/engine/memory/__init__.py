"""The owners of KV blocks, and the cache's memory. Imported by schedulers, prefix cache and reservations.
Free of torch except for `kv_cache` and `host_blocks`, which are the memory itself."""
