"""Runs commands as if `pip install baton-serve`, or one of its extras, were all that was ever installed.

    python -m tests.packaging.base_only < '[["baton", "up"], …]'
    python -m tests.packaging.base_only extras < '[["router", "services.router", …], …]'

The first writes `[[exit code, stdout, stderr], …]` as JSON; the second does what check_install.py does, with
an extra and modules each time, and writes what it prints as JSON: `["", …]`. Modules of packages that the
install does not bring cannot be imported here, and their metadata is not found.
"""

from __future__ import annotations

import functools
import importlib.metadata
import io
import json
import os
import sys
import tomllib
import traceback
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.packaging.check_install import help_failures, import_failures

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
# In every venv.
TOOLS = {"pip", "setuptools"}


def base_packages(extra: str = "") -> set[str]:
    """The distributions of an install: the project's dependencies, and theirs, with those of an extra."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"] | {"": []}
    waiting, found = [*project["dependencies"], *extras[extra]], {canonicalize_name(project["name"])} | TOOLS
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        if name == canonicalize_name(project["name"]):
            waiting += [line for inner in requirement.extras for line in extras[inner]]
        elif name not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found.add(name)
            waiting += importlib.metadata.requires(name) or ()
    return found


@functools.cache
def packages_of_modules() -> Mapping[str, list[str]]:
    """The distributions that bring each top-level module of this environment."""
    return importlib.metadata.packages_distributions()


def take_away(extra: str = "") -> None:
    """Makes this process one of an install with this extra, or with none."""
    base = base_packages(extra)
    gone = {
        module
        for module, packages in packages_of_modules().items()
        if not any(canonicalize_name(package) in base for package in packages)
    }
    find, known = PathFinder.find_spec, importlib.metadata.distribution

    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        return None if name.partition(".")[0] in gone else find(name, path)

    def distribution(distribution_name: str) -> importlib.metadata.Distribution:
        if canonicalize_name(distribution_name) not in base:
            raise importlib.metadata.PackageNotFoundError(distribution_name)
        return known(distribution_name)

    setattr(PathFinder, "find_spec", staticmethod(find_spec))  # noqa: B010 (mypy knows it as a method)
    importlib.metadata.distribution = distribution
    for name in list(sys.modules):
        if name.partition(".")[0] in gone:
            del sys.modules[name]


def connect_quickly() -> None:
    """No server listens where these commands connect; a second of waiting for that is enough."""
    from loadgen.targets import grpc_target

    grpc_target.CONNECT_S = 0.2


def run(program: str, arguments: Sequence[str]) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of one command; 1 and a traceback for what it does not catch."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            if program == "baton":
                from services.cli.main import main as baton

                code = baton(arguments)
            else:
                from loadgen.cli import main as loadgen

                code = loadgen(arguments)
        except SystemExit as ended:
            code = int(ended.code or 0)
        except BaseException:
            code = 1
            traceback.print_exc()
    return code, out.getvalue(), err.getvalue()


def failures_with(extra: str, modules: Sequence[str]) -> str:
    """A line for each failure of an install with this extra: of a process that is forked from this one, which
    has loaded nothing but what every environment has."""
    packages_of_modules()
    reader, writer = os.pipe()
    if child := os.fork():
        os.close(writer)
        with open(reader, encoding="utf-8") as found:
            lines = found.read()
        _, status = os.waitpid(child, 0)
        return lines if status == 0 else f"{lines}\nit ended with status {status}"
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as out:
        take_away(extra)
        out.write("\n".join([*import_failures(modules), *help_failures()]))
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1:] == ["extras"]:
        print(json.dumps([failures_with(extra, modules) for extra, *modules in json.load(sys.stdin)]))
        sys.exit()
    take_away()
    connect_quickly()
    print(json.dumps([run(program, arguments) for program, *arguments in json.load(sys.stdin)]))
