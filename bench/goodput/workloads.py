"""What the clients ask for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Workload:
    """`flags`: those of `loadgen run`. `tokens`: the longest sequence. `requests`: of each arrival, the turns
    of a conversation."""

    name: str
    flags: tuple[str, ...]
    tokens: int
    requests: int = 1


def _lengths(prompt: int, output: int) -> tuple[str, ...]:
    return ("--input-len", str(prompt), "--output-len", str(output))


_TURNS, _SYSTEM, _MESSAGE, _ANSWER = 5, 1024, 128, 128
WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("1k-256", _lengths(1024, 256), 1280),
        Workload("4k-256", _lengths(4096, 256), 4352),
        Workload("256-512", _lengths(256, 512), 768),
        # Five turns that share a system prompt; each turn's prompt is the whole conversation so far.
        Workload(
            "chat",
            (
                *("--dataset", "chat", "--system-len", str(_SYSTEM), "--turns", str(_TURNS)),
                *("--think-time", "exp:1", *_lengths(_MESSAGE, _ANSWER)),
            ),
            _SYSTEM + _TURNS * (_MESSAGE + _ANSWER),
            _TURNS,
        ),
        # For machines without a GPU.
        Workload("tiny", _lengths(24, 8), 64),
    )
}
