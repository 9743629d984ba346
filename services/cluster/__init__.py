"""`python -m services.cluster`: starts, watches and restarts workers, on Ray or as its own children.

    supervision     decides which workers run, starts and ends them
    gpus            the GPUs of this host, and which worker gets which
    on_ray          workers in Ray actors; the only package that imports Ray
    plain_cluster   workers that are children of this process
    group           the same for one container, or for an existing Ray, with probes and metrics

`baton up` starts this package as a child process and never imports it. It imports neither torch nor what runs
in workers.
"""
