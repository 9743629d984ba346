"""Texts that users read first (settings, metrics, request fields, commands, pages) stand alone: each begins
with the thing that it is about, and has the field's words for it. So do docstrings, of tests too, and
comments of the wire, for readers of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.request_fields.table import FIELDS
from services.cli.commands import COMMANDS, GROUPS
from services.common.config.settings_tree.listing import settings_of
from tools.metrics_page import FAMILIES

ROOT = Path(__file__).parents[1]
# Openings that need what stands before them.
OPENINGS = ("of", "what", "whether", "so many", "such", "that", "those", "these", "any", "as")
# Phrases for which there is a term: the one behind each.
PHRASES = {
    "prefill duty": "prefill-designated worker",
    "on duty": "prefill-designated",
    "for want of": "without, because of",
    "counts the less": "is weighted by",
    "so long each": "of seconds each",
    "settles with": "rebalances with",
    "stalled rows": "paused rows",
    "foreign slots": "slots of other routers",
    "limits of the time per output token": "TPOT limits",
    "limits of the time to first token": "TTFT limits",
    "gives no audit": "reports no counters",
}
# Words that a docstring does not begin with: it begins with a verb in the third person, or with a noun phrase
# that needs no signature.
DOCSTRING_OPENINGS = (
    *OPENINGS,
    *("so much", "so long", "how", "where", "when", "why", "which", "who", "whom", "whose", "by", "one's"),
    *("its", "it", "their", "they", "here", "for", "to", "from", "at", "in", "with", "since", "while"),
    *("against", "under", "if", "until", "once", "within", "none", "nothing", "something"),
)  # fmt: skip
DOCSTRING_PHRASES = {
    **PHRASES,
    "so many": "the argument's name, or a number",
    "so much": "the argument's name, or an amount",
    "so long": "the argument's name, or seconds",
    "another's": "of another",
    "its turn": "its position",
    "once a turn": "once per iteration",
    "anew": "again",
    "but for": "except",
    "heeds": "obeys",
    "nobody": "no caller, no process",
    "whoever": "the caller that",
}
PACKAGES = ("baton", "services", "kvtransfer", "loadgen", "models", "tools", "bench", "deploy", "tests")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROTOS = sorted((ROOT / "proto").rglob("*.proto"))


def _texts() -> Iterator[tuple[str, str]]:
    """Each text with the name of what it is about."""
    yield from ((one.path, one.sentence) for one in settings_of() if one.fixed is None)
    yield from ((family.name, family.help) for part in FAMILIES.values() for family in part)
    yield from ((f"baton {name}", one.summary) for name, one in COMMANDS.items())
    yield from ((f"baton {name}", summary) for name, summary in GROUPS.items())
    yield from ((field.name, field.meaning) for field in FIELDS if field.meaning)


def test_texts_begin_with_what_they_are_about() -> None:
    texts = list(_texts())
    assert len(texts) > 250
    wrong = {
        name: text for name, text in texts if re.match(rf"({'|'.join(OPENINGS)})\b", text, re.IGNORECASE)
    }
    assert wrong == {}


def test_texts_have_the_fields_words() -> None:
    found = {name: phrase for name, text in _texts() for phrase in PHRASES if phrase in text.lower()}
    assert found == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_have_the_fields_words(page: Path) -> None:
    text = " ".join(page.read_text("utf-8").lower().split())
    assert [phrase for phrase in PHRASES if phrase in text] == []


def _docstrings(node: ast.Module | ast.ClassDef, inside: str) -> Iterator[tuple[str, str]]:
    """Docstrings of a module or class and of its public members, by name."""
    if text := ast.get_docstring(node):
        yield inside, text
    members = [
        one for part in node.body for one in (part.body if isinstance(part, ast.If | ast.Try) else [part])
    ]
    for member in members:
        if not isinstance(member, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        name = f"{inside} {member.name}"
        if member.name.startswith("_"):
            continue
        if isinstance(member, ast.ClassDef):
            yield from _docstrings(member, name)
        elif text := ast.get_docstring(member):
            yield name, text


# Nodes that may have definitions within them.
_STATEMENTS = ast.stmt, ast.excepthandler, ast.match_case


def _all_docstrings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Docstrings of a module and of all that it defines, at any depth, with the lines of their owners."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        # Nothing within an expression has a docstring, and most of a tree are expressions.
        todo += [one for one in ast.iter_child_nodes(node) if isinstance(one, _STATEMENTS)]
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if text := ast.get_docstring(node):
            yield str(getattr(node, "lineno", 1)), text


def _opening(text: str) -> list[str]:
    """The faults of a docstring's first word, and of the first words of its further sentences."""
    opening = re.match(rf"({'|'.join(DOCSTRING_OPENINGS)})\b", text, re.IGNORECASE)
    further = re.findall(r"[.:;]\s+(Of|Whether|So many)\b", text)
    first = [f"begins with {opening[0]}"] if opening else []
    return first + [f"a sentence begins with {one}" for one in further]


def _phrases(text: str) -> list[str]:
    """Private phrases in a text, each with the term that is in use for it."""
    words = " ".join(text.lower().split())
    return [f"{phrase}: {term}" for phrase, term in DOCSTRING_PHRASES.items() if phrase in words]


def _faults(text: str) -> list[str]:
    """Faults of a docstring over which a reader who sees nothing else would stumble."""
    short = ["fewer than five words"] if len(text.split()) < 5 else []
    return _opening(text) + short + _phrases(text)


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Comments of a .proto file, consecutive lines joined, each with the number of its first line."""
    first, words = 0, list[str]()
    for number, line in enumerate([*source.splitlines(), ""], 1):
        if line.lstrip().startswith("//"):
            first = first if words else number
            words.append(line.strip().removeprefix("//").strip())
        elif words:
            yield first, " ".join(words)
            words = []


@pytest.mark.parametrize("file", PROTOS, ids=lambda file: file.stem)
def test_comments_of_the_wire_stand_alone(file: Path) -> None:
    found = [
        (line, faults)
        for line, text in _comments(file.read_text("utf-8"))
        if (faults := _opening(text) + _phrases(text))
    ]
    assert found == []


def test_comments_of_the_wire_are_found() -> None:
    source = """// Of one call,
// and its answer.
message Call {
  // Any JSON object.
  string text = 1;
  string plain = 2;
  // Number of calls, so many each.
}
"""
    found = {line: (text, _opening(text) + _phrases(text)) for line, text in _comments(source)}
    assert found[1] == ("Of one call, and its answer.", ["begins with Of"])
    assert found[4] == ("Any JSON object.", ["begins with Any"])
    assert found[7][1] == ["so many: the argument's name, or a number"]
    assert len(found) == 3


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_stand_alone(package: str) -> None:
    files = [file for file in sorted((ROOT / package).rglob("*.py")) if "_pb2" not in file.name]
    found, openings = [], []
    for path in files:
        # One at a time: collections of garbage would go through all trees that are kept.
        tree, file = ast.parse(path.read_text("utf-8")), str(path.relative_to(ROOT))
        found += [(name, faults) for name, text in _docstrings(tree, file) if (faults := _faults(text))]
        openings += [
            (f"{file}:{line}", fault) for line, text in _all_docstrings(tree) for fault in _opening(text)
        ]
    assert files
    assert found == []
    assert openings == [], "those of non-public ones count too"


def test_docstrings_with_faults_are_found() -> None:
    source = '''
class Backlog:
    """Of prompts that take so long each."""

    def add(self, seconds: float) -> None:
        """A prompt came."""

    def total(self) -> float:
        """Sums the predicted seconds of all prompts."""

    def _private(self) -> None:
        """Its own."""

    def shortest(self) -> float:
        """Seconds of the shortest prompt that waits. Of several, the first."""
'''
    found = {name: _faults(text) for name, text in _docstrings(ast.parse(source), "file")}
    assert found["file Backlog"][0] == "begins with Of"
    assert any("so long" in fault for fault in found["file Backlog"])
    assert found["file Backlog add"] == ["fewer than five words"]
    assert found["file Backlog total"] == []
    assert found["file Backlog shortest"] == ["a sentence begins with Of"]
    assert len(found) == 4
    openings = {line: _opening(text) for line, text in _all_docstrings(ast.parse(source))}
    private = {"11": ["begins with Its"], "14": ["a sentence begins with Of"]}
    assert openings == {"2": ["begins with Of"], "5": [], "8": []} | private
