"""The commands of `baton`: they fit a screen and are all documented; old spellings run; a wrong word is
answered with the nearest one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from services.cli import old_spellings
from services.cli.commands import COMMANDS, GROUPS, SECTIONS
from services.cli.main import main
from services.cli.parse import overview, parse, parser_of
from tests.support.documented_commands import documented

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "commands.md").read_text("utf-8")
FIRST_WORDS = {name.partition(" ")[0] for name in COMMANDS}
# What each old command needs, and something of the help that it then gets.
OLD = {
    "worker-group": "usage: baton worker group --prefill N --decode N -c FILE [FLAGS]",
    "supervise": "usage: baton ray supervise -c FILE [FLAGS]",
    "stop-workers": "--within SECONDS",
    "ray-certificate": "--authority DIR",
    "fetch-model": "usage: baton model fetch",
    "warm-kernels": "usage: baton model compile",
    "top": "--interval SECONDS",
}


def ended(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command line that ends before its command runs."""
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    assert isinstance(exited.value.code, int)
    return exited.value.code, *capsys.readouterr()


def test_the_help_fits_a_screen_and_has_each_command_once(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ended(capsys, "--help")
    assert (code, err) == (0, "")
    assert out == overview() + "\n"
    assert len(out.splitlines()) <= 24
    assert max(map(len, out.splitlines())) <= 80
    listed = [name for names in SECTIONS.values() for name in names]
    assert len(listed) == len(set(listed)) <= 12
    assert set(listed) == FIRST_WORDS
    assert re.findall(r"^  (\S+) ", out, re.MULTILINE) == listed


@pytest.mark.parametrize("group", [name for name in GROUPS if name not in COMMANDS])
def test_the_help_of_a_group_lists_its_commands(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ended(capsys, group, "--help")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    inner = [name.partition(" ")[2] for name in COMMANDS if name.startswith(f"{group} ")]
    assert re.findall(r"^  (\S+) ", out, re.MULTILINE) == inner
    code, out, err = ended(capsys, group)
    assert (code, out) == (2, "")
    assert f"a command is missing: {', '.join(inner)} (see" in err


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_a_short_usage(name: str) -> None:
    parser = parser_of(name)
    text = parser.format_help()
    assert text.startswith(f"usage: baton {name} ")
    assert len(parser.format_usage().splitlines()) <= 3


def test_the_page_shows_the_help_and_names_every_command() -> None:
    assert f"$ baton --help\n{overview()}\n```" in PAGE
    named = set(re.findall(r"`baton ([^`]+)`", PAGE.partition("| page |")[2].partition("##")[0]))
    assert named == set(COMMANDS)


def test_the_map_of_old_spellings_is_on_the_page() -> None:
    rows = dict(re.findall(r"^\| `baton (.+?)` \| `baton (.+?)` \|$", PAGE, re.MULTILINE))
    assert len(rows) == 18
    changed = {old: new for old, new in rows.items() if old != new}
    assert changed == {old: " ".join(new) for old, new in old_spellings.NEW.items()}
    assert {old for old in rows if old not in changed} <= FIRST_WORDS


@pytest.mark.parametrize("old", OLD)
def test_an_old_spelling_runs_with_one_line(old: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ended(capsys, old, "--help")
    assert code == 0
    assert OLD[old] in out
    assert err.count("\n") == 1
    assert f"`baton {old}` is now `baton {' '.join(old_spellings.NEW[old])}`" in err


def test_the_version_in_both_spellings(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ended(capsys, "--version")
    assert (code, err) == (0, "")
    assert re.fullmatch(r"baton \S.*\n", out)
    code, same, err = ended(capsys, "version")
    assert (code, same) == (0, out)
    assert err.count("\n") == 1
    assert set(old_spellings.NEW) == {*OLD, "version"}


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("statsu", "baton: error: unknown command statsu, did you mean status? (see baton --help)"),
        ("fetch", "did you mean model fetch?"),
        ("worker-grop", "did you mean worker group?"),
        ("help", "did you mean --help?"),
        ("zzz", "baton: error: unknown command zzz (see baton --help)"),
        ("--versoin", "did you mean --version?"),
        ("", "baton: error: a command is missing (see baton --help)"),
        ("model fecth", "baton model: error: unknown command fecth, did you mean fetch?"),
        ("model --config f", "baton model: error: a command is missing: fetch, compile"),
        ("worker gruop", "baton worker: error: unknown command gruop, did you mean group?"),
        ("keys zzz", "baton keys: error: unknown command zzz (see baton keys --help)"),
        ("worker --rol both", "baton worker: error: unrecognized argument --rol, did you mean --role?"),
        ("drain --ruoter", "unrecognized argument --ruoter, did you mean --router?"),
        ("status --jsn=1", "baton status: error: unrecognized argument --jsn, did you mean --json?"),
        ("up DIR", "baton up: error: unrecognized argument DIR (see baton up --help)"),
        ("ray certificate --host a", "the following arguments are required: --authority, --out"),
        ("keys add --sc generate", "unrecognized argument --sc"),
    ],
)
def test_a_wrong_word_is_one_line_with_the_nearest(
    line: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = ended(capsys, *line.split())
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert hint in err


@pytest.mark.parametrize("command", documented("baton"), ids=" ".join)
def test_commands_of_the_pages_are_parsed(command: tuple[str, ...]) -> None:
    """The command line is parsed by its own parser; nothing is run."""
    assert command[0] not in old_spellings.NEW
    assert callable(parse(command).command)


def test_there_are_documented_commands() -> None:
    assert len(documented("baton")) > 20
