"""The defaults by which prefill workers pace and order prompts; times in seconds.

Routers predict when a prompt runs from the same values, for every worker: a worker does not report its
settings, so one with other settings is predicted less well.
"""

from __future__ import annotations

# The longest expected duration of a step while short prompts wait or come, and while none do on a GPU.
STEP_S = 0.025
ALONE_STEP_S = 0.06
# Wait, in seconds, after which a prompt gets a part of the steps' time, and is passed by none in a router's
# queue.
AGE_CAP_S = 2.0
# How much longer prompts may take than is predicted of full steps: steps of few rows do.
MARGIN = 1.1
# The largest share of its time for which a worker that decodes is taken to compute prompts: steps of both
# alternate, so decode always has some of it.
MOST_PREFILL_SHARE = 7 / 8
