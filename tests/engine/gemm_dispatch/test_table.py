"""The product table: what it holds, what stands in where it holds nothing, and the one choice of `exact`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import baton.engine
from baton.engine.gemm_dispatch import table as product_table
from baton.engine.gemm_dispatch.choice import (
    Choice,
    DigitsTuning,
    Library,
    ProductKey,
    W8A8Library,
    W8A8Tuning,
)
from baton.engine.gemm_dispatch.table import EXACT, EXACT_QUANTIZED, ProductTable, entry_of, file_stem
from baton.engine.kernels.gpu.gemm.gemv import GemvTuning
from baton.engine.kernels.gpu.gemm.skinny_linear import SkinnyTuning
from baton.engine.kernels.gpu.gemm.wide_product import WideTuning

KEY = ProductKey("qkv", 32, 6144, 4096, "bfloat16", "bfloat16")


@pytest.mark.parametrize(
    "choice",
    [
        GemvTuning(4, 256, 8, 3),
        SkinnyTuning(32, 128, 64, 2, 3, 8),
        WideTuning(96, 4, 6, 2),
        WideTuning(96, 4, 6, 2, 4),
        Library(),
        W8A8Tuning(64, 64, 256),
        W8A8Library(),
        DigitsTuning(16, 128, 4),
    ],
)
def test_a_choice_survives_its_file(choice: Choice) -> None:
    mixed = replace(KEY, weight_dtype="float8_e4m3fn")
    entries = [entry_of(KEY, choice, 12.345), entry_of(mixed, Library(), 1.0)]
    table = ProductTable(json.loads(json.dumps(entries)))
    assert table.choice(KEY) == choice
    assert table.choice(mixed) == Library()
    assert entries[0]["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("weight_format", "rows", "kind"),
    [
        ("fp8", 1, GemvTuning),
        ("fp8", 16, W8A8Tuning),
        ("fp8", 96, W8A8Library),
        ("fp8-128x128", 1, SkinnyTuning),
        ("fp8-64x64", 16, SkinnyTuning),
        ("int8", 96, W8A8Tuning),
        ("int4-g128", 1, GemvTuning),
        ("int4-g64-zeros", 16, DigitsTuning),
        ("int4-g128", 300, Library),
    ],
)
def test_quantised_weights_without_a_table(weight_format: str, rows: int, kind: type[Choice]) -> None:
    key = replace(KEY, weight_dtype=weight_format, rows=rows)
    assert isinstance(ProductTable([]).choice(key), kind)
    assert ProductTable([], exact=True).choice(key) == EXACT_QUANTIZED


def test_rows_without_an_entry_take_the_power_of_two_above() -> None:
    table = ProductTable([entry_of(KEY, SkinnyTuning(32), 1.0)])
    assert table.choice(replace(KEY, product="qkv", rows=24)) == SkinnyTuning(32)
    assert table.choice(replace(KEY, product="down", rows=24)) != SkinnyTuning(32)


@pytest.mark.parametrize(
    ("rows", "serving"),
    [
        (17, 24),
        (24, 24),
        (25, 32),
        (32, 32),
        (33, 48),
        (48, 48),
        (49, 64),
        (64, 64),
        (65, 96),
        (96, 96),
        (97, 128),
        (128, 128),
        (129, 192),
        (193, 256),
    ],
)
def test_rows_between_powers_of_two_take_the_entry_of_three_quarters_first(rows: int, serving: int) -> None:
    entries = [
        entry_of(replace(KEY, rows=n), SkinnyTuning(stages=n), 1.0)
        for n in (24, 32, 48, 64, 96, 128, 192, 256)
    ]
    key = replace(KEY, rows=rows)
    like_it = replace(key, n=key.n + 1024)
    for table in (ProductTable(entries), ProductTable(entries[::-1])):
        assert table.choice(key) == table.choice(like_it) == SkinnyTuning(stages=serving)
    power = 1 << (rows - 1).bit_length()
    without = ProductTable([entry_of(replace(KEY, rows=power), SkinnyTuning(stages=power), 1.0)])
    assert without.knows(key)
    assert without.choice(key) == SkinnyTuning(stages=power)


def test_what_the_chip_here_cannot_run_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    key = ProductKey("gate_up", 256, 28672, 4096, "bfloat16", "bfloat16")
    for runs, kind in ((True, WideTuning), (False, Library)):
        monkeypatch.setattr(product_table, "runs_here", lambda runs=runs: runs)
        assert isinstance(ProductTable.for_gpu("NVIDIA H100 80GB HBM3").choice(key), kind)


def test_exact_is_one_choice_whatever_the_rows() -> None:
    wide = entry_of(replace(KEY, product="qkv", rows=256), WideTuning(), 1.0)
    table = ProductTable([entry_of(KEY, Library(), 1.0), wide], exact=True)
    assert {table.choice(replace(KEY, product="qkv", rows=rows)) for rows in (1, 7, 32, 256)} == {EXACT}


@pytest.mark.parametrize("rows", [1, 2, 24, 48, 64, 65, 256])
def test_tiles_of_the_default_are_powers_of_two(rows: int) -> None:
    choice = ProductTable([]).choice(replace(KEY, product="qkv", rows=rows))
    tile = choice.rows if isinstance(choice, SkinnyTuning) else 16
    assert tile & (tile - 1) == 0
    assert isinstance(choice, Library) or rows <= 64


def test_every_table_of_the_repository_reads() -> None:
    paths = list((Path(baton.engine.__file__).parent / "gemm_dispatch" / "tables").glob("*.json"))
    assert f"{file_stem('NVIDIA H100 80GB HBM3')}.json" in {path.name for path in paths}
    for path in paths:
        entries = json.loads(path.read_text())
        ProductTable(entries)
        assert {entry["product"] for entry in entries} == {"qkv", "output", "gate_up", "down", "head"}


def test_what_stands_in_is_searched_once() -> None:
    """A start launches each product of each bucket several times, for which it asks every time."""
    table = ProductTable([entry_of(KEY, SkinnyTuning(32, 128, 64, 2, 3, 8), 12.345)])
    similar, unlike = replace(KEY, n=5120), replace(KEY, n=51200)
    assert table.choice(similar) == table.choice(KEY)
    assert table.choice(unlike) == ProductTable([]).choice(unlike) != table.choice(KEY)
    assert table.choice(unlike) is table.choice(unlike)
