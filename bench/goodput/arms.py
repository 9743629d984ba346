"""The arrangements that are compared, each of some GPUs."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

_PAIR = re.compile(r"(\d+)p(\d+)(d|both)")
_BOTH = re.compile(r"(\d*)both")
KINDS_HELP = (
    "vllm, vllm@URL, both, Nboth such as 2both, NpMd such as 1p1d, NpMboth (conditional disaggregation)"
)


@dataclass(frozen=True, slots=True)
class Arm:
    """`kind`: baton or vllm. `prefill`, `decode`, `both`: workers of Baton, a GPU each. `flags`: more words
    for `baton up` or `vllm serve`. `url`: of a server that runs already, which is not started."""

    name: str
    kind: str
    prefill: int = 0
    decode: int = 0
    both: int = 0
    flags: tuple[str, ...] = ()
    url: str = ""

    @property
    def gpus(self) -> int:
        """How many GPUs it takes."""
        return 1 if self.kind == "vllm" else self.prefill + self.decode + self.both

    @property
    def roles(self) -> tuple[str, ...]:
        """The flags of `baton up` for its workers."""
        counts = {"--prefill": self.prefill, "--decode": self.decode, "--both": self.both}
        return tuple(word for flag, count in counts.items() if count for word in (flag, str(count)))


def parse_arm(text: str) -> Arm:
    """Parses `[NAME=]KIND[ MORE FLAGS]`, such as `1p1d`, or `1p1d-fp8=1p1d --quantization fp8`. Raises
    ValueError."""
    words = shlex.split(text)
    if not words:
        raise ValueError(f"an arm is {KINDS_HELP}")
    words[0], _, url = words[0].partition("@")
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
