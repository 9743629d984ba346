"""Keeps a core busy until the process that started it ends: python -m bench.decode.burner"""

from __future__ import annotations

from baton.base.parent_death import die_with_parent


def main() -> None:
    die_with_parent()
    number = 1
    while True:
        number = number * 1103515245 + 12345 & 0x7FFFFFFF


if __name__ == "__main__":
    main()
