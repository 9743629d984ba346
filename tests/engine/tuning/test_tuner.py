"""Tuning of products at a start, without a GPU: what is measured, in what order, how long, what is kept."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from baton.engine.gemm_dispatch import table as gemm_table
from baton.engine.gemm_dispatch.choice import Choice, DigitsTuning, Library, ProductKey
from baton.engine.gemm_dispatch.table import ProductTable, entry_of, read_entries, tuned_file
from baton.engine.kernels.fusion import Epilogue, Norm
from baton.engine.kernels.gpu.gemm.gemv import GemvTuning
from baton.engine.kernels.gpu.gemm.skinny_linear import SkinnyTuning
from baton.engine.kernels.gpu.gemm.streamed_product import StreamedTuning
from baton.engine.kernels.gpu.gemm.wide_product import WideTuning
from baton.engine.kernels.weight_format import FORMATS, WeightFormat
from baton.engine.model.layers.linear import Linear, Product
from baton.engine.tuning import candidates as candidates_module
from baton.engine.tuning import compilation, measurement, tuner
from baton.engine.tuning.candidates import BUCKETS, candidates
from baton.engine.tuning.compilation import depth_like

BF16 = torch.bfloat16


def _product(name: str = "qkv", n: int = 4608, k: int = 3584, *, bias: bool = False) -> Product:
    weight = torch.empty(n, k, device="meta", dtype=BF16)
    gain = torch.empty(k, device="meta", dtype=BF16)
    return Product(
        name, Linear(weight, torch.empty(n, device="meta") if bias else None), norm=Norm(gain, 1e-5)
    )


def _entry(product: Product, rows: int, choice: Choice) -> dict[str, object]:
    return entry_of(ProductKey.of(product, rows, BF16), choice, 1.0)


def test_what_no_table_has_is_measured_the_most_used_rows_first() -> None:
    known, other = _product(), _product("down", 3584, 18944)
    table = ProductTable([_entry(known, rows, Library()) for rows in BUCKETS])
    wanted = tuner.missing([known, other], 256, BF16, table)
    assert [product.name for product, _ in wanted] == ["down"] * len(BUCKETS)
    assert [rows for _, rows in wanted][:3] == [1, 32, 64]
    assert sorted(rows for _, rows in wanted) == sorted(BUCKETS)


@pytest.mark.parametrize(
    ("rows", "measured"),
    [
        (1, [1, 16]),
        (24, [1, 16, 24]),
        (33, [1, 16, 24, 32, 48]),
        (64, [1, 16, 24, 32, 48, 64]),
        (65, [1, 16, 24, 32, 48, 64, 96]),
        (96, [1, 16, 24, 32, 48, 64, 96]),
        (97, [1, 16, 24, 32, 48, 64, 96, 128]),
        (192, [1, 16, 24, 32, 48, 64, 96, 128, 192]),
    ],
)
def test_no_more_rows_are_measured_than_there_are_slots(rows: int, measured: list[int]) -> None:
    wanted = tuner.missing([_product()], rows, BF16, ProductTable([]))
    assert sorted(bucket for _, bucket in wanted) == measured


def test_mode_exact_measures_nothing() -> None:
    assert tuner.missing([_product()], 256, BF16, ProductTable([], exact=True)) == []


def test_products_are_measured_on_the_device_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    current = list[str]()

    @contextlib.contextmanager
    def on_device(device: torch.device) -> Iterator[None]:
        current.append(str(device))
        yield
        current.pop()

    def measure(*_: object) -> list[tuple[float, Choice]]:
        assert current == ["cuda:3"]
        return [(1.0, Library())]

    monkeypatch.setattr(tuner, "on_device", on_device)
    monkeypatch.setattr(tuner, "measure", measure)
    found = tuner.measured(
        [(_product(), 1), (_product(), 16)], BF16, torch.device("cuda", 3), lambda *_: None
    )
    assert len(list(found)) == 2
    assert current == []


def test_processes_that_compile_load_kernels_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the engine does that starts them."""
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    monkeypatch.setattr(compilation, "ProcessPoolExecutor", InThisProcess)
    compilation.compile_all([], 0, math.inf, lambda *_: None)
    assert os.environ["CUDA_MODULE_LOADING"] == "LAZY"


class InThisProcess:
    """A ProcessPoolExecutor that runs work in this process."""

    def __init__(self, workers: int, *, mp_context: object, initializer: Callable[[], None]) -> None:
        initializer()

    def shutdown(self, **_: bool) -> None:
        pass


def test_a_measurement_that_takes_too_long_leaves_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def measure(product: Product, rows: int, *_: object) -> list[tuple[float, Choice]]:
        seen.append(rows)
        return [(1.0, Library())]

    monkeypatch.setattr(tuner, "time", SimpleNamespace(monotonic=lambda: 0.02 * len(seen)))
    monkeypatch.setattr(tuner, "compile_all", lambda *_: None)
    monkeypatch.setattr(tuner, "measure", measure)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    wanted = tuner.missing([_product()], 256, BF16, ProductTable([]))
    progress: list[tuple[str, int, int]] = []
    entries = tuner.tune(wanted, BF16, torch.device("cpu"), lambda *at: progress.append(at), limit_s=0.01)
    assert seen == [1]
    assert len(entries) == 1
    assert progress == [("measuring", 0, len(BUCKETS))]
    assert len(tuner.tune(wanted, BF16, torch.device("cpu"), lambda *_: None, limit_s=None)) == len(BUCKETS)


@pytest.mark.parametrize(("n", "k", "launches"), [(16, 32, 256), (256, 256, 30), (2048, 2048, 1)])
def test_a_measurement_reads_more_weights_than_a_cache_holds_by_a_bounded_number_of_launches(
    n: int, k: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[Product] = []
    monkeypatch.setattr(measurement, "candidates", lambda *_, **__: [Library()])
    monkeypatch.setattr(measurement, "run_product", lambda _out, _x, product, *_: launched.append(product))
    monkeypatch.setattr(measurement, "graph_us", lambda launch, _replays: (launch(), 1.0)[1])
    assert measurement.measure(_product(n=n, k=k), 1, BF16, torch.device("cpu"), math.inf, rotated_bytes=4e6)
    assert len(launched) == launches
    assert len({id(product.linear.weight) for product in launched}) == launches


def test_a_product_whose_kernels_were_not_all_tried_in_time_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So a start is as long as its limit, however long each kernel takes to compile."""
    tried: list[Choice] = []

    def slow(choice: Choice) -> float:
        tried.append(choice)
        return 1.0

    clock = SimpleNamespace(monotonic=lambda: 0.05 * len(tried))
    monkeypatch.setattr(measurement, "time", clock)
    monkeypatch.setattr(measurement, "candidates", lambda *_, **__: [Library(), SkinnyTuning(), GemvTuning()])
    monkeypatch.setattr(measurement, "graph_us", lambda launch, _replays: slow(launch.__defaults__[0]))
    product, cpu = _product(n=16, k=32), torch.device("cpu")
    assert measurement.measure(product, 1, BF16, cpu, 0.07, rotated_bytes=0) == []
    assert len(tried) == 2
    assert len(measurement.measure(product, 1, BF16, cpu, math.inf, rotated_bytes=0)) == 3


def test_results_are_kept_beside_the_kernels_and_go_before_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm_table, "kernel_cache", lambda: tmp_path)
    gpu, product = "NVIDIA H100 80GB HBM3", _product(n=6144, k=4096)
    key = ProductKey.of(product, 32, BF16)
    shipped = ProductTable.for_gpu(gpu).choice(key)
    measured = SkinnyTuning(32, 128, 64, 4, 3, 8)
    assert measured != shipped
    tuner.save(tuned_file(gpu), [_entry(product, 32, measured)])
    tuner.save(tuned_file(gpu), [_entry(product, 64, Library())])
    assert ProductTable.for_gpu(gpu).choice(key) == measured
    assert ProductTable.for_gpu(gpu, tuned=False).choice(key) == shipped
    assert len(read_entries(tuned_file(gpu))) == 2
    assert [path.suffix for path in tuned_file(gpu).parent.iterdir()] == [".json"]


def test_a_damaged_file_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_table, "kernel_cache", lambda: tmp_path)
    path = tuned_file("some gpu")
    path.parent.mkdir(parents=True)
    path.write_text('[{"product": "qk')
    assert len(tuner.missing([_product()], 256, BF16, ProductTable.for_gpu("some gpu"))) == len(BUCKETS)


def test_one_process_of_a_machine_tunes_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_table, "kernel_cache", lambda: tmp_path)
    with tuner.tuning_lock("some gpu", 1.0) as first, tuner.tuning_lock("some gpu", 0.0) as second:
        assert first
        assert not second
    with tuner.tuning_lock("some gpu", 0.0) as third:
        assert third


@pytest.mark.parametrize("rows", BUCKETS)
def test_candidates_fit_the_product(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates_module, "runs_here", lambda: True)
    for product in (_product(), _product(bias=True), Product("up", _product().linear, Epilogue.GEGLU)):
        found = candidates(product, rows)
        assert isinstance(found[0], Library)
        assert len(set(found)) == len(found)
        tiles = {choice.rows for choice in found if isinstance(choice, SkinnyTuning)}
        expected = {1: {16}, 24: {32}, 48: {48, 64}, 96: {96, 128}, 192: set(), 256: set()}
        assert tiles == expected.get(rows, {rows})
        assert any(isinstance(choice, GemvTuning) for choice in found) == (rows == 1)
        wide = [choice for choice in found if isinstance(choice, WideTuning)]
        fits = product.linear.bias is None and product.epilogue is not Epilogue.GEGLU
        assert bool(wide) == (fits and (rows > 128 or (rows > 64 and product.epilogue.gated)))
        for choice in wide:
            assert (choice.x_sharers > 1) == (rows <= 128)
            assert choice.tile_bytes(product.epilogue) <= 225 * 1024


@pytest.mark.parametrize("rows", [48, 96])
def test_all_that_is_measured_in_two_tiles_of_x_is_compiled_first(rows: int) -> None:
    product = _product(bias=True)
    variants = list(tuner.launched_variants([(product, rows)], BF16))
    assert [variant.choice for variant in variants] == candidates(product, rows)[1:]
    assert all(variant.bias and variant.norm for variant in variants)


def test_a_shape_like_one_that_was_measured_takes_its_choice() -> None:
    choice = SkinnyTuning(32, 128, 64, 4, 3, 8)
    entry = _entry(_product(n=4096, k=4096), 32, choice)
    near, far = _product(n=6144, k=4096), _product(n=151936, k=896)
    for table in (ProductTable([entry]), ProductTable([], similar=[entry])):
        assert table.choice(ProductKey.of(near, 24, BF16)) == choice
        assert table.choice(ProductKey.of(far, 24, BF16)) != choice
        assert table.choice(ProductKey.of(_product("down"), 24, BF16)) != choice
        assert table.choice(ProductKey.of(near, 64, BF16)) != choice
        assert not table.knows(ProductKey.of(near, 24, BF16))


def test_a_gpu_without_a_table_takes_that_of_its_generation() -> None:
    key = ProductKey.of(_product("gate_up", 28672, 4096), 16, BF16)
    of_h100 = ProductTable.for_gpu("NVIDIA H100 80GB HBM3", tuned=False).choice(key)
    assert ProductTable.for_gpu("NVIDIA H20", tuned=False, capability=(9, 0)).choice(key) == of_h100
    other = ProductTable.for_gpu("NVIDIA A100", tuned=False, capability=(8, 0))
    assert other.choice(key) == ProductTable([]).choice(key)


@pytest.mark.parametrize(
    ("depth", "choice", "weight_format", "like"),
    [
        (14336, SkinnyTuning(width=128), None, 4096),
        (896, SkinnyTuning(width=128), None, 4096),
        (896, GemvTuning(width=512), None, 4112),  # not whole tiles
        (14336, DigitsTuning(), FORMATS["int4"], 4096),  # 112 and 32 groups, multiples of 16
        (3840, DigitsTuning(), FORMATS["int4"], 4224),  # 30 groups, as 33
        (3840, StreamedTuning(), FORMATS["int4"], 4096),  # CUDA C++
        (4100, SkinnyTuning(width=128), None, 4104),
    ],
)
def test_a_kernel_is_compiled_for_a_depth_that_is_like_the_products(
    depth: int, choice: Choice, weight_format: WeightFormat | None, like: int
) -> None:
    """So that it is not compiled again where it is measured."""
    assert depth_like(depth, choice, weight_format) == like
