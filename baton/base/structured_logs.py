"""structlog for all processes, without rich: it would import that for tracebacks on a terminal, which no log
here has, and that is a quarter of what the start of a worker's front takes."""

from __future__ import annotations

import sys

if "rich" in sys.modules:
    import structlog as structlog
else:
    sys.modules["rich"] = None  # type: ignore[assignment]  # an import fails, and structlog does without
    try:
        import structlog as structlog
    finally:
        del sys.modules["rich"]
