"""The arms that are compared: arrangements of workers, each of some GPUs, and what the clients ask them
for."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

_PAIR = re.compile(r"(\d+)p(\d+)(d|both)")
_BOTH = re.compile(r"(\d*)both")
_DEVICES = "--tensor-parallel"
KINDS_HELP = (
    "vllm, vllm@URL, both, Nboth such as 2both, NpMd such as 1p1d, NpMboth (conditional disaggregation)"
)

_TURNS, _SYSTEM, _MESSAGE, _ANSWER = 5, 1024, 128, 128


@dataclass(frozen=True, slots=True)
class Arm:
    """`kind`: baton or vllm. `prefill`, `decode`, `both`: workers of Baton, of a GPU each, or of as many as
    `--tensor-parallel` among the flags says. `flags`: more words for `baton up` or `vllm serve`. `url`: of a
    server that runs already, which is not started."""

    name: str
    kind: str
    prefill: int = 0
    decode: int = 0
    both: int = 0
    flags: tuple[str, ...] = ()
    url: str = ""

    @property
    def gpus(self) -> int:
        """Number of GPUs that the arm takes."""
        if self.kind == "vllm":
            return 1
        return (self.prefill + self.decode + self.both) * _devices(self.flags)

    @property
    def roles(self) -> tuple[str, ...]:
        """The flags of `baton up` for its workers."""
        counts = {"--prefill": self.prefill, "--decode": self.decode, "--both": self.both}
        return tuple(word for flag, count in counts.items() if count for word in (flag, str(count)))


def _devices(flags: Sequence[str]) -> int:
    """The value of `--tensor-parallel` among flags of `baton up`, 1 without it. Raises ValueError where it is
    not a number above 0."""
    if _DEVICES not in flags:
        return 1
    found = [*flags, ""][flags.index(_DEVICES) + 1]
    if not found.isdecimal() or int(found) < 1:
        raise ValueError(f"{_DEVICES} {found}: devices of a worker are a number above 0")
    return int(found)


def parse_arm(text: str) -> Arm:
    """Parses `[NAME=]KIND[ MORE FLAGS]`, such as `1p1d`, or `1p1d-fp8=1p1d --quantization fp8`. Raises
    ValueError."""
    words = shlex.split(text)
    if not words:
        raise ValueError(f"an arm is {KINDS_HELP}")
    words[0], _, url = words[0].partition("@")
    _devices(words)
    name, equals, kind = words[0].partition("=")
    kind, flags = kind if equals else name, tuple(words[1:])
    if kind == "vllm":
        return Arm(name, "vllm", flags=flags, url=url)
    if url:
        raise ValueError(f"only an arm of vllm can run already: {KINDS_HELP}")
    if found := _PAIR.fullmatch(kind):
        prefill, others = int(found[1]), int(found[2])
        if prefill and others and found[3] == "d":
            return Arm(name, "baton", prefill=prefill, decode=others, flags=flags)
        if prefill and others:
            return Arm(name, "baton", prefill=prefill, both=others, flags=("--both-receives", *flags))
    if (found := _BOTH.fullmatch(kind)) and found[1] != "0":
        return Arm(name, "baton", both=int(found[1] or 1), flags=flags)
    raise ValueError(f"{kind!r} is no arm: {KINDS_HELP}")


@dataclass(frozen=True, slots=True)
class Workload:
    """`flags`: those of `loadgen run`. `tokens`: the longest sequence. `requests`: of each arrival, the turns
    of a conversation."""

    name: str
    flags: tuple[str, ...]
    tokens: int
    requests: int = 1

    @property
    def prompt_tokens(self) -> int:
        """Tokens of a prompt. Raises ValueError for a workload of conversations, whose prompts grow."""
        if self.requests > 1:
            raise ValueError(f"prompts of {self.name} are not of one length")
        return int(self.flags[self.flags.index("--input-len") + 1])


def _lengths(prompt: int, output: int) -> tuple[str, ...]:
    return ("--input-len", str(prompt), "--output-len", str(output))


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
