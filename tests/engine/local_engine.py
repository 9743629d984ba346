"""Both steps of the engine in one process, without fronts, wires or tickets."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Run
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from baton.device.shared_memory import SharedMemory
from baton.device.streams.cuda_stream import compute_stream
from baton.engine.decode.slot_state import SlotState
from baton.engine.decode.slots import Grant, SlotPool
from baton.engine.executor.decode_loop import DecodeLoop
from baton.engine.executor.executor import StepExecutor
from baton.engine.executor.prefill_steps import PrefillSteps
from baton.engine.executor.reference_decode_loop import ReferenceDecodeLoop
from baton.engine.executor.step_handle import ChunkResult
from baton.engine.memory.block_pools import BlockPools
from baton.engine.memory.blocks import BlockTables, OutOfBlocksError
from baton.engine.memory.kv_cache import BlockMemory, KVCache
from baton.engine.memory.split_cache import SplitKVCache
from baton.engine.model.config.model_config import ModelConfig
from baton.engine.model.families.registry import load_config
from baton.engine.model.modules import Model, Precision
from baton.engine.model.reference import ReferenceModel
from baton.engine.model.weight_places import UNQUANTIZED, Formats
from baton.engine.model.weights import load_ranks, random_ranks
from baton.engine.parallel.rank_exchange import DeviceGroup
from baton.engine.plan.prefill_scheduler import PrefillScheduler, StepBounds
from baton.engine.plan.step_planner import StepPlanner
from baton.engine.prefill.factory import prompt_pass
from baton.engine.prefill.graphs import GraphBounds
from baton.engine.prefill.prompt_pass import PromptPass
from baton.engine.prefill.reference_pass import ReferencePass
from baton.engine.sequence import Limits, SamplingParams, Sequence
from baton.engine.shared_memory.layout import SharedRings
from baton.engine.shared_memory.logprob_records import Logprobs
from baton.engine.shared_memory.mask_board import Mask
from baton.engine.shared_memory.output_ring import Finish
from baton.engine.speculation.lookahead_table import LookaheadTable
from baton.engine.speculation.proposer import Proposer
from baton.model_spec.split import splits
from bench.engine_driver import admit, take

WEIGHTS_SEED = 7
# How long `run` may take: what hangs is found, and a GPU that others use as well is waited for.
RUN_S = 120.0
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "vocab_size": 97,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Start:
    """A prompt, and what an earlier attempt emitted, with blocks for `capacity` tokens at first (None: all).

    `grows`: only those are taken from the pools, and more are the caller's affair. `forced`: the token that
    it is admitted with, instead of the one drawn. `masked`: each token behind it waits for its mask;
    `first_mask`: of the first one. `prediction`, `most_drafts`, `tenant`: of `DecodeLoop.begin_admission`.
    """

    prompt: tuple[int, ...]
    max_tokens: int = 8
    sampling: SamplingParams | None = None
    stop: tuple[int, ...] = ()
    min_tokens: int = 0
    emitted: tuple[int, ...] = ()
    capacity: int | None = None
    grows: bool = False
    forced: int | None = None
    masked: bool = False
    first_mask: Mask | None = None
    prediction: tuple[int, ...] = ()
    most_drafts: int | None = None
    tenant: str | None = None

    @property
    def most_tokens(self) -> int:
        """Tokens whose KV it may come to hold."""
        return len(self.prompt) + self.max_tokens - 1

    @property
    def first_capacity(self) -> int:
        return self.capacity or self.most_tokens

    @property
    def taken(self) -> int:
        """Tokens for which blocks are taken from the pools."""
        return self.first_capacity if self.grows else self.most_tokens

    def sequence(self) -> Sequence:
        limits = Limits(self.max_tokens, self.stop, self.min_tokens)
        tokens = (*self.prompt, *self.emitted)
        sampling = self.sampling or SamplingParams()
        return Sequence(tokens, len(self.prompt), sampling, limits, mask=self.first_mask)


class LocalEngine:
    """`start` prefills and admits; `run` steps until the given slots have ended."""

    def __init__(
        self,
        folder: Path,
        *,
        slots: int = 4,
        blocks: int = 64,
        block_tokens: int = 4,
        chunk: int = 16,
        device: str = "cpu",
        dtype: str = "float32",
        graph: bool = False,
        numerics: str = "exact",
        checkpoint: bool = False,
        longest: int = 256,
        ring_slots: int | None = None,
        cache_dtype: str | None = None,
        mixed: Literal["", "graphs", "eager"] = "",
        prompts: Literal["", "graphs", "eager", "started"] = "",
        rows_per_slot: int = 1,
        lookup_tokens: int = 0,
        lookahead_bytes: int = 0,
        adaptive: bool = False,
        proposer: Callable[[SlotState], Proposer] | None = None,
        changes: Mapping[str, Any] | None = None,
        ranks: int = 1,
        bounds: StepBounds | None = None,
        clock: Callable[[], float] = time.monotonic,
        group: Callable[[Run[Model], int, int], DeviceGroup] | None = None,
        formats: Callable[[ModelConfig], Formats] = lambda config: UNQUANTIZED,
    ) -> None:
        """`checkpoint`: the folder holds one; else a random model is made, of CONFIG with `changes`.
        `longest`: a sequence's tokens. `ring_slots`: slots that mailbox and ring are sized for; by default
        `slots`. `ranks`: devices that divide the model; with `graph` prompts are computed on one, and their
        blocks handed over, unless they are by kernels. `cache_dtype`: by default `dtype`. `prompts`: prefill
        steps are by kernels, in graphs or not, or warmed up and measured as at a worker's start; with `graph`
        only. `mixed`: the first two, and decode steps join them. `adaptive`: a policy chooses how many
        rows drafts get. `proposer`: makes what proposes drafts. `lookahead_bytes`: of a lookahead table; 0:
        there is none. `bounds`: of prefill steps; by default `chunk` tokens. `clock`: of the decode loop by
        graphs. `group`: makes what the ranks of models exchange through in graphs' steps, given the rows of
        decode and of prefill steps; None: as GPUs do.
        `formats`: which matrices are in fewer bits; by default none, whatever the checkpoint has."""
        weights_dtype = getattr(torch, dtype)
        places = [f"cuda:{rank}" if device == "cuda" and ranks > 1 else device for rank in range(ranks)]
        cache_dtype = cache_dtype or dtype
        if checkpoint:
            config = load_config(folder)
            weights_on = partial(load_ranks, config, folder, dtype=weights_dtype, formats=formats(config))
        else:
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text(json.dumps(CONFIG | dict(changes or {})))
            config = load_config(folder)
            drawn = partial(random_ranks, config, WEIGHTS_SEED, dtype=weights_dtype)
            weights_on = partial(drawn, formats=formats(config))
        layout = config.layout(block_tokens, cache_dtype)
        precision = Precision.of(weights_dtype, getattr(torch, cache_dtype))
        parts = [config.of_rank(split) for split in splits(ranks)]
        models = [
            Model(part, mine, part.layout(block_tokens, cache_dtype), place, precision)
            for part, mine, place in zip(parts, weights_on(devices=places), places, strict=True)
        ]
        model, caches = models[0], [KVCache(each.layout, blocks, each.device) for each in models]
        self.model = model
        self.cache, cache = caches[0], caches[0] if ranks == 1 else SplitKVCache(layout, caches)
        self.pools = BlockPools(layout, [blocks] * len(layout.groups))
        self.scheduler = PrefillScheduler(self.pools, bounds or StepBounds(chunk), max_sequences=slots)
        rings = SharedRings(ring_slots or slots, rows_per_slot=rows_per_slot)
        self.memory = memory = SharedMemory.create("local-engine", rings.size)
        self.reader = rings.reader(memory)
        self.slots = SlotPool(slots)
        widths, place = self.pools.counts_for(longest), torch.device(places[0])
        vocab = config.vocab_size
        table = LookaheadTable(slots, lookahead_bytes, vocab, place) if lookahead_bytes else None
        self.state = SlotState(slots, widths, vocab, place, rows_per_slot, lookup_tokens, table)
        self.decode: DecodeLoop
        self.group: DeviceGroup | None = None
        by_kernels = mixed or prompts
        if graph:
            from baton.engine.decode.draft_rows import proposals_of
            from baton.engine.executor.decode_factory import decode_loop

            if ranks > 1:
                self.group = self._exchange(models, chunk if by_kernels else 0, group)
            self.decode = decode_loop(
                models, cache, self.state, rings, memory, exact=numerics == "exact", mixes=bool(mixed),
                interpreted=True, propose=proposer and proposals_of(self.state, proposer(self.state)),
                adaptive=adaptive, clock=clock, group=self.group,
            )  # fmt: skip
        else:
            box, ring, progress = rings.mailbox(memory), rings.writer(memory), rings.progress(memory)
            self.decode = ReferenceDecodeLoop(
                ReferenceModel(*models), cache, self.state, box, ring, progress,
                proposer=proposer and proposer(self.state), adaptive=adaptive,
            )  # fmt: skip
        self._handed_over: SplitKVCache | None = None
        # Prefill steps that a decode step was part of.
        self.mixed_steps = 0
        if by_kernels:
            self.prefill = self._by_kernels(models, cache, chunk, by_kernels)
        else:
            if graph and ranks > 1:
                # Prompts are another worker's, which has one device.
                (whole,) = weights_on(devices=places[:1])
                models = [Model(config, whole, layout, places[0], precision)]
                assert isinstance(cache, SplitKVCache)
                self._handed_over, cache = cache, KVCache(layout, blocks, places[0])
            self._prompt_cache = cache
            reference = ReferencePass(ReferenceModel(*models), cache)
            self.prefill = PrefillSteps(reference, self.scheduler, compute_stream(model.device))
        planner = StepPlanner(self.scheduler, self.prefill.state, self.decode.steps)
        self.executor = StepExecutor(planner, self.prefill, self.decode)
        self.output: dict[tuple[int, int], list[int]] = {}
        self.logprobs: dict[tuple[int, int], list[Logprobs | None]] = {}
        self.finish: dict[tuple[int, int], Finish] = {}
        self.tables: dict[tuple[int, int], BlockTables] = {}

    def _exchange(
        self, models: Run[Model], chunk: int, make: Callable[[Run[Model], int, int], DeviceGroup] | None
    ) -> DeviceGroup:
        from baton.engine.decode.gpu_group import gpu_group
        from baton.engine.kernels.product_rows import product_rows

        rows = self.state.shape.rows
        return (make or gpu_group)(models, rows, product_rows(chunk + rows) if chunk else 0)

    def _by_kernels(self, models: Run[Model], cache: BlockMemory, chunk: int, how: str) -> PrefillSteps:
        stream = self.decode.stream or compute_stream(*(model.device for model in models))
        made = self._prompt_pass(models, cache, chunk, how)
        assert not made.uncaptured
        if models[0].device.type == "cuda":
            for model in models:
                torch.cuda.synchronize(model.device)
        return PrefillSteps(made, self.scheduler, stream, group=self.group)

    def _prompt_pass(self, models: Run[Model], cache: BlockMemory, chunk: int, how: str) -> PromptPass:
        from baton.engine.prefill.gpu_pass import PrefillPass
        from baton.engine.prefill.group_pass import GroupPass

        joined, group, caches = tuple(self.decode.mixed.values()), self.group, cache.ranks
        if how == "started":
            return prompt_pass(
                models, cache, chunk, exact=False, joined=joined, group=group, interpreted=True
            )
        rows = chunk + max((each.rows for each in joined), default=0) if how == "graphs" else 0
        bounds = GraphBounds(rows, least_chunks=2, entries=256)
        made: PrefillPass | GroupPass
        if group is None:
            made = PrefillPass(models[0], caches[0], chunk, None, joined=joined)
            made.capture(bounds)
        else:
            joins = [joined, *zip(*(each.followers for each in joined), strict=True)] if joined else []
            passes = [
                PrefillPass(model, cache, chunk, None, joined=joins[rank] if joins else (), exchange=exchange)
                for rank, (model, cache, exchange) in enumerate(zip(models, caches, group.ranks, strict=True))
            ]
            made = GroupPass(passes, group)
            with group.solo():
                if models[0].device.type == "cuda":
                    made.warm()
                made.capture(bounds)
        return made

    def start(self, prompt: Iterable[int], **fields: Any) -> tuple[int, int]:
        """Prefills a prompt and admits it. Returns (slot, generation); raises OutOfBlocksError.

        `fields`: of `Start`.
        """
        (key,) = self.start_many([Start(tuple(prompt), **fields)])
        return key

    def start_many(self, starts: Iterable[Start]) -> list[tuple[int, int]]:
        """The same of several, prefilled together: of as many of the first as there are slots and blocks
        for. Raises OutOfBlocksError where that is none."""
        begun: list[tuple[Start, Sequence]] = []
        for start in starts:
            sequence = start.sequence()
            try:
                if len(begun) == self.slots.free:
                    break
                sequence.blocks = self.pools.allocate(start.taken)
            except OutOfBlocksError:
                if begun:
                    break
                raise
            sequence.borrowed = True
            self.scheduler.add(sequence)
            begun.append((start, sequence))
        last = {id(result.chunk.sequence): result for result in self.compute()}
        return [self._admit(start, sequence, last[id(sequence)]) for start, sequence in begun]

    def compute(self) -> list[ChunkResult]:
        """Runs prefill steps until there is nothing left to compute, and waits for all of them. Raises
        ExchangeTimeoutError where a device has waited for another in vain, as `run` does, unless prompts are
        computed on one device."""
        results = []
        while (step := self.executor.step_prompts()) is not None or self.prefill.under_way:
            self.mixed_steps += step is not None and step.plan.is_mixed
            results += take(self.executor)
            if self._handed_over is None:
                self._check_exchange()
        return results

    def _admit(self, start: Start, sequence: Sequence, last: ChunkResult) -> tuple[int, int]:
        self.scheduler.remove(sequence)
        assert last.token is not None
        assert sequence.blocks is not None
        if self._handed_over is not None:
            for group, table in enumerate(sequence.blocks):
                for block in table:
                    self._handed_over.put(group, block, 0, self._prompt_cache.block(group, block))
        counts = self.pools.counts_for(start.first_capacity)
        blocks = tuple(mine[:count] for mine, count in zip(sequence.blocks, counts, strict=True))
        key = self.slots.grant()
        admit(
            self.decode,
            Grant(*key, blocks, start.first_capacity),
            token_ids=sequence.token_ids,
            prompt_length=sequence.prompt_length,
            last_token=last.token if start.forced is None else start.forced,
            last_logprobs=last.logprobs,
            end=sequence.end,
            sampling=sequence.sampling,
            limits=sequence.limits,
            masked=start.masked,
            prediction=start.prediction,
            most_drafts=start.most_drafts,
            tenant=start.tenant,
        )
        self.tables[key] = sequence.blocks
        self.output[key] = []
        self.logprobs[key] = []
        return key

    def extend(self, key: tuple[int, int], before: int, capacity: int) -> None:
        """Gives a slot that has blocks for `before` tokens more of its own, for `capacity`."""
        held, wanted = self.pools.counts_for(before), self.pools.counts_for(capacity)
        more = tuple(mine[have:want] for mine, have, want in zip(self.tables[key], held, wanted, strict=True))
        self.decode.extend(*key, more, held, capacity)

    def step(self) -> bool:
        ran = self.executor.step_decode() is not None
        self.read()
        return ran

    def read(self) -> None:
        for record in self.reader.read():
            key = (record.slot, record.generation)
            if record.has_token:
                self.logprobs[key].append(record.logprobs)
                self.output[key].append(record.token)
            if record.finish is not Finish.NONE:
                assert key not in self.finish, "a slot ended twice"
                self.finish[key] = record.finish

    def run(self, *keys: tuple[int, int]) -> list[list[int]]:
        """Steps until all `keys` have ended; their outputs."""
        until = time.monotonic() + RUN_S
        while time.monotonic() < until:
            if all(key in self.finish for key in keys):
                return [self.output[key] for key in keys]
            self.step()
            self._check_exchange()
        raise AssertionError("slots did not end")

    def _check_exchange(self) -> None:
        if self.group is not None:
            self.group.check()
