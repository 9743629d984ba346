"""The code that all parts share: errors, block hashes, the layout of a KV cache, process set-up; and, in
folders, the engine, soft state, devices, the client, the cluster and the command. Any package may import the
modules of this folder itself; they import only one another and `baton.v1`."""
