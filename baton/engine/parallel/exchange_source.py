"""The source of the exchange's kernels, by the constants that they are compiled with. Torch-free."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

_SOURCE = Path(__file__).with_name("exchange.cu")
_WARP = 32
_CHUNK_BYTES = 16


@dataclass(frozen=True, slots=True)
class Constants:
    """The constants of `exchange.cu`; `threads`: of a block of a sum."""

    ranks: int
    width: int
    floats: bool
    threads: int
    post_norm: bool = False
    norm: bool = False
    codes: bool = False
    wide_gains: bool = False

    @property
    def source(self) -> str:
        """Returns the source of the kernels."""
        defines = "".join(f"#define {name.upper()} {int(value)}\n" for name, value in asdict(self).items())
        return defines + _SOURCE.read_text()


def threads_of(width: int, element_bytes: int, ranks: int) -> int:
    """Threads of a block that adds `ranks` rows of `width` elements: one for each 16 bytes, as far as their
    registers allow."""
    chunks = -(-width * element_bytes // _CHUNK_BYTES)
    return min(1024 if ranks <= 4 else 512, -(-chunks // _WARP) * _WARP)
