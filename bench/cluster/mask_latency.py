"""From a drawn token to its sequence's next grammar mask, by the mask processes alone; no GPU.

    python -m bench.cluster.mask_latency [--streams 1,8,32,64] [--processes N] [--steps 200]
        [--vocab-size 128256] [--json]

The streams' tokens, drawn at random from their masks, are written to an output ring at once, as a decode step
does; the next step begins when all masks are on the board. `first_ms`, `last_ms`: from the write to a step's
first and last mask, as seen every 0.1 ms. A mask in time for the next step, in which its sequence draws
again, takes less than a step's forward pass (about 4 ms of 8B on an H200). `cpu_us_a_mask`: processor time of
the mask processes, as many as a worker with so many slots has on this machine by default. The schema is that
of `bench.cluster.guided`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from baton.base.errors import BatonError
from baton.device.shared_memory import SharedMemory
from baton.engine.shared_memory.layout import SharedRings
from baton.engine.shared_memory.mask_board import Mask, MaskBoard
from baton.engine.shared_memory.output_ring import Finish
from baton.v1.types_pb2 import Grammar, Limits
from bench.case_output import show
from bench.cluster.guided import SCHEMA
from bench.cluster.vocabulary import write_tokenizer
from bench.machine import process_cpu_s
from services.grammar.client import MaskClient, mask_processes
from services.grammar.process_client import MaskSetup

_WARM, _FIRST_POSITION, _GENERATION = 20, 5, 1
_POLL_S = 0.0001


def main() -> None:
    """Runs the program."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.cluster.mask_latency",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--streams", default="1,8,32,64", help="comma-separated")
    parser.add_argument("--processes", type=int, help="mask processes")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--vocab-size", type=int, default=128_256)
    parser.add_argument("--json", action="store_true", help="one object a case on stdout")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = _write_model(Path(name), arguments.vocab_size)
        for streams in map(int, arguments.streams.split(",")):
            processes = arguments.processes or mask_processes(streams)
            worker = _Worker(folder, arguments.vocab_size, streams, processes)
            figures = asyncio.run(_measure(worker, arguments.vocab_size - 1, arguments.steps))
            settings = {"streams": streams, "processes": processes, "steps": arguments.steps}
            show({**settings, **figures}, arguments.json)


def _write_model(folder: Path, vocab_size: int) -> Path:
    config = {"vocab_size": vocab_size, "max_position_embeddings": 1 << 16, "eos_token_id": vocab_size - 1}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, vocab_size, [vocab_size - 1])
    return folder


def _fail(slot: int, generation: int, error: BatonError) -> None:
    raise RuntimeError(f"the sequence in slot {slot} failed: {error}")


class _Worker:
    """What engine and front hold: the ring's writer, the board's reader, the client."""

    def __init__(self, folder: Path, vocab_size: int, streams: int, processes: int) -> None:
        rings = SharedRings(streams, max_logprobs=0)
        memory = SharedMemory.create("bench-rings", rings.size)
        self.streams = streams
        self._board, board_memory = MaskBoard.create(streams, vocab_size)
        self._ring, self._reader = rings.writer(memory), rings.reader(memory)
        self._draw = np.random.default_rng(0)
        self._masks: list[Mask] = []
        setup = MaskSetup(folder, vocab_size, rings, memory, board_memory, processes=processes)
        self.client = MaskClient(setup, _fail)

    @property
    def cpu_s(self) -> float:
        """Processor time that the mask processes have used."""
        return sum(process_cpu_s(pid) for pid in self.client.pids)

    async def open(self, stop_id: int) -> None:
        """Begins the streams."""
        grammar, limits = Grammar(json_schema=json.dumps(SCHEMA)), Limits(max_tokens=1 << 15)
        limits.stop_token_ids.append(stop_id)
        source = await self.client.source("", grammar)
        first = np.frombuffer(await self.client.next_mask(source, limits, ()), dtype=np.uint32)
        await self.client.started()
        for slot in range(self.streams):
            await self.client.follow((slot, _GENERATION), _FIRST_POSITION, source, limits, ())
        self._masks = [first] * self.streams

    def step(self) -> list[float]:
        """Draws a token of each stream; seconds until each of their next masks was seen. Raises RuntimeError
        where one takes more than a second."""
        tokens = [int(self._draw.choice(_allowed(mask))) for mask in self._masks]
        began = time.perf_counter()
        count = self.streams
        self._ring.write(tokens, range(count), [_GENERATION] * count, [Finish.NONE] * count)
        self._reader.read()
        seen: list[float] = []
        while len(seen) < count:
            for slot, _, _, mask in self._board.take():
                self._masks[slot] = mask
                seen.append(time.perf_counter() - began)
            if time.perf_counter() - began > 1:
                raise RuntimeError("a mask took more than a second")
            time.sleep(_POLL_S)  # asyncio's waits for whole milliseconds
        return seen


async def _measure(worker: _Worker, end_id: int, steps: int) -> dict[str, float]:
    try:
        await worker.open(end_id)
        for _ in range(_WARM):
            worker.step()
        before, seen = worker.cpu_s, [worker.step() for _ in range(steps)]
        cpu_s = worker.cpu_s - before
    finally:
        await worker.client.stop()
    figures = {"cpu_us_a_mask": round(1e6 * cpu_s / steps / worker.streams, 1)}
    for name, at in (("first_ms", 0), ("last_ms", -1)):
        for percent in (50, 90, 99):
            value = 1e3 * float(np.percentile([one[at] for one in seen], percent))
            figures[f"{name}_p{percent}"] = round(value, 3)
    return figures


def _allowed(mask: Mask) -> npt.NDArray[np.int64]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


if __name__ == "__main__":
    main()
