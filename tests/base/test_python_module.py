"""Processes of the project import nothing from the folder that they are started in.

Every cluster of `tests/e2e` runs in a folder with modules named as those of the standard library.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.base.parent_death import tied
from baton.base.python_module import python_module

ROOT = Path(__file__).parents[2]
PACKAGES = ("baton", "kvtransfer", "services", "loadgen", "deploy")


@pytest.mark.parametrize("own_parent", [False, True])
def test_a_module_of_the_current_folder_is_not_run(tmp_path: Path, own_parent: bool) -> None:
    for name in ("json", "logging", "queue", "ctypes", "os"):
        (tmp_path / f"{name}.py").write_text("print('run')")
    command = python_module("json.tool", "--compact")
    done = subprocess.run(
        tied(command) if own_parent else command, input="[1, 2]", capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.stdout, done.stderr) == ("[1,2]\n", "")


def test_every_process_is_started_so() -> None:
    assert list(
        others(ast.parse("(sys.executable, '-m', 'x'); f(sys.executable, '-c', x); sys.executable"))
    ) == [1, 1]
    found = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if "sys.executable" in (text := path.read_text()) and any(others(ast.parse(text)))
    }
    assert found == set()


def others(tree: ast.AST) -> Iterator[int]:
    """The lines in which an interpreter is started by a command of their own, without -P or -I."""
    for node in ast.walk(tree):
        items = getattr(node, "elts", None) or getattr(node, "args", None)
        if isinstance(items, list) and any(ast.unparse(item) == "sys.executable" for item in items):
            options = {item.value for item in items if isinstance(item, ast.Constant)}
            if not options & {"-P", "-I"}:
                yield node.lineno  # type: ignore[attr-defined]
