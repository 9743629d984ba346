"""Makes the exchange among the GPUs of a worker, for all of its steps."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from baton.device.peer_memory import (
    enable_peer_access,
    refuse_launches_that_wait,
    refuse_lazy_loading,
    refuse_other_allocators,
)
from baton.engine.decode.step_rows import StepRows
from baton.engine.model.modules import Model
from baton.engine.parallel.cuda_rank import CudaRank
from baton.engine.parallel.exchange import DEADLINE_S, Exchange
from baton.engine.parallel.exchange_layout import ExchangeShape
from baton.engine.parallel.exchange_source import Constants, threads_of
from baton.engine.parallel.peer_check import check_peers
from baton.engine.parallel.rank_exchange import ExchangeGroup

# Rows of prompts whose logits are gathered at a time.
PROMPT_LOGITS = 64


def gpu_group(
    ranks: Sequence[Model], rows: int, prompt_rows: int = 0, deadline_s: float = DEADLINE_S
) -> ExchangeGroup:
    """Makes the exchange among the devices of these models, by rank, in decode steps of up to `rows` rows and
    prefill steps of up to `prompt_rows`, padding and rows that join included; checks that each device reaches
    the memory of each other one.

    Raises BatonError(INVALID) where a pair has no peer access, torch allocates memory that no peer reaches,
    kernels are loaded when they are first launched, or launches wait for their kernels, BatonError(INTERNAL)
    where stores go astray, ValueError for activations that are neither bfloat16 nor float32. Makes the first
    device the current one.
    """
    first, count = ranks[0], len(ranks)
    refuse_other_allocators(os.environ)
    refuse_launches_that_wait(os.environ)
    refuse_lazy_loading()
    indexes = [rank.device.index for rank in ranks]
    enable_peer_access(indexes)
    devices = [CudaRank(index) for index in indexes]
    shape = exchange_shape(first, count, rows, prompt_rows)
    dtype, vocabulary = first.precision.activations, first.config.vocab_size
    exchange = Exchange(devices, shape, dtype, deadline_s)
    threads = threads_of(shape.width, shape.element_bytes, count)
    check_peers(devices, Constants(count, shape.width, dtype is torch.float32, threads))
    most_logits = logit_rows(rows, prompt_rows)
    logits = devices[0].allocate(most_logits * vocabulary * dtype.itemsize)
    torch.cuda.set_device(indexes[0])  # which what was called here has changed
    return ExchangeGroup(exchange, logits.view(dtype).view(most_logits, vocabulary), deadline_s)


def exchange_shape(first: Model, ranks: int, rows: int, prompt_rows: int = 0) -> ExchangeShape:
    """The exchange of a model's steps, of the rows that `gpu_group` is given: two sums a layer. Rows of
    prompts are not sent."""
    width, element_bytes = first.config.hidden_size, first.precision.activations.itemsize
    sums, words = 2 * first.config.num_layers, StepRows.words(rows)
    return ExchangeShape(ranks, sums, max(rows, prompt_rows), width, element_bytes, words)


def logit_rows(rows: int, prompt_rows: int) -> int:
    """Rows of logits that steps gather at a time, of the rows that `gpu_group` is given."""
    return max(rows, min(PROMPT_LOGITS, prompt_rows))
