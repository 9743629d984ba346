"""Sums of the exchange, and logits, on the host; the check of peers; sizes and refusals; that it compiles."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from baton.base.errors import BatonError
from baton.engine.kernels.fusion import Norm
from baton.engine.parallel.exchange import Exchange
from baton.engine.parallel.exchange_layout import ExchangeShape
from baton.engine.parallel.exchange_source import Constants, threads_of
from baton.engine.parallel.peer_check import check_peers
from tests.engine.parallel.host.devices import Edit, HostWorker
from tests.engine.parallel.sum_cases import BF16, EPS, F32, Case, check_logits, check_sums
from tests.support.host_kernels import needs_compiler

ROWS = 3
NVCC = shutil.which("nvcc")
CASES = [
    Case(2, 136, BF16, norm=True),
    Case(3, 40, BF16, post_norm=True, norm=True, gains=F32),
    Case(2, 72, BF16, norm=True, codes=True),
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in [
            Case(3, 36, F32),
            Case(8, 100, F32, post_norm=True, norm=True),
            Case(4, 64, BF16, post_norm=True),
            Case(2, 200, BF16, post_norm=True, norm=True, codes=True),
            Case(2, 64, F32, norm=True, codes=True),
            Case(2, 64, BF16, norm=True, gains=F32),
        ]
    ),
]


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums(case: Case) -> None:
    check_sums(case, HostWorker(case.ranks))


@needs_compiler
@pytest.mark.parametrize(("vocabulary", "dtype"), [(64, F32), (51, BF16)])
def test_logits_of_parts_of_any_width(vocabulary: int, dtype: torch.dtype) -> None:
    check_logits(vocabulary, dtype, HostWorker(2), torch.zeros(ROWS, vocabulary, dtype=dtype))


@needs_compiler
def test_devices_that_read_what_others_wrote_pass_the_check() -> None:
    check_peers(HostWorker(2).devices, Constants(2, 32, True, 8), words=50)


ASTRAY = "store(given.words + i, pattern(given.seed, i)"
WRITES_ASTRAY: list[tuple[str, Edit]] = [
    ("reads 1 of them", (f"{ASTRAY});", f"{ASTRAY} ^ (i == 7));")),
    # What the pair wrote before lies there still.
    ("reads 50 of them", (f"{ASTRAY});", "if (given.seed < 256) " + f"{ASTRAY});")),
]


@needs_compiler
@pytest.mark.parametrize(("words", "edit"), WRITES_ASTRAY, ids=["a bit", "everything"])
def test_devices_that_read_something_else_are_named(words: str, edit: Edit) -> None:
    with pytest.raises(BatonError, match=rf"wrote 50 words into the memory of device \d, and .* {words}"):
        check_peers(HostWorker(2, edits=(edit,)).devices, Constants(2, 32, True, 8), words=50)


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
@pytest.mark.parametrize(
    "constants",
    [
        Constants(2, 8192, False, 1024, norm=True),
        pytest.param(Constants(4, 5120, False, 640, True, True, True, True), marks=pytest.mark.slow),
        pytest.param(Constants(8, 16384, False, 512, norm=True), marks=pytest.mark.slow),
        pytest.param(Constants(2, 16384, True, 1024, True, True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_it_compiles_for_hopper(constants: Constants, tmp_path: Path) -> None:
    """Without spilled registers; nothing is read through the cache that is coherent with no other device."""
    assert NVCC is not None
    source, code = tmp_path / "exchange.cu", tmp_path / "exchange.ptx"
    source.write_text(constants.source)
    command = [NVCC, "-arch=sm_90", "-std=c++17", "-Werror", "all-warnings", str(source), "-o"]
    subprocess.run([*command, str(code), "-ptx"], check=True, timeout=120)
    instructions = code.read_text()
    assert ".nc." not in instructions
    assert instructions.count("ld.acquire.sys") >= 4
    assert instructions.count("st.release.sys") >= 4
    assembled = subprocess.run(
        [*command, str(tmp_path / "exchange.cubin"), "-cubin", "-Xptxas", "-v"],
        check=True, timeout=120, capture_output=True, text=True,
    ).stderr  # fmt: skip
    spilled = re.findall(r"(\d+) bytes spill stores", assembled)
    assert len(spilled) == 5
    assert set(spilled) == {"0"}


def test_what_does_not_fit() -> None:
    devices = HostWorker(2).devices
    shape = ExchangeShape(2, 4, ROWS, 64, 2, 5)
    exchange = Exchange(devices, shape, BF16)
    hidden, norm = torch.zeros(ROWS, 64, dtype=BF16), Norm(torch.ones(64, dtype=BF16), EPS)
    with pytest.raises(ValueError, match="no exchange of torch"):
        Exchange(devices, shape, torch.float16)
    with pytest.raises(ValueError, match="2 devices of 3"):
        Exchange(devices, ExchangeShape(3, 4, ROWS, 64, 2, 5), BF16)
    with pytest.raises(ValueError, match="node 5 is none of 4 sums"):
        exchange.part(0, 5)
    with pytest.raises(ValueError, match="is not of"):
        exchange.reduce(0, 1, torch.zeros(ROWS + 1, 64, dtype=BF16))
    with pytest.raises(ValueError, match="norm into"):
        exchange.reduce(0, 1, hidden, norm=(norm, hidden), scales=torch.zeros(ROWS))
    with pytest.raises(ValueError, match="gains of"):
        exchange.reduce(0, 1, hidden, Norm(torch.ones(64), EPS), (norm, hidden.clone()))
    with pytest.raises(ValueError, match="4 words of torch"):
        exchange.begin(0, torch.zeros(4, dtype=torch.int32))


def test_parts_of_sums_that_follow_one_another_are_apart() -> None:
    shape = ExchangeShape(2, 64, 5, 72, 2, 5)
    places = [shape.part_at(node) for node in range(1, 65)]
    for behind in (1, 2):
        pairs = zip(places, places[behind:], strict=False)
        assert all(abs(a - b) >= shape.part_bytes for a, b in pairs)
    assert max(places) + shape.part_bytes <= shape.arena_bytes
    assert min(places) >= shape.inboxes_at + 2 * 4 * shape.words
    assert shape.inboxes_at >= shape.flag_at(7) + 8


def test_threads_have_registers_for_all_parts() -> None:
    assert [threads_of(8192, 2, ranks) for ranks in (2, 4, 8)] == [1024, 1024, 512]
    assert threads_of(896, 2, 2) == 128
    assert threads_of(40, 2, 2) == 32
    assert Constants(2, 40, False, 32, norm=True).source.startswith("#define RANKS 2\n#define WIDTH 40\n")
