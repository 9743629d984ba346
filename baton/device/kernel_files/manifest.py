"""The manifest of a folder of compiled kernels: the versions and the GPU that they are for. Torch-free."""

from __future__ import annotations

import errno
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

SHIPPED_VARIABLE = "BATON_KERNELS"
"""Environment variable with a folder of compiled kernels, such as that of a container image."""
MANIFEST = "baton-kernels.json"
"""File of such a folder that says what its kernels were compiled with."""


@dataclass(frozen=True, slots=True)
class KernelManifest:
    """Versions, and the GPU's compute capability, such as "9.0". With others Triton compiles again."""

    baton: str
    torch: str
    triton: str
    capability: str

    @classmethod
    def read(cls, folder: Path) -> KernelManifest | None:
        """Reads a folder's manifest; None if it has none. Raises OSError if it cannot be read."""
        try:
            return cls.parse((folder / MANIFEST).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError):
            raise OSError(errno.EINVAL, f"its {MANIFEST} is damaged") from None

    @classmethod
    def parse(cls, text: str) -> KernelManifest:
        """Parses what `text` writes. Raises ValueError or TypeError for anything else."""
        return cls(**json.loads(text))

    def text(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST).write_text(self.text(), encoding="utf-8")

    def differences(self, other: KernelManifest) -> str:
        """Names each value that differs, such as "torch 2.11.0 and 2.13.0"; empty if none does."""
        pairs = [(one.name, getattr(self, one.name), getattr(other, one.name)) for one in fields(self)]
        return ", ".join(f"{name} {mine} and {theirs}" for name, mine, theirs in pairs if mine != theirs)
