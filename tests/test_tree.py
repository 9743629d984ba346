"""No import cycle of files or of folders; small files and folders; and each folder says who may import it."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Set
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ["baton", "bench", "deploy", "kvtransfer", "loadgen", "models", "services"]
UNPACKAGED = ["tools"]
GENERATED = "baton/v1"
# "Imported by …", "only … imports it", "any package may import it", "nothing outside imports them".
IMPORTERS = re.compile(
    r"\b(imported (only )?(by|from|where)|imports? (it|them)|may import|never imports)\b", re.I
)
# Tests use what callers use: private names of others, all in all, and where there are none.
MOST_PRIVATE_NAMES = 15
NO_PRIVATE_NAMES = ("bench", "cli", "cluster", "decode", "e2e", "kvtransfer", "router", "state", "worker")
# They begin with an underscore, and are documented.
PUBLIC = frozenset({"_asdict", "_exit", "_replace"})


@pytest.fixture(scope="module")
def imports() -> Mapping[str, Set[str]]:
    """Module → the modules that it imports, within functions and for type checkers alone too."""
    graph = grimp.build_graph(PACKAGES[0], *PACKAGES[1:], cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def test_files_import_one_another_without_a_cycle(imports: Mapping[str, Set[str]]) -> None:
    assert len(imports) > 600
    assert cycle(imports) is None


def test_folders_import_one_another_without_a_cycle(imports: Mapping[str, Set[str]]) -> None:
    folders: dict[str, set[str]] = defaultdict(set)
    for module, imported in imports.items():
        folders[folder_of(module)] |= {folder_of(one) for one in imported} - {folder_of(module)}
    assert len(folders) > 80
    assert cycle(folders) is None


def test_packages_import_one_another_without_a_cycle(imports: Mapping[str, Set[str]]) -> None:
    packages: dict[str, set[str]] = defaultdict(set)
    for module, imported in imports.items():
        top = module.partition(".")[0]
        packages[top] |= {one.partition(".")[0] for one in imported} - {top}
    assert packages["services"] >= {"baton", "kvtransfer"}
    assert cycle(packages) is None


def test_a_cycle_is_found() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": set()}) is None
    assert set(cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) or ()) == {"b", "c"}


def test_folders_are_small() -> None:
    for folder, files in folders_of([*PACKAGES, *UNPACKAGED]):
        assert len(files) <= 15, f"{folder} has {len(files)} files"
    for folder, files in folders_of(["tests"]):
        assert len(files) <= 30, f"{folder} has {len(files)} files"


def test_files_are_short() -> None:
    for _, files in folders_of([*PACKAGES, *UNPACKAGED]):
        for path in files:
            assert len(path.read_text().splitlines()) <= 400, path


def test_each_package_says_what_it_is_and_who_imports_it() -> None:
    for folder, _ in folders_of(PACKAGES):
        text = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text())) or ""
        assert len(text.split()) >= 8, f"{folder} does not say what it is"
        assert IMPORTERS.search(" ".join(text.split())), f"{folder} does not say who imports it"


def test_tests_use_few_private_names() -> None:
    used = Counter[str]()
    for path in (ROOT / "tests").rglob("*.py"):
        used[path.relative_to(ROOT / "tests").parts[0]] += sum(1 for _ in private_names(path.read_text()))
    assert sum(used.values()) <= MOST_PRIVATE_NAMES, used
    assert {folder: used[folder] for folder in NO_PRIVATE_NAMES if used[folder]} == {}


def test_private_names_are_found() -> None:
    text = """
from a import _b
c._d.e(self._f, cls._g, super()._h, c.__i__, c._replace())
patch.setattr(c, "_j", 0)
patch.setattr("a.c._k", 0)
class K:
    def l(self): self.m._n
"""
    assert sorted(private_names(text)) == ["_b", "_d", "_j", "_k", "_n"]


# What every file has of which `private_names` finds something: parsing a file takes far longer.
MAY_HAVE_PRIVATE_NAMES = re.compile(
    r"(?<!\bself)(?<!\bcls)\s*\.\s*_[^\W_]"
    r"|\b(?:set|del)attr\b"
    r"|^\s*from\s.*\simport\s(?:\s*\([^)]*?|.*?)\b_[^\W_]",
    re.MULTILINE,
)


def private_names(text: str) -> Iterator[str]:
    """The private names of modules, and of objects but the own one, that a file imports, reads or patches."""
    if not MAY_HAVE_PRIVATE_NAMES.search(text):
        return
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.ImportFrom(names=imported):
                names = [one.name for one in imported]
            case ast.Attribute(value=ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super"))):
                continue
            case ast.Attribute(attr=name):
                names = [name]
            case ast.Call(func=ast.Attribute(attr="setattr" | "delattr"), args=arguments):
                values = [one.value for one in arguments[:2] if isinstance(one, ast.Constant)]
                names = [value.rpartition(".")[2] for value in values if isinstance(value, str)]
            case _:
                continue
        yield from (one for one in names if re.match(r"_[^_]", one) and one not in PUBLIC)


def folders_of(roots: list[str]) -> Iterator[tuple[str, list[Path]]]:
    """Each folder with modules, as a path from the root, and its modules but `__init__.py`."""
    for root in roots:
        found: dict[str, list[Path]] = defaultdict(list)
        for path in (ROOT / root).rglob("*.py"):
            found[path.parent.relative_to(ROOT).as_posix()].append(path)
        for folder, paths in sorted(found.items()):
            if folder != GENERATED:
                yield folder, [path for path in paths if path.name != "__init__.py"]


def folder_of(module: str) -> str:
    """The folder of a module; a package's own `__init__` is in it."""
    is_folder = (ROOT / module.replace(".", "/")).is_dir()
    return module if is_folder else module.rpartition(".")[0]


def cycle(graph: Mapping[str, Set[str]]) -> list[str] | None:
    """The nodes of a cycle in the order of its edges, the first one again at its end; None: there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return None
