"""Several hosts on this machine: each with namespaces of its own (network, processes, mounts, shared memory),
joined by a switch of the tests' own that cuts, delays, limits and drops. The cluster on them is the one of
docs/several-hosts.md, whose files and commands are read from the page (`page`).

What differs from the page: users other than root and `scp` are stand-ins (`host`), a service manager of a few
lines reads the units (`services`), the switch enforces the firewalls' files, the model is the one that ships.
All traffic is between these namespaces.
"""
