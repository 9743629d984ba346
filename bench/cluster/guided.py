"""TPOT of guided outputs beside free ones, on one worker of role both.

    python -m bench.cluster guided [--streams 32] [--output-len 256] [--rounds 3] [--shape llama-3.1-8b]
        [--dtype bf16] [--device cuda|cpu] [--json]

`baton up` serves random weights with a vocabulary of the shape's size. In a round `--streams` streams begin
together, three times: all free; all guided by a JSON schema that no output completes; and half of each.
TPOT is at the client, (last - first token) / (tokens - 1), the mean over streams; each figure is the
median of the rounds'. Sampled at temperature 1. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median

import grpc.aio
import uvloop

from baton.model_spec.byte_tokenizer import BYTES
from baton.v1.router_pb2 import GenerateRequest, TokenIds
from baton.v1.router_pb2_grpc import RouterServiceStub
from baton.v1.types_pb2 import Grammar
from bench.model_folders import write_random_model, write_tokenizer
from bench.options import add_shape_option, program_parser, show
from bench.processes import baton_up, first_gpu

MODEL = "random"
_PROMPT = 32
_CALL_S = 300.0
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "count": {"type": "integer", "minimum": 0, "maximum": 99999},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        },
        "required": ["name", "count", "tags"],
        "additionalProperties": False,
    },
    "minItems": 100_000,
}


def main() -> None:
    """Runs the benchmark, and prints its figures."""
    parser = program_parser("cluster", __doc__, "guided")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=256, help="tokens")
    parser.add_argument("--rounds", type=int, default=3)
    add_shape_option(parser)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    uvloop.run(run(parser.parse_args()))


async def run(arguments: argparse.Namespace) -> None:
    """Raises RuntimeError where the cluster does not start, or a stream is cut short."""
    length = arguments.output_len
    longest = _PROMPT + length + 2
    with tempfile.TemporaryDirectory() as name:
        folder = write_random_model(Path(name), arguments.shape, longest)
        _add_tokenizer(folder)
        flags = [
            "--both", "1", "--slots", str(arguments.streams), "--device", arguments.device,
            "--dtype", arguments.dtype, "--max-context-tokens", str(longest), "--log-level", "warning",
        ]  # fmt: skip
        up = baton_up(folder, MODEL, flags, first_gpu())
        async with up as addresses, grpc.aio.insecure_channel(addresses["grpc"]) as channel:
            found = await _rounds(RouterServiceStub(channel), arguments)
    show(_report(arguments, found), arguments.json)


def _add_tokenizer(folder: Path) -> None:
    """A vocabulary of the configured size, whose last token ends a sequence and stands for no text."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    end = config["eos_token_id"] = config["vocab_size"] - 1
    file.write_text(json.dumps(config))
    write_tokenizer(folder, config["vocab_size"], [end] if end >= BYTES else [])


Round = dict[str, float]


async def _rounds(stub: RouterServiceStub, arguments: argparse.Namespace) -> list[Round]:
    streams, length = arguments.streams, arguments.output_len
    await _burst(stub, streams // 2, streams - streams // 2, 16, 0)  # kernels, links, the mask processes
    found = []
    for number in range(arguments.rounds):
        free, _ = await _burst(stub, streams, 0, length, number)
        _, guided = await _burst(stub, 0, streams, length, number)
        mixed_free, mixed_guided = await _burst(stub, streams // 2, streams - streams // 2, length, number)
        found.append(
            {
                "tpot_free_ms": free,
                "tpot_guided_ms": guided,
                "tpot_mixed_free_ms": mixed_free,
                "tpot_mixed_guided_ms": mixed_guided,
            }
        )
        print(found[-1], file=sys.stderr, flush=True)
    return found


async def _burst(
    stub: RouterServiceStub, free: int, guided: int, length: int, seed: int
) -> tuple[float, float]:
    """Runs `free` and `guided` streams at once; returns the mean TPOT in ms of either kind, 0 where there are
    none."""
    tpots = await asyncio.gather(
        *(_stream(stub, number, number >= free, length, seed) for number in range(free + guided))
    )
    return (
        fmean(tpots[:free]) if free else 0.0,
        fmean(tpots[free:]) if guided else 0.0,
    )


async def _stream(stub: RouterServiceStub, number: int, guided: bool, length: int, seed: int) -> float:
    """One request's TPOT in milliseconds."""
    request = GenerateRequest(
        model=MODEL,
        token_ids=TokenIds(ids=[3 + (7 * number + at) % 200 for at in range(_PROMPT)]),
        max_tokens=length,
        seed=1000 * seed + number,
        ignore_eos=not guided,
        grammar=Grammar(json_schema=json.dumps(SCHEMA)) if guided else None,
    )
    first = last = 0.0
    tokens = 0
    async for message in stub.Generate(request, timeout=_CALL_S):  # type: ignore[attr-defined]
        if message.token_ids:
            last = time.perf_counter()
            first = first or last
            tokens += len(message.token_ids)
    if tokens != length:
        raise RuntimeError(f"a stream ended after {tokens} of {length} tokens")
    return 1000 * (last - first) / (tokens - 1)


def _report(arguments: argparse.Namespace, found: list[Round]) -> dict[str, object]:
    figures = {name: median(one[name] for one in found) for name in found[0]}
    free = figures["tpot_free_ms"]
    settings = ("shape", "dtype", "device", "streams", "output_len", "rounds")
    return {
        **{name: getattr(arguments, name) for name in settings},
        **{name: round(value, 3) for name, value in figures.items()},
        "guided_over_free": round(figures["tpot_guided_ms"] / free, 4),
        "mixed_free_over_free": round(figures["tpot_mixed_free_ms"] / free, 4),
        "mixed_guided_over_free": round(figures["tpot_mixed_guided_ms"] / free, 4),
    }
