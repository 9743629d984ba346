"""Who holds which KV block, and the cache's memory. Imported by schedulers, prefix cache and reservations.
Free of torch but for `kv_cache` and `host_blocks`, which are the memory itself."""
