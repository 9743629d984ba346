"""How prefill workers pace and order prompts unless they are configured otherwise; times in seconds.

Routers predict a prompt's turn from the same values, for each worker: what one is configured with it does not
report, so a worker with other settings is predicted less well.
"""

from __future__ import annotations

# The longest expected duration of a step while short prompts wait or come, and while none do on a GPU.
STEP_S = 0.025
ALONE_STEP_S = 0.06
# A prompt that has waited for so long gets a part of the steps' time, and is passed by none in a router's
# queue.
AGE_CAP_S = 2.0
# How much longer prompts may take than is predicted of full steps: steps of few rows do.
MARGIN = 1.1
# The largest share of its time for which a worker that decodes is taken to compute prompts: steps of both
# alternate, so decode always has some of it.
MOST_PREFILL_SHARE = 7 / 8
