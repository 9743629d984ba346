"""Decode on one GPU: step time, gaps and tail, by the GPU's own clock, while another process reads the ring.

    python -m bench.decode --shape llama-3.1-8b --dtype bf16 --batch 1,8,64 --context 1024
        [--sampling greedy|temperature|filters] [--numerics exact|fast] [--json]

Random weights and KV. Every sequence starts with `context` tokens; step time is taken over output tokens 33
to 160, so at a mean context of context + 96, where `floor_ms` is taken too: bytes that a step must read over
3.16 TB/s. gap: end of a step's last kernel to start of the next step's first. busy: 1 - gaps / window.
tail: end of the head's product to the end of the step. One JSON object a batch on stdout.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.shapes import SHAPES, Shape, torch_dtype

_FIRST, _LAST = 33, 160
_READ_BYTES_S = 3.16e12
_DEADLINE_S = 120.0
# A large batch is admitted over several steps; each of its sequences lives that much longer.
_SPARE = 18
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "filters": {"temperature": 0.8, "top_p": 0.95, "top_k": 50},
}


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    shape: str
    dtype: str
    batch: int
    context: int
    sampling: str
    numerics: str

    @property
    def floor_ms(self) -> float:
        shape = SHAPES[self.shape]
        size = {"bfloat16": 2, "float16": 2, "float32": 4}[torch_dtype(self.dtype)]
        tokens = self.batch * (self.context + (_FIRST + _LAST) // 2)
        return (shape.weight_elements() + shape.kv_elements() * tokens) * size / _READ_BYTES_S * 1e3


class Bench:
    """A decode loop of `slots` slots over random weights; `run` measures one case."""

    def __init__(self, shape: Shape, dtype: str, slots: int, context: int, exact: bool, options: Any = None):  # noqa: ANN204
        import torch

        from baton.device.host_memory import HostMemory
        from baton.device.shared_memory import SharedMemory
        from baton.engine.back_ends import pass_options
        from baton.engine.blocks import BlockPools
        from baton.engine.graph_decode import GraphDecodeLoop
        from baton.engine.shared_rings import SharedRings
        from baton.engine.slot_state import SlotState
        from baton.engine.slots import SlotPool

        self.slots = SlotPool(slots)
        config, decoder, cache, blocks = _random_model(shape, getattr(torch, dtype), slots, context)
        self._vocab = config.vocab_size
        self.pools = BlockPools(decoder.layout, blocks)
        self._rings = SharedRings(slots)
        self._memory = SharedMemory.create("bench-decode", self._rings.size)
        widths = tuple(group.blocks_for(context + _LAST + _SPARE) for group in decoder.layout.groups)
        state = SlotState(slots, widths, config.vocab_size, decoder.device)
        begun = time.perf_counter()
        self.loop = GraphDecodeLoop(
            decoder,
            cache,
            state,
            self._rings,
            HostMemory(self._memory, decoder.device),
            self._rings.mailbox(self._memory),
            self._rings.writer(self._memory),
            options or pass_options(decoder, exact=exact),
        )
        self.capture_s = time.perf_counter() - begun
        command = [sys.executable, "-m", "bench.ring_reader", str(self._memory.fd), str(slots)]
        self._reader = subprocess.Popen(command, pass_fds=[self._memory.fd], stdin=subprocess.PIPE)

    def close(self) -> None:
        self._reader.communicate()

    def run(self, case: Case) -> dict[str, Any]:
        """Admits a batch, decodes it to its end, and reads the clocks of its steps."""
        import torch

        from baton.engine.sequence import Limits, SamplingParams
        from baton.engine.slots import Grant

        grants, before = [], self._replays()
        for index in range(case.batch):
            slot, generation = self.slots.grant()
            end = case.context + _LAST + _SPARE + 1
            grants.append(Grant(slot, generation, self.pools.allocate(end - 1), end - 1))
            self.loop.admit(
                grants[-1],
                token_ids=[0] * case.context,
                prompt_length=case.context,
                last_token=(index * 977) % self._vocab,
                end=end,
                sampling=SamplingParams(seed=index, **SAMPLINGS[case.sampling]),
                limits=Limits(_LAST + _SPARE + 1),
            )
        self._turn_until(self.loop.tokens_decoded + case.batch * (_LAST + _SPARE))
        torch.cuda.synchronize()
        for grant in grants:
            self.slots.release(grant.slot, grant.generation)
            self.pools.release(grant.blocks)
        return {**self._clocks(case, before), "capture_s": round(self.capture_s, 1)}

    def _turn_until(self, tokens: int) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while self.loop.tokens_decoded < tokens:
            if not self.loop.step():
                time.sleep(0.0001)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.loop.tokens_decoded} of {tokens} tokens")

    def _replays(self) -> int:
        from baton.engine.kernels.gpu.step_kernels import REPLAYS

        return int(self.loop.step_state.control[REPLAYS.value])

    def _clocks(self, case: Case, before: int) -> dict[str, Any]:
        from baton.engine.kernels.gpu.step_kernels import CLOCK_LINES, INBOX_ENTRIES

        clocks = self.loop.step_state.clocks.cpu().numpy()
        # Fetched in one step, applied from the next on, INBOX_ENTRIES a step; in the middle of that the
        # mean sequence draws its token 1.
        middle = before + 1 + (-(-case.batch // INBOX_ENTRIES) - 1) // 2
        numbers = range(middle + _FIRST - 1, middle + _LAST + 1)
        raw = clocks[[number % CLOCK_LINES for number in numbers]]
        if set(raw[:, 3].tolist()) != {case.batch}:
            raise RuntimeError(f"steps of {sorted(set(raw[:, 3].tolist()))} rows, not of {case.batch}")
        lines = raw / 1e3
        gaps = sorted(lines[1:, 0] - lines[:-1, 2])
        window = lines[-1, 2] - lines[0, 2]
        tails = sorted(lines[:, 2] - lines[:, 1])
        tpot = window / (len(lines) - 1) / 1e3
        return {
            "tpot_ms": round(tpot, 3),
            "floor_ms": round(case.floor_ms, 3),
            "of_floor": round(case.floor_ms / tpot, 3),
            "tokens_s": round(case.batch / tpot * 1e3),
            "gap_us_p50": round(float(gaps[len(gaps) // 2]), 2),
            "gap_us_p99": round(float(gaps[int(len(gaps) * 0.99)]), 2),
            "busy": round(1 - float(sum(gaps)) / float(window), 5),
            "tail_us": None if case.sampling == "filters" else round(float(tails[len(tails) // 2]), 2),
        }


def _random_model(shape: Shape, dtype: Any, slots: int, context: int) -> tuple[Any, Any, Any, list[int]]:
    import torch

    from baton.engine.cache import KVCache
    from baton.engine.decoder import Decoder
    from baton.engine.model_config import ModelConfig
    from baton.engine.weights import weight_shapes

    device = torch.device("cuda")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape.config))
        config = ModelConfig.load(folder)
    layout = config.layout(64, str(dtype).removeprefix("torch."))

    def random(name: str, size: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(size, device=device, dtype=dtype)
        return torch.randn(size, device=device, dtype=dtype).mul_(size[-1] ** -0.5)

    weights = {name: random(name, size) for name, size in weight_shapes(config).items()}
    decoder = Decoder(config, weights, layout, device, dtype)
    del weights
    torch.cuda.empty_cache()
    blocks = [1 + slots * group.blocks_for(context + _LAST + _SPARE) for group in layout.groups]
    cache = KVCache(layout, blocks, device)
    for group in cache.groups:
        for start in range(0, group.shape[0], 64):
            group[start : start + 64].normal_()
    return config, decoder, cache, blocks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(SHAPES))
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--batch", default="1,8,32,64,128,256")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--sampling", default="greedy", choices=sorted(SAMPLINGS))
    parser.add_argument("--numerics", default="fast", choices=("exact", "fast"))
    parser.add_argument("--json", action="store_true", help="accepted for all measuring programs; always so")
    arguments = parser.parse_args()
    batches = [int(part) for part in arguments.batch.split(",")]
    run_all(
        [
            Case(
                arguments.shape,
                arguments.dtype,
                batch,
                arguments.context,
                arguments.sampling,
                arguments.numerics,
            )
            for batch in batches
        ]
    )


def run_all(cases: list[Case]) -> None:
    """Measures cases of one shape, dtype, context and numerics, and prints each."""
    import torch

    first, slots = cases[0], max(case.batch for case in cases)
    torch.set_grad_enabled(False)
    bench = Bench(
        SHAPES[first.shape], torch_dtype(first.dtype), slots, first.context, first.numerics == "exact"
    )
    versions = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    try:
        for case in cases:
            settings = {name: getattr(case, name) for name in Case.__slots__}
            print(json.dumps({**settings, **bench.run(case), **versions}), flush=True)
    finally:
        bench.close()


if __name__ == "__main__":
    main()
