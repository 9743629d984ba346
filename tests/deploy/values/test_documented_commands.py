"""Commands of docs/kubernetes.md are parsed by their programs; files that they name are there."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from loadgen import cli as loadgen_cli
from services.cli.parse import parse
from tests.deploy import tools
from tests.deploy.chart import CHART

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
# Words that a shell has before a command, or in its place.
_SHELL = ("for", "done", "do")


def _blocks() -> list[str]:
    """Scripts of the page's console blocks, without prompts."""
    found = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    return [re.sub(r"^\$ ", "", block, flags=re.MULTILINE) for block in found]


def _commands(script: str) -> Iterator[list[str]]:
    """Simple commands of a script, those in `$(…)` and after `do` too."""
    script = re.sub(r"\\\n\s*", " ", script)
    inner = re.findall(r"\$\(([^()]*)\)", script)
    for line in [*script.splitlines(), *inner]:
        words = shlex.split(re.sub(r"\$\([^()]*\)", "X", line), comments=True)
        command: list[str] = []
        for word in [*words, ";"]:
            if word in ("|", "&&", ";", "do") or word.endswith(";"):
                command += [word[:-1]] if word not in (";", "do") and word.endswith(";") else []
                if command and command[0] not in _SHELL:
                    yield command
                command = []
            else:
                command.append(word)


@cache
def _of(program: str) -> tuple[tuple[str, ...], ...]:
    found = (command for block in _blocks() for command in _commands(block))
    return tuple(dict.fromkeys(tuple(command[1:]) for command in found if command[0] == program))


def test_scripts_are_what_a_shell_takes() -> None:
    blocks = _blocks()
    assert len(blocks) >= 8
    for block in blocks:
        done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, block + done.stderr


def test_every_program_has_a_test() -> None:
    programs = {command[0] for block in _blocks() for command in _commands(block)}
    assert programs == {"helm", "kubectl", "loadgen", "make", "openssl"}


def _parses(main: Callable[[Sequence[str]], object], command: Sequence[str]) -> bool:
    """True if a command line is one of an argparse program: asked for its help with all of its flags."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            main([*command, "--help"])
        except SystemExit as ended:
            return ended.code == 0
    return False


@pytest.mark.parametrize("command", _of("loadgen"), ids=" ".join)
def test_loadgen_knows_its_commands(command: tuple[str, ...]) -> None:
    parser = argparse.ArgumentParser()
    from loadgen.commands import size

    assert command[0] == "size"
    size.add(parser)
    assert parser.parse_args(command[1:]).rates
    assert _parses(loadgen_cli.main, command)


def _within_pods() -> list[tuple[str, ...]]:
    return [command[command.index("--") + 1 :] for command in _of("kubectl") if "--" in command]


def test_baton_knows_the_commands_that_pods_run() -> None:
    commands = _within_pods()
    assert len(commands) >= 3
    for program, *arguments in commands:
        assert program == "baton"
        parsed = parse(arguments)
        assert callable(parsed.command), arguments


def test_make_knows_its_targets() -> None:
    (command,) = _of("make")
    done = subprocess.run(
        ["make", "-n", *command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    from deploy.release import images  # noqa: F401 (what the target runs)

    assert "--push registry.corp:5000/llm" in done.stdout


def test_openssl_draws_a_secret() -> None:
    (command,) = _of("openssl")
    arguments = command[: command.index(">")]
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, timeout=30, check=True)
    assert re.fullmatch(r"[0-9a-f]{64}\n", done.stdout)


def test_files_of_values_are_on_the_page_or_in_the_chart() -> None:
    on_page = set(re.findall(r"```yaml\n# (values-[\w-]+\.yaml)", PAGE))
    # Of a release, or the reader's own, as the text says.
    others = {"values-digests.yaml", "values-chat.yaml", "values-code.yaml"}
    for command in _of("helm"):
        given = [value for flag, value in itertools.pairwise(command) if flag == "-f"]
        for name in (Path(value).name for value in given):
            assert name in on_page | others or (CHART / name).is_file(), name


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("program", ["helm", "kubectl"])
def test_programs_of_kubernetes_know_their_commands(program: str) -> None:
    """Asked for help with all flags of the command, of which an unknown one is an error."""
    path = tools.helm_3() if program == "helm" else tools.kubectl()
    commands = _of(program)
    assert len(commands) >= 6
    for command in commands:
        own = command[: command.index("--")] if "--" in command else command
        done = subprocess.run([str(path), *own, "--help"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{own}: {done.stderr}"
        assert "Usage:" in done.stdout
        unknown = subprocess.run([str(path), *own, "--no-such-flag"], capture_output=True, timeout=60)
        assert unknown.returncode != 0
