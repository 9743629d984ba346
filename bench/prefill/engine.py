"""A prefill worker's loop over random weights, without handoffs."""

from __future__ import annotations

import re
import secrets
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from baton.device.streams.cuda_stream import compute_stream
from baton.engine.memory.block_pools import BlockPools
from baton.engine.memory.kv_cache import KVCache
from baton.engine.memory.split_cache import SplitKVCache
from baton.engine.model.tensors import busy_rows, half_context
from baton.engine.plan.prefill_scheduler import PrefillScheduler, StepBounds
from baton.engine.plan.prefill_step import PrefillStep
from baton.engine.prefill.factory import prompt_pass
from baton.engine.prefix_cache.cache import PrefixCache
from baton.engine.prefix_cache.disk_store import DiskBlockStore
from baton.engine.prefix_cache.host_store import HostBlockStore
from baton.engine.sequence import Limits, SamplingParams, Sequence
from baton.model_spec.block_hash import BlockHasher
from baton.model_spec.split import splits
from baton.perf_model.prefill_fit import PrefillFit
from bench.case import BLOCK_TOKENS, PEAK_FLOPS, PrefillCase
from bench.engine_driver import places_of, prompt_executor, random_model, take, whole_layout

if TYPE_CHECKING:
    from baton.engine.model.modules import Model
    from baton.engine.parallel.rank_exchange import DeviceGroup

# A prompt waits so long for its prefix's blocks to come from a disk, and a flush for what is to go there.
DEADLINE_S = 120.0
_KEY = bytes(32)


@dataclass(frozen=True, slots=True)
class Run:
    """Totals of all prompts of a case: seconds from arrival to the last first token, time of `steps` on the
    device, time of launching them on the host, and cached tokens.
    """

    s: float
    device_s: float
    host_s: float
    steps: int
    hit_tokens: int


class PrefillEngine:
    """Created once for a shape and dtype; each case gets a loop of its own."""

    def __init__(
        self,
        cases: list[PrefillCase],
        device: str,
        folder: Path,
        *,
        exact: bool = False,
        graphs: bool = True,
        make_pass: Callable[[Model, KVCache, int], Any] | None = None,
    ) -> None:
        """`folder`: of the disk tier. `make_pass`: replaces the back end's own choice, for tests."""
        first = cases[0]
        longest = max(case.tokens for case in cases)
        self._seed = 0
        self.folder = folder
        count = first.tensor_parallel
        ranks = [
            random_model(first.model, first.precision, longest + 2, BLOCK_TOKENS, place, split=split)
            for place, split in zip(places_of(device, count), splits(count), strict=True)
        ]
        self.decoder = ranks[0]
        self.layout = whole_layout(self.decoder)
        self.devices = [rank.device for rank in ranks]
        # Twice, so that what is cached need not give way to those that it is for.
        self.blocks = 2 + 2 * max(case.blocks for case in cases)
        caches = [KVCache(rank.layout, self.blocks, rank.device) for rank in ranks]
        self.cache = caches[0] if count == 1 else SplitKVCache(self.layout, caches)
        begun = time.perf_counter()
        most = max(case.chunk_tokens for case in cases)
        self.group: DeviceGroup | None = None
        if count > 1 and device == "cuda" and not exact:
            self.group = _gpu_group(ranks, most)
        if make_pass is None:
            self.prompt_pass = prompt_pass(
                ranks, self.cache, most, exact=exact, graphs=graphs, group=self.group
            )
        else:
            self.prompt_pass = make_pass(self.decoder, caches[0], most)
        self.ready_s = time.perf_counter() - begun

    def report_ready(self) -> None:
        """A line with the set-up time, and a warning about slow features."""
        made = self.prompt_pass
        more = f", {made.refused} shapes refused" if made.refused else ""
        more += f", no graphs: {made.uncaptured}" if made.uncaptured else ""
        print(f"bench.prefill: kernels, plans, graphs ready in {self.ready_s:.1f} s{more}", file=sys.stderr)

    def measure(self, case: PrefillCase, repeats: int) -> dict[str, Any]:
        """The median run of `repeats`, after one warm-up."""
        on_gpu = self.decoder.device.type == "cuda"
        bench = _CaseRun(self, case)
        try:
            bench.run()
            held = torch.cuda.memory_allocated() if on_gpu else 0
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            runs = sorted((bench.run() for _ in range(repeats)), key=lambda run: run.s)
            peak = torch.cuda.max_memory_allocated() if on_gpu else 0
        finally:
            bench.close()
        peaks = {"peak_gb": round(peak / 1e9, 3), "peak_beside_gb": round((peak - held) / 1e9, 3)}
        return figures_of(case, runs[len(runs) // 2]) | peaks

    def split_cost(self, case: PrefillCase) -> dict[str, float]:
        """Milliseconds of a step of the case's first rows on all devices, and on the first alone, which waits
        for no other: their difference is what dividing the model costs."""
        from baton.engine.prefill.gpu_pass import time_pass

        made: Any = self.prompt_pass
        if self.group is None or case.tensor_parallel == 1:
            return {}
        rows = min(case.prompts * (case.tokens - case.prefix), case.chunk_tokens)
        step = PrefillStep.on_scratch(self.layout, 0, self.token_ids(rows, 0))
        together = time_pass(made.forward, step, compute_stream(*self.devices))
        with self.group.solo():
            alone = time_pass(made.passes[0].forward, step, compute_stream(self.devices[0]))
        self.group.check()
        return {
            "all_devices_ms": round(together.seconds * 1e3, 3),
            "alone_ms": round(alone.seconds * 1e3, 3),
        }

    def profile(self, case: PrefillCase) -> dict[str, float]:
        """Milliseconds by kind of kernel in one run, and of the host's work; empty on a CPU."""
        if self.decoder.device.type != "cuda":
            return {}
        from torch.profiler import ProfilerActivity, profile

        bench = _CaseRun(self, case)
        bench.run()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            took = bench.run()
        bench.close()
        kernels = [(event.key, event.self_device_time_total / 1e3) for event in profiled.key_averages()]
        found = budget(kernels)
        busy = sum(found.values())
        return {**found, "all kernels": round(busy, 3), "idle": round(took.s * 1e3 - busy, 3)}

    def token_ids(self, count: int, seed: int) -> tuple[int, ...]:
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randint(self.decoder.config.vocab_size, (count,), generator=generator).tolist())

    def fresh_seed(self) -> int:
        self._seed += 1
        return 10**6 + self._seed


class _CaseRun:
    """A loop with pools and prefix cache for one case."""

    def __init__(self, engine: PrefillEngine, case: PrefillCase) -> None:
        self._engine = engine
        self._case = case
        decoder, layout = engine.decoder, engine.layout
        self._pools = BlockPools(layout, [engine.blocks] * len(layout.groups))
        self._prefixes = self._prefix_cache() if case.prefix else None
        scheduler = PrefillScheduler(
            self._pools,
            StepBounds(case.chunk_tokens, seconds=1e9, alignment=engine.prompt_pass.alignment),
            max_sequences=2 * case.prompts,
            cost=PrefillFit(half_context(decoder.config), busy_rows(decoder.config, decoder.device.type)),
            prefixes=self._prefixes,
        )
        stream = compute_stream(*engine.devices)
        self._executor = prompt_executor(engine.prompt_pass, scheduler, stream, group=engine.group)
        if case.prefix:
            self._prime()

    def close(self) -> None:
        if self._prefixes is not None:
            self._prefixes.close()

    def run(self) -> Run:
        """New prompts with the cached prefixes."""
        hits = self._prefixes.hit_tokens if self._prefixes is not None else 0
        self._wait_idle()
        sequences = [self._sequence(number) for number in range(self._case.prompts)]
        steps = self._executor.prompts
        device_s, host_s, ended = steps.times.busy_s, steps.host_s, steps.steps_ended
        begun = time.perf_counter()
        self._compute(sequences)
        took = time.perf_counter() - begun
        found = (self._prefixes.hit_tokens if self._prefixes is not None else 0) - hits
        return Run(
            took, steps.times.busy_s - device_s, steps.host_s - host_s, steps.steps_ended - ended, found
        )

    def _compute(self, sequences: list[Sequence]) -> None:
        """Runs prompts to their first tokens. Raises TimeoutError, and ExchangeTimeoutError where one of
        several devices has waited for another in vain."""
        scheduler = self._executor.prompts.scheduler
        for sequence in sequences:
            scheduler.add(sequence)
        left = len(sequences)
        until = time.perf_counter() + DEADLINE_S
        while left:
            if self._executor.step_prompts() is None and self._prefixes is not None:
                self._prefixes.poll()
            left -= sum(result.token is not None for result in take(self._executor))
            if self._engine.group is not None:
                self._engine.group.check()
            if time.perf_counter() > until:
                raise TimeoutError(f"{left} prompts are not done after {DEADLINE_S} s")
        for sequence in sequences:
            scheduler.remove(sequence)

    def _sequence(self, number: int) -> Sequence:
        case = self._case
        prefix = self._engine.token_ids(case.prefix, 1 + number)
        rest = self._engine.token_ids(case.tokens - case.prefix, self._engine.fresh_seed())
        sequence = Sequence((*prefix, *rest), case.tokens, SamplingParams(), Limits(1))
        if self._prefixes is not None:
            sequence.hashes = self._prefixes.hashes_of(sequence.token_ids)
        return sequence

    def _prefix_cache(self) -> PrefixCache:
        layout, case = self._engine.layout, self._case
        hasher = BlockHasher(
            _KEY,
            tenant="",
            fingerprint=secrets.token_bytes(32),
            cache_dtype=layout.cache_dtype,
            block_tokens=BLOCK_TOKENS,
        )
        store = None
        if case.tier != "device":
            block = sum(group.block_bytes for group in layout.groups)
            disk = None
            if case.tier == "disk":
                room = 4 * (case.blocks + 2) * block
                folder = self._engine.folder / secrets.token_hex(4)
                disk = DiskBlockStore(folder, _KEY, block, room, lambda: None)
            store = HostBlockStore(self._engine.cache, (case.blocks + 2) * block * 3 // 2, disk)
        return PrefixCache(self._pools, lambda tenant: hasher, store)

    def _prime(self) -> None:
        """Computes the prefixes once."""
        sequences = [self._sequence(number) for number in range(self._case.prompts)]
        self._compute(sequences)

    def _wait_idle(self) -> None:
        """Moves the cached blocks to the case's tier only."""
        if self._prefixes is None or self._case.tier == "device":
            return
        self._give_up_device()
        if self._case.tier == "disk":  # others take the host's memory, and what was there goes to the disk
            self._wait_for_disk()
            others = [
                Sequence(
                    self._engine.token_ids(self._case.tokens, self._engine.fresh_seed()),
                    self._case.tokens,
                    SamplingParams(),
                    Limits(1),
                )
                for _ in range(self._case.prompts)
            ]
            for sequence in others:
                sequence.hashes = self._prefixes.hashes_of(sequence.token_ids)
            self._compute(others)
            self._give_up_device()
            self._wait_for_disk()

    def _give_up_device(self) -> None:
        self._pools.cached.evict_for(self._pools.available())

    def _wait_for_disk(self) -> None:
        """Waits until no transfer to that tier is running."""
        assert self._prefixes is not None
        until = time.perf_counter() + DEADLINE_S
        quiet = 0
        while quiet < 50:
            quiet = 0 if self._prefixes.poll() else quiet + 1
            time.sleep(0.002)
            if time.perf_counter() > until:
                raise TimeoutError("the disk does not come to rest")


def _gpu_group(ranks: list[Model], most_rows: int) -> DeviceGroup:
    from baton.engine.decode.gpu_group import gpu_group
    from baton.engine.kernels.product_rows import product_rows

    return gpu_group(ranks, 0, product_rows(most_rows))


def figures_of(case: PrefillCase, run: Run) -> dict[str, Any]:
    """The figures of one run."""
    peak = PEAK_FLOPS.get(case.precision.torch_dtype)
    on_gpu = torch.cuda.is_available()
    return {
        "ms": round(run.s * 1e3, 2),
        "device_ms": round(run.device_s * 1e3, 2),
        "steps": run.steps,
        "step_device_ms": round(run.device_s * 1e3 / run.steps, 3),
        "step_host_ms": round(run.host_s * 1e3 / run.steps, 3),
        "s": round(run.s, 5),
        "tok_s": round(case.prompts * case.tokens / run.s),
        "mfu": round(case.flops / case.tensor_parallel / run.s / peak, 3) if peak and on_gpu else None,
        "hit_tokens": run.hit_tokens,
    }


_KINDS = (
    ("attention, paged", r"^_prompt_attention"),
    ("attention, library", r"cudnn|sdpa|flash|fmha"),
    ("attention, joined", r"^_absorb|^_join_parts|^_gather_prefix"),
    ("q, k, v: rotary and cache", r"^_prompt_qkv"),
    ("experts, products", r"^_grouped"),
    ("experts, router and sum", r"^_route|^_align|^_combine"),
    ("norm", r"^_norm"),
    ("activation", r"^_gated"),
    ("embedding", r"^_embed|^_rotary"),
    ("products", r"gemm|nvjet|cutlass|xmma|splitk|cublas"),
    ("copies", r"memcpy|memset|copy|fill|elementwise"),
)


def kind_of(kernel: str) -> str:
    """The kind of a kernel, or `other`."""
    name = kernel.strip()
    return next((kind for kind, pattern in _KINDS if re.search(pattern, name, re.IGNORECASE)), "other")


def budget(kernels: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Sums (name, milliseconds) of kernels by kind, the largest first."""
    sums: dict[str, float] = {}
    for name, took in kernels:
        kind = kind_of(name)
        sums[kind] = sums.get(kind, 0.0) + took
    return {kind: round(took, 3) for kind, took in sorted(sums.items(), key=lambda item: -item[1])}
