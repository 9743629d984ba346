"""Counts production lines of one commit, or of two side by side: code, docstrings, comments, blank lines.

    python tools/count_lines.py [COMMIT [COMMIT]]

Counts Python files of production packages without generated ones; without a commit, of the working tree's
HEAD.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

PACKAGES = ("baton", "kvtransfer", "loadgen", "services")
GENERATED = ("baton/v1/", "baton/request_fields/generated.py")
KINDS = ("files", "code", "docstrings", "comments", "blank")
_ROOT = Path(__file__).parents[1]


def main() -> None:
    commits = sys.argv[1:] or ["HEAD"]
    counted = [count(commit) for commit in commits]
    print(f"{'':12}" + "".join(f"{commit[:12]:>14}" for commit in commits))
    for package in PACKAGES:
        for kind in KINDS:
            figures = [each[package, kind] for each in counted]
            print(f"{package + ' ' + kind:24}" + "".join(f"{figure:>12,}" for figure in figures))
    for kind in KINDS:
        figures = [sum(each[package, kind] for package in PACKAGES) for each in counted]
        more = f"{figures[1] - figures[0]:>+12,}" if len(figures) == 2 else ""
        print(f"{'all ' + kind:24}" + "".join(f"{figure:>12,}" for figure in figures) + more)


def count(commit: str) -> Counter[tuple[str, str]]:
    """Lines by (package, kind) in the production files of a commit."""
    found: Counter[tuple[str, str]] = Counter()
    for path in _git("ls-tree", "-r", "--name-only", commit, *PACKAGES).splitlines():
        if path.endswith(".py") and not path.startswith(GENERATED):
            package = path.partition("/")[0]
            found[package, "files"] += 1
            for kind, lines in lines_of(_git("show", f"{commit}:{path}")).items():
                found[package, kind] += lines
    return found


def lines_of(source: str) -> Counter[str]:
    """Lines of a module by kind; a line with code and a comment is code."""
    total = len(source.splitlines())
    docstrings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    code: set[int] = set()
    comments: set[int] = set()
    layout = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        lines = range(token.start[0], token.end[0] + 1)
        if token.type == tokenize.COMMENT:
            comments.update(lines)
        elif token.type not in layout:
            code.update(lines)
    code -= docstrings
    comments -= code | docstrings
    blank = total - len(code) - len(docstrings) - len(comments)
    return Counter(code=len(code), docstrings=len(docstrings), comments=len(comments), blank=blank)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=_ROOT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
