"""Router, load generator, command line and links start without torch, triton, Ray or transformers."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCKED_THEN = """
import importlib.abc
import sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "triton", "ray", "transformers"}:
            raise ImportError(f"{name} is not to be imported here")

sys.meta_path.insert(0, Blocker())
"""


@pytest.mark.parametrize(
    "module",
    [
        "services.router.__main__, services.router.process",
        "loadgen.__main__, loadgen.cli; loadgen.cli.parser(*loadgen.cli.COMMANDS)",
        # All commands.
        "services.cli.main, services.cli.up.command, services.cli.demo.command; "
        "[services.cli.parse.parser_of(name) for name in services.cli.commands.COMMANDS]",
        "kvtransfer.receiver.receiver, kvtransfer.sender.sender",
    ],
)
def test_starts_without_torch(module: str) -> None:
    script = f"{BLOCKED_THEN}\nimport {module}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_the_block_blocks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{BLOCKED_THEN}\nimport torch"], capture_output=True, text=True
    )
    assert "torch is not to be imported here" in done.stderr
