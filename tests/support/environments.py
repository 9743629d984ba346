"""Python environments for programs written elsewhere, each of its own, kept between runs.

They lie in folders of ~/.cache/baton; delete one to install it again.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

_INSTALL_S = 1200


@dataclass(frozen=True)
class Environment:
    """`packages`: what pip installs into `folder`. `borrows`: packages that are not listed come from the
    environment of the tests, torch among them, and pip installs no dependencies."""

    folder: Path
    packages: tuple[str, ...]
    borrows: bool = False

    @property
    def python(self) -> Path:
        """The environment's Python. Installs it first where it is missing: minutes, over a package index."""
        if not (self.folder / ".done").exists():
            self._install()
        return self._python

    @property
    def version(self) -> str:
        """The installed version of the first package."""
        name = self.packages[0].split("==")[0]
        program = f"import importlib.metadata as m; print(m.version({name!r}))"
        found = subprocess.run([self.python, "-c", program], capture_output=True, text=True, check=True)
        return found.stdout.strip()

    @property
    def _python(self) -> Path:
        return self.folder / "bin" / "python"

    def _install(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", self.folder], check=True, timeout=_INSTALL_S)
        pip = [str(self._python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        if self.borrows:
            where = sysconfig.get_path("purelib", vars={"base": str(self.folder)})
            (Path(where) / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
            pip.append("--no-deps")
        subprocess.run([*pip, *self.packages], check=True, timeout=_INSTALL_S)
        (self.folder / ".done").touch()
