"""The documentation names files, settings, metrics, log events, flags, rules and links that exist, and every
decision says whether it is in force.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from services.common.config.settings_tree.listing import settings_of
from services.common.config.settings_tree.views import UP
from services.common.config.types import Audience
from tools import fields_page, settings_page
from tools.metrics_page import FAMILIES, PAGE, with_tables

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "tests" / "README.md",
    *sorted(DOCS.glob("*.md")),
    *sorted((DOCS / "decisions").glob("*.md")),
]
SERVING = ("baton", "kvtransfer", "services")
PRODUCTION = (*SERVING, "loadgen")
# Methods of a logger that write at level warning or above.
ALARMING = ("warning", "error", "exception", "critical")
# First parts of a path; other text in backticks with a slash in it is none.
FOLDERS = (
    "baton/",
    "kvtransfer/",
    "services/",
    "loadgen/",
    "bench/",
    "tests/",
    "proto/",
    "docs/",
    "tools/",
    "models/",
    "deploy/",
)
# Records of decisions by their numbers. At most so many may be in force, unchanged by any later one or page.
RECORDS = {path.name[:4]: path for path in sorted((DOCS / "decisions").glob("[0-9]*.md"))}
MOST_IN_FORCE = 35
STATUS = re.compile(
    r"Status: (?:in force|changed by (?P<by>[^;]+)|superseded by (?P<after>[^;]+))(?:; changes (?P<of>.+))?"
)


def _ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=_ids)
def test_files_in_backticks_exist(page: Path) -> None:
    named = [text.rstrip("/") for text in re.findall(r"`([\w./*-]+)`", page.read_text("utf-8"))]
    paths = [text for text in named if text.startswith(FOLDERS)]
    assert [path for path in paths if not list(ROOT.glob(path))] == []


@pytest.mark.parametrize("page", PAGES, ids=_ids)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", _prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        name, _, heading = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists() or (heading and heading not in _anchors(file)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("change", ["Mixture of experts", "Drafts: several tokens a step", "Several devices"])
def test_contributing_names_the_files_of_larger_changes_and_why(change: str) -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    section = page.split(f"### {change}\n")[1].split("\n#")[0]
    lines = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    assert len(lines) >= 3
    for files, why in lines:
        paths = re.findall(r"`([^`]+)`", files)
        assert [path for path in paths if not (ROOT / path).exists()] == []
        assert len(why.split()) > 3, files


def test_the_architecture_page_names_every_production_folder() -> None:
    page = (DOCS / "architecture.md").read_text("utf-8")
    folders = {
        path.parent.relative_to(ROOT) for top in PRODUCTION for path in (ROOT / top).rglob("__init__.py")
    }
    covered = {Path(text) for text in re.findall(r"`([\w./-]+)`", page)}
    missing = [
        folder for folder in folders if not any(folder == one or one in folder.parents for one in covered)
    ]
    assert sorted(map(str, missing)) == []


def test_the_page_of_settings_is_up_to_date() -> None:
    page = settings_page.PAGE.read_text("utf-8")
    assert page == settings_page.with_tables(page), "run make docs"
    assert "### " not in page.partition("<!-- end of settings: start -->")[0]


def test_every_setting_is_declared_with_what_its_reader_needs() -> None:
    public = [one for one in settings_of() if one.fixed is None]
    page = settings_page.PAGE.read_text("utf-8")
    for one in public:
        assert len(one.sentence.split()) >= 3, one.path
        assert one.who in get_args(Audience), one.path
        assert one.unit or one.is_section, f"{one.path}: a number needs a unit"
        assert f"\n| `{one.path}` |" in page, one.path
    assert len([one for one in public if one.who == "everyone"]) == 12
    assert len({one.key for one in public if one.flag}) == len([one for one in public if one.flag])


def test_baton_up_has_few_settings() -> None:
    """Settings are counted as by `tools/count_settings.py`: flags of one role are no settings of their
    own."""
    paths = [one.path for one in UP.settings if one.fixed is None and not one.is_section]
    assert len([path for path in paths if not path.startswith("engine_of_role.")]) <= 90


def test_what_is_no_setting_has_a_reason() -> None:
    fixed = [one for one in settings_of() if one.fixed is not None]
    assert len(fixed) > 20
    assert all(len((one.fixed or "").split()) >= 3 for one in fixed)


def test_the_metrics_page_is_up_to_date() -> None:
    page = PAGE.read_text("utf-8")
    assert page == with_tables(page), "run make docs"


def test_the_fields_page_is_up_to_date() -> None:
    page = fields_page.PAGE.read_text("utf-8")
    assert page == fields_page.with_tables(page), "run make docs"


@pytest.mark.parametrize("page", PAGES, ids=_ids)
def test_metrics_in_backticks_exist(page: Path) -> None:
    known = {family.name for families in FAMILIES.values() for family in families}
    named = set(re.findall(r"\bbaton_(?:router|worker)_\w+", page.read_text("utf-8")))
    assert {name.removesuffix("_bucket") for name in named} - known == set()


def test_log_events_of_the_troubleshooting_page_exist() -> None:
    source = "".join(path.read_text("utf-8") for top in PRODUCTION for path in (ROOT / top).rglob("*.py"))
    events = _documented_events()
    assert events
    assert [event for event in events if f'"{event}"' not in source] == []
    assert len(events) == len(set(events)), "an event is there twice"


def test_every_warning_and_error_of_the_logs_is_on_the_troubleshooting_page() -> None:
    logged = {event for top in SERVING for path in (ROOT / top).rglob("*.py") for event in _alarms(path)}
    assert len(logged) > 60
    assert logged - set(_documented_events()) == set()


def _documented_events() -> list[str]:
    page = (DOCS / "troubleshooting.md").read_text("utf-8")
    section = page.partition("## Log events")[2].partition("\n## ")[0]
    return [name for line in section.splitlines() if line.startswith("| `") for name in _first_cell(line)]


def _alarms(path: Path) -> Iterator[str]:
    """The events that a file logs at level warning or above, or at a level chosen while it runs."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="log" | "_log" | "_LOG"), attr=level), args=[event, *_]
            ) if level in ALARMING:
                pass
            case ast.Call(
                func=ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id="log" | "_log" | "_LOG"), _]),
                args=[event, *_],
            ):
                pass
            case _:
                continue
        names = [one.value for one in ast.walk(event) if isinstance(one, ast.Constant)]
        assert names, f"{path}: the event of {ast.unparse(node)} is not a literal"
        yield from (str(name) for name in names)


def _prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _first_cell(line: str) -> list[str]:
    return re.findall(r"`([^`]+)`", line.split("|")[1])


def test_every_rule_of_the_scheduling_page_names_its_code_and_its_test() -> None:
    rules = _rules()
    assert len(rules) > 80
    missing = {place for *_, code, test in rules for place in (code, test) if not _exists(place)}
    assert missing == set()
    assert [test for *_, test in rules if not test.startswith("tests/") or "::test_" not in test] == []


def test_values_of_the_scheduling_page_are_those_of_the_code() -> None:
    settings = _defaults()
    wrong = {}
    for rule, value, code, _ in _rules():
        known = [settings[code]] if code in settings else [f"{one:.12g}" for one in _numbers(code)]
        if re.findall(r"[\d.]+|true|false", value) != known:
            wrong[rule] = (value, known)
    assert wrong == {}


def test_settings_of_the_scheduling_page_exist() -> None:
    page = (DOCS / "scheduling.md").read_text("utf-8")
    named = set(re.findall(r"`((?:router|engine)\.[a-z_]+)`", page))
    assert named - _defaults().keys() == set()


def _rules() -> list[list[str]]:
    """The rows of the tables of rules: a rule, its value, what implements it, the test that holds it."""
    lines = (DOCS / "scheduling.md").read_text("utf-8").splitlines()
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines if line[:2] == "| "]
    return [row for row in rows if len(row) == 4 and row[0] != "rule"]


def _defaults() -> dict[str, str]:
    """The defaults of all settings, those that are fixed included."""
    return {one.path: one.default for one in settings_of()}


def _exists(place: str) -> bool:
    """True if `file::name` is defined there, all of several names, or if it is a setting."""
    file, _, names = place.partition("::")
    if not names:
        return file in _defaults()
    path = ROOT / file
    return path.is_file() and set(names.split(", ")) <= _defined(ast.parse(path.read_text("utf-8"))).keys()


def _defined(tree: ast.Module) -> dict[str, ast.AST]:
    """Names that a module defines: functions, classes, `Class.method`, and constants with their values."""
    found: dict[str, ast.AST] = {}
    for node in tree.body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                found[node.name] = node
            case ast.ClassDef():
                found[node.name] = node
                found |= {
                    f"{node.name}.{one.name}": one for one in node.body if isinstance(one, ast.FunctionDef)
                }
            case ast.Assign(targets=[ast.Name(name)], value=value):
                found[name] = value
            case ast.AnnAssign(target=ast.Name(name), value=ast.expr() as value):
                found[name] = value
            case ast.Assign(targets=[ast.Tuple(names)], value=ast.Tuple(values)):
                found |= {
                    name.id: value
                    for name, value in zip(names, values, strict=True)
                    if isinstance(name, ast.Name)
                }
            case _:
                continue
    return found


def _numbers(place: str) -> list[float]:
    """The values of the constants that `file::name` names; none of a function or class."""
    file, _, names = place.partition("::")
    if not names:
        return []
    defined = _defined(ast.parse((ROOT / file).read_text("utf-8")))
    values = [defined.get(name) for name in names.split(", ")]
    return [_number(value) for value in values if isinstance(value, ast.expr)]


def _number(value: ast.expr) -> float:
    match value:
        case ast.BinOp(left, ast.Div(), right):
            return _number(left) / _number(right)
        case _:
            return float(ast.literal_eval(value))


def test_every_decision_says_its_status() -> None:
    assert [path.name for path in RECORDS.values() if not STATUS.fullmatch(_status_line(path))] == []
    in_force = [path for path in RECORDS.values() if _status_line(path).startswith("Status: in force")]
    assert 0 < len(in_force) <= MOST_IN_FORCE, "supersede some, or have a page say what is so"


def test_a_decision_that_is_changed_and_the_one_that_changes_it_name_each_other() -> None:
    changed = {(later, number) for number in RECORDS for later in _linked(number, "by")}
    changes = {(number, earlier) for number in RECORDS for earlier in _linked(number, "of")}
    assert changed == changes
    assert [pair for pair in changes if pair[0] <= pair[1]] == []


def test_what_supersedes_a_decision_names_it() -> None:
    silent = []
    for number, path in RECORDS.items():
        for target in re.findall(r"\]\(([^)#]+)", _status(number, "after")):
            successor = (path.parent / target).resolve()
            if path.name not in _prose(successor):
                silent.append((number, target))
    assert silent == []


def test_a_decision_that_speaks_of_a_later_one_says_so_in_its_status() -> None:
    """So none is amended in silence: who adds a link to a later record changes the status too."""
    silent = {}
    for number, path in RECORDS.items():
        if _status(number, "after"):
            continue
        later = {one for one in re.findall(r"\]\((\d{4})-", _body(path)) if one > number}
        if more := later - _linked(number, "by"):
            silent[number] = more
    assert silent == {}


def test_the_index_of_decisions_has_each_with_its_title_and_status() -> None:
    page = (DOCS / "decisions" / "README.md").read_text("utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| [")]
    assert rows == [_index_row(number) for number in RECORDS]


def _index_row(number: str) -> str:
    path = RECORDS[number]
    title = path.read_text("utf-8").splitlines()[0].removeprefix(f"# {number}: ")
    status = _status_line(path).removeprefix("Status: ").split("; changes ")[0]
    return f"| [{number}]({path.name}) | {title} | {status} |"


def _status_line(path: Path) -> str:
    """The third line of a record, behind its title and an empty line."""
    return path.read_text("utf-8").splitlines()[2]


def _body(path: Path) -> str:
    return "\n".join(path.read_text("utf-8").splitlines()[3:])


def _status(number: str, part: str) -> str:
    found = STATUS.fullmatch(_status_line(RECORDS[number]))
    return (found and found[part]) or ""


def _linked(number: str, part: str) -> set[str]:
    """The records that a part of a status links to."""
    return set(re.findall(r"\]\((\d{4})-", _status(number, part)))
