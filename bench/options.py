"""Command lines of the measuring programs, and how they print a case.

A program is a subject: `python -m bench.SUBJECT [PART] [OPTIONS]`. A part is a module of the subject's folder
with options of its own. Its docstring says what it measures and what each figure means; its help is the
docstring's first paragraph and a line an option.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import import_module
from typing import TYPE_CHECKING

from baton.device.nvidia_libraries import ENVIRONMENT
from bench.shapes import SHAPES, Precision

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_WIDTH, _OPTION_WIDTH = 110, 30
# Subjects whose engine runs in this process. Others start servers, a peer's too, which shall not inherit it.
_ENGINES = ("decode", "prefill")
PARTS: Mapping[str, Mapping[str, str]] = {
    "cluster": {
        "gpu": "a whole cluster on GPUs",
        "guided": "guided outputs beside free ones",
    },
    "decode": {
        "attention": "one layer's attention alone, also of several rows a sequence",
        "drafts": "finding drafts; tokens a step of known answers",
        "experts": "kernels of a mixture of experts, by every tuning",
        "products": "matrix products by each kernel; completes the tables",
    },
    "goodput": {
        "faults": "an engine dies or freezes under load",
        "points": "one arm at rates of its own under each limit",
        "report": "table and plots of runs that were made before",
    },
}
"""The parts of each program that has some: modules of its folder by name, and what they are about."""


def program_parser(subject: str, document: str | None, part: str = "") -> argparse.ArgumentParser:
    """A parser whose help fits a screen. `document`: the program's docstring."""
    first = textwrap.fill(" ".join((document or "").partition("\n\n")[0].split()), _WIDTH)
    file = f"bench/{subject}/{part or '__main__'}.py"
    parts = {} if part else PARTS.get(subject, {})
    lines = [f"{name:{_OPTION_WIDTH - 2}}{about}" for name, about in parts.items()]
    return argparse.ArgumentParser(
        prog=f"python -m bench.{subject}" + (f" {part}" if part else ""),
        usage="%(prog)s [PART] [OPTIONS]" if parts else "%(prog)s [OPTIONS]",
        description="\n  ".join([f"{first}\n\nparts:", *lines]) if parts else first,
        epilog=f"What each option and figure means is written at the head of {file}.",
        formatter_class=_Formatter,
    )


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """One line an option."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=_OPTION_WIDTH, width=_WIDTH)


def run_program(subject: str, main: Callable[[], None]) -> None:
    """Runs the part that the first word names, without that word, or the program itself."""
    if subject in _ENGINES:
        os.environ.update(ENVIRONMENT)  # as an engine is started; torch is imported later
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    if word in PARTS.get(subject, {}):
        del sys.argv[1]
        import_module(f"bench.{subject}.{word}").main()
        return
    main()


def add_shape_option(parser: argparse.ArgumentParser) -> None:
    """Adds the option --shape, a name of `SHAPES`."""
    parser.add_argument(
        "--shape", default="llama-3.1-8b", metavar="NAME", choices=sorted(SHAPES), help="of bench/shapes.py"
    )


def add_precision_options(parser: argparse.ArgumentParser, *, kv: bool = True) -> None:
    """Adds the options of `precision_of`; that of the KV cache only with `kv`."""
    parser.add_argument("--dtype", default="bf16", help="bf16, fp16, fp32 or fp64")
    parser.add_argument("--quantization", choices=("fp8", "int8", "int4"), help="of the weights")
    parser.add_argument("--quantize-head", action="store_true", help="with --quantization: lm_head too")
    if kv:
        parser.add_argument("--kv-dtype", default="auto", choices=("auto", "fp8"), help="of the KV cache")


def precision_of(arguments: argparse.Namespace) -> Precision:
    """The precision that options name. Exits where the head is to be quantised and nothing says how."""
    try:
        kv_dtype = getattr(arguments, "kv_dtype", "auto")
        return Precision(arguments.dtype, arguments.quantization, arguments.quantize_head, kv_dtype)
    except ValueError as error:
        sys.exit(str(error))


def numbers(text: str) -> list[int]:
    """Parses whole numbers with commas between them. Raises ValueError."""
    return [int(part) for part in text.split(",") if part]


def settings_of(case: DataclassInstance) -> dict[str, object]:
    """Settings that a case was run with, by name, its precision's parts among the others."""
    settings = asdict(case)
    return {**settings.pop("precision"), **settings}


def show(case: dict[str, object], as_json: bool) -> None:
    """Prints one JSON object per line on stdout, or one line per figure for people."""
    if as_json:
        print(json.dumps(case), flush=True)
        return
    for key, value in case.items():
        print(f"{key:24} {value}")
    print()
