"""A `docker` that builds nothing: it records how it was called, and answers as docker with buildx does."""

from __future__ import annotations

import json
from pathlib import Path

BASE_DIGEST = "sha256:" + "b" * 64

_PROGRAM = """#!{python}
import json, os, sys
arguments = sys.argv[1:]
folder = {folder!r}
with open(os.path.join(folder, "calls"), "a") as calls:
    calls.write(json.dumps([arguments, os.environ.get("SOURCE_DATE_EPOCH")]) + "\\n")
answers = json.load(open(os.path.join(folder, "answers")))
for start, (code, out, err) in answers.items():
    if " ".join(arguments).startswith(start):
        sys.stdout.write(out)
        sys.stderr.write(err)
        sys.exit(code)
if "--metadata-file" in arguments:
    image = arguments[arguments.index("--tag") + 1]
    digest = "sha256:" + ("1" if "router" in image else "2") * 64
    with open(arguments[arguments.index("--metadata-file") + 1], "w") as facts:
        json.dump({{"containerimage.digest": digest}}, facts)
"""
_ANSWERS = {
    "buildx version": (0, "github.com/docker/buildx v0.24.0\n", ""),
    "buildx inspect": (0, "Name:          mine\nDriver:        docker-container\n", ""),
    "buildx imagetools": (0, json.dumps({"digest": BASE_DIGEST}), ""),
}


class FakeDocker:
    """Lies in a folder that a test puts into PATH."""

    def __init__(self, folder: Path, python: str, **answers: tuple[int, str, str]) -> None:
        """`answers` replace those of the subcommands of buildx: exit code, stdout, stderr."""
        self._folder = folder
        program = folder / "docker"
        program.write_text(_PROGRAM.format(python=python, folder=str(folder)), encoding="utf-8")
        program.chmod(0o755)
        changed = {f"buildx {name}": answer for name, answer in answers.items()}
        (folder / "answers").write_text(json.dumps(_ANSWERS | changed), encoding="utf-8")

    def builds(self) -> list[tuple[list[str], str]]:
        """Arguments and SOURCE_DATE_EPOCH of each build."""
        calls = self._folder / "calls"
        lines = calls.read_text(encoding="utf-8").splitlines() if calls.exists() else []
        return [(call, epoch) for call, epoch in map(json.loads, lines) if call[:2] == ["buildx", "build"]]
