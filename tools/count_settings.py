"""Counts what a reader of the configuration has to know, of one commit or of two side by side.

    python tools/count_settings.py [COMMIT [COMMIT]]

classes     pydantic models under services/common/config, base included
readers     modules of services/cli and services/common/config that parse YAML or validate a model
of up       settings of `baton up`: leaves of its tree
of files    settings of all configuration files of processes together: leaves of all trees
role flags  flags that set a key of `engine_of_role` for the workers of one role; such a key is none of these
            settings, as `engine_of_role` is one whose keys are those of `engine`

Read from the source alone, so that a commit of another layout can be counted; without a commit, HEAD.
A field that is made by `fixed` is no setting: no file can have it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping

from tools.count_lines import _git

CONFIG = "services/common/config"
READING = ("services/cli", CONFIG)
# Root models of files, as they have been called; the first is that of `baton up`.
ROOTS = (
    ("UpConfig", "Settings"),
    ("RouterFile",),
    ("WorkerFile",),
    ("WorkerGroupFile",),
    ("SuperviseFile",),
)
# Sections of the tree that `baton up` does not read.
NOT_OF_UP = ("tls", "require_tls", "model_source", "worker", "prefix_secret_file")
NOT_OF_UP_STATE = ("state.redis_url_file", "state.journal_key_file")

Models = Mapping[str, ast.ClassDef]


def main() -> None:
    commits = sys.argv[1:] or ["HEAD"]
    counted = [count(commit) for commit in commits]
    print(f"{'':12}" + "".join(f"{commit[:12]:>14}" for commit in commits))
    for name in counted[0]:
        print(f"{name:12}" + "".join(f"{each[name]:>14}" for each in counted))


def count(commit: str) -> dict[str, int]:
    """The figures of a commit, by name."""
    sources = {path: ast.parse(_git("show", f"{commit}:{path}")) for path in _paths(commit)}
    models = _models(tree for path, tree in sources.items() if path.startswith(CONFIG))
    trees = [set(_leaves(models, root)) for names in ROOTS for root in names if root in models]
    return {
        "classes": len(models),
        "readers": sum(_reads(tree) for tree in sources.values()),
        "of up": len(trees[0] if "UpConfig" in models else set(filter(_is_of_up, trees[0]))),
        "of files": len(set[str]().union(*trees)),
        "role flags": sum(map(_role_flags, sources.values())),
    }


def _paths(commit: str) -> list[str]:
    listed = _git("ls-tree", "-r", "--name-only", commit, *READING).splitlines()
    return [path for path in listed if path.endswith(".py")]


def _models(trees: Iterator[ast.Module]) -> dict[str, ast.ClassDef]:
    """The classes that descend from pydantic's, by name."""
    classes = {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}

    def is_model(name: str) -> bool:
        return name == "BaseModel" or (name in classes and any(map(is_model, _bases(classes[name]))))

    return {name: node for name, node in classes.items() if is_model(name)}


def _bases(node: ast.ClassDef) -> list[str]:
    return [base.id for base in node.bases if isinstance(base, ast.Name)]


def _leaves(models: Models, name: str, prefix: str = "") -> Iterator[str]:
    """The paths of a model's settings; those of sections in place of the sections."""
    node = models[name]
    for base in _bases(node):
        if base in models:
            yield from _leaves(models, base, prefix)
    for field in node.body:
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        named = {one.id for one in ast.walk(field.annotation) if isinstance(one, ast.Name)}
        path = prefix + field.target.id
        if inner := named & set(models):
            yield from _leaves(models, inner.pop(), f"{path}.")
        elif not _is_fixed(field.value) and path != "auth.none":
            yield path


def _is_fixed(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "fixed"


def _role_flags(tree: ast.Module) -> int:
    """Length of the dict `ROLE_FLAGS`, where a module defines it."""
    return sum(
        len(node.value.keys)
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict)
        and isinstance(node.target, ast.Name) and node.target.id == "ROLE_FLAGS"
    )  # fmt: skip


def _is_of_up(path: str) -> bool:
    return path.partition(".")[0] not in NOT_OF_UP and path not in NOT_OF_UP_STATE


def _reads(tree: ast.Module) -> bool:
    return any(
        isinstance(node, ast.Attribute) and node.attr in ("model_validate", "safe_load")
        for node in ast.walk(tree)
    )


if __name__ == "__main__":
    main()
