"""`python -m services.cluster`: starts, watches and restarts workers, on Ray or as its own children.

`reconcile`, `rooms` and `gpu_sharing` decide, `supervision` acts. `baton up` starts this package as a child
process and never imports it. It imports neither torch nor what runs in workers, and it is the only package
that imports Ray.
"""
