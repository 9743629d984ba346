"""Command lines as they were spelled before 0.2: they run for one more release, with a line on stderr."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.cli.common.messages import warn

# Each old command, and the words that take its place. The page docs/commands.md has them all.
NEW: Mapping[str, tuple[str, ...]] = {
    "worker-group": ("worker", "group"),
    "supervise": ("ray", "supervise"),
    "stop-workers": ("ray", "stop-workers"),
    "ray-certificate": ("ray", "certificate"),
    "fetch-model": ("model", "fetch"),
    "warm-kernels": ("model", "compile"),
    "top": ("status", "--watch"),
    "version": ("--version",),
}


def current(argv: Sequence[str]) -> list[str]:
    """The command line as it is spelled now. Writes a line to stderr where that is another one."""
    if not argv or argv[0] not in NEW:
        return list(argv)
    words = NEW[argv[0]]
    warn(f"`baton {argv[0]}` is now `baton {' '.join(words)}`; the next release refuses the old spelling")
    return [*words, *argv[1:]]
