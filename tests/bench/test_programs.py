"""The measuring programs by their command lines: six subjects and their parts, whose help fits a screen, and
none that the documentation names and that is not there."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from bench.options import PARTS, run_program

ROOT = Path(__file__).parents[2]
SUBJECTS = ("cluster", "decode", "goodput", "prefill", "router", "transfer")
PROGRAMS = [(subject, part) for subject in SUBJECTS for part in ("", *PARTS.get(subject, {}))]
# Runs by itself, by a Python that has vLLM too.
OTHERS = ("bench.markov_text",)


@pytest.mark.parametrize(("subject", "part"), PROGRAMS, ids=lambda word: word or "itself")
def test_the_help_fits_a_screen(
    subject: str, part: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["program", *([part] if part else []), "--help"])
    with pytest.raises(SystemExit) as ended:
        run_program(subject, import_module(f"bench.{subject}.__main__").main)
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0
    assert lines[0].startswith(f"usage: python -m bench.{subject} {part}".rstrip())
    assert len(lines) <= 48
    assert max(map(len, lines)) <= 110
    assert (ROOT / "bench" / subject / f"{part or '__main__'}.py").is_file()


def test_programs_that_the_documentation_names_are_there() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    named = {
        (found[1], found[2] or "")
        for page in pages
        for found in re.finditer(r"python -m (bench[\w.]*)(?: ([a-z]+)\b)?", page.read_text("utf-8"))
        if found[1] not in OTHERS
    }
    programs = {(f"bench.{subject}", part) for subject, part in PROGRAMS}
    assert len(named) > len(SUBJECTS)
    assert named - programs == set()
