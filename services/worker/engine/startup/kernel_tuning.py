"""Measures the kernels of a model's matrix products at a worker's start, where no table has them."""

from __future__ import annotations

import time

import torch

from baton.engine.gemm_dispatch.table import ProductTable, tuned_file
from baton.engine.model.config.model_config import ModelConfig
from baton.engine.model.layers.linear import Product
from baton.engine.model.modules import Model, Precision
from baton.engine.model.weight_places import UNQUANTIZED, Formats, weight_places
from baton.engine.shared_memory.step_shape import StepShape
from baton.engine.tuning.tuner import LIMIT_S, missing, save, tune, tuning_lock
from services.common.config.worker import EngineConfig
from services.common.observability.logs import get_log

log = get_log(__name__)

_LINE_S = 5.0


def tune_products(
    config: ModelConfig,
    engine: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    formats: Formats = UNQUANTIZED,
) -> None:
    """Completes this machine's table for the decode steps of a model, before its weights are loaded.

    Returns at once where nothing is to be measured: on a CPU, in mode `exact`, with `tune` off, in float64,
    or where a table has all shapes. One of several workers that start on one machine measures, and the others
    wait for it. Where the folder of compiled kernels cannot be written it measures nothing.
    """
    exact = engine.numerics == "exact"
    if device.type != "cuda" or exact or engine.tune == "off" or dtype == torch.float64:
        return
    products, gpu = product_shapes(config, dtype, formats), torch.cuda.get_device_name(device)
    full = engine.tune == "full"
    try:
        if full or _missing(products, engine, dtype, ProductTable.for_gpu(gpu)):
            _measure(products, engine, device, dtype, full=full)
    except OSError as error:  # the capture of the steps refuses such a folder, with its own message
        log.warning("products_not_tuned", why=str(error))


def _measure(
    products: list[Product], engine: EngineConfig, device: torch.device, dtype: torch.dtype, *, full: bool
) -> None:
    gpu = torch.cuda.get_device_name(device)
    with tuning_lock(gpu, timeout_s=2 * LIMIT_S) as held:
        wanted = _missing(products, engine, dtype, ProductTable([]) if full else ProductTable.for_gpu(gpu))
        if not wanted or not held:
            return
        began = time.monotonic()
        entries = tune(wanted, dtype, device, _Progress(), None if full else LIMIT_S)
        save(tuned_file(gpu), entries)
        seconds = round(time.monotonic() - began, 1)
        log.info("products_tuned", seconds=seconds, measured=len(entries), wanted=len(wanted), gpu=gpu)


def _missing(
    products: list[Product], engine: EngineConfig, dtype: torch.dtype, table: ProductTable
) -> list[tuple[Product, int]]:
    most_rows = StepShape(engine.most_slots, engine.rows_per_slot).rows
    return missing(products, most_rows, dtype, table)


def product_shapes(config: ModelConfig, dtype: torch.dtype, formats: Formats = UNQUANTIZED) -> list[Product]:
    """The distinct products of a model, whose weights have shapes and no memory."""
    weights = weight_places(config, "meta", dtype, formats)
    layout = config.layout(16, str(dtype).removeprefix("torch."))
    return Model(config, weights, layout, "meta", Precision.of(dtype)).product_kinds()


class _Progress:
    """Logs how far the tuning is, a line every few seconds."""

    def __init__(self) -> None:
        self._shown = 0.0

    def __call__(self, phase: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._shown >= _LINE_S or not done:
            self._shown = now
            log.info("products_tuning", phase=phase, done=done, total=total)
