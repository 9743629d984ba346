"""Runs the rendered chart without Kubernetes: the commands of its pods as processes of this machine, each pod
in namespaces of its own, with the files, variables, ports and user that its manifest gives it.

`manifests` reads what was rendered and refuses every key that it does not know, so that nothing in a manifest
is left out unnoticed; `cluster` does what Kubernetes does with it. What differs from Kubernetes:

- A Service's address is forwarded by this process to the ready pods (`services`).
- DNS is /etc/hosts.
- The file system is the host's, read-only, with the pod's volumes mounted (`container`); the image's command
  `valkey-server` is a stand-in around the embedded server (`valkey_server`).
- Probes are asked more often than `periodSeconds`, but fail after the same time.
"""
