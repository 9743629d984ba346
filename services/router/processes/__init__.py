"""Several router processes that share the public ports: the process that runs them, and what they
report to one another. Without `router.processes` above 1 nothing of it is used. Imported by `observability`,
which answers for all processes, by the assembly and by `services.router.__main__`.
"""
