"""Measures a whole cluster on one or two GPUs: clients of its gRPC API, and decode compared with the bare
engine.

    python -m bench.cluster gpu [--topology shared,both,apart] [--transport auto] [--streams 1,16,64]
        [--prompts 1024,128] [--handoffs 1024,8192] [--output-len 256] [--requests 3]
        [--shape llama-3.1-8b] [--dtype bf16] [--tensor-parallel 1] [--device cuda|cpu] [--alone] [--json]

shared: one prefill and one decode worker, each with half of the GPU's memory (`--gpu-memory` in total); both:
one worker of role both; apart: one prefill and one decode worker, a GPU each, or `--tensor-parallel` of them.
`baton up` serves random weights; this program starts and stops it.

    handoff  prompts of `--handoffs` tokens, one at a time: TTFT, and the exposed part of the handoff after
             the prompt's last step (`handoff_exposed_ns` of the trace; with topology both no byte moves)
    loop     closed loops of `--streams` streams by `loadgen run`: TTFT, TPOT, ITL, tokens per second
    burst    a number of prompts at once; then prefill idles, and from the joining of the last stream to the
             end of the first TPOT is that of decode alone: `engine` is the decode worker's own measure of
             one second of it
    links    traffic over the links so far, from the workers' integrity reports: transport, bytes, fallbacks
    alone    with --alone: `python -m bench.decode` at each burst's batch and mean context, after the
             cluster has stopped; `over_alone` is the burst's TPOT over its step, in percent

Prints one JSON object per measurement on stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import grpc.aio
import uvloop

from baton.base.process_tuning import batch_wakeups
from bench.cluster.clients import Bursts
from bench.model_folders import write_random_model
from bench.options import add_shape_option, program_parser, show
from bench.processes import baton_up, first_gpu, worker_reports
from bench.shapes import SHAPES

MODEL = "random"
_PAIR = ("--prefill", "1", "--decode", "1")
TOPOLOGIES = {"shared": _PAIR, "both": ("--both", "1"), "apart": _PAIR}
# Output tokens of a burst in addition to those during its own prefill; the bare engine's step is measured at
# their mean.
_BURST_TOKENS, _ALONE_MEAN = 1024, 96
_LOADGEN_S, _ALONE_S = 120.0, 120.0
_HANDOFFS = 20  # of each length


def main() -> None:
    arguments = _parser().parse_args()
    random.seed(arguments.seed)
    uvloop.run(run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = program_parser("cluster", __doc__, "gpu")
    parser.add_argument("--topology", default="shared,both", help=f"of {','.join(TOPOLOGIES)}")
    parser.add_argument("--transport", default="auto", help="of baton up")
    parser.add_argument("--streams", default="1,16,64", type=_numbers)
    parser.add_argument("--prompts", default="1024,128", type=_numbers, help="tokens, of closed loops")
    parser.add_argument("--handoffs", default="", type=_numbers, help="tokens, of prompts that come alone")
    parser.add_argument("--output-len", type=int, default=256, help="tokens, of closed loops")
    parser.add_argument("--requests", type=int, default=3, help="of each stream in a closed loop")
    parser.add_argument("--burst-prompt", type=int, default=256, help="tokens, of bursts")
    parser.add_argument("--burst-output", type=int, default=_BURST_TOKENS, help="tokens, of bursts")
    add_shape_option(parser)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="GPUs of a worker")
    parser.add_argument("--gpu-memory", default="0.9", help="share of the GPU, of all workers together")
    parser.add_argument("--up", action="append", default=[], help="one more word for baton up")
    parser.add_argument("--alone", action="store_true", help="the bare engine beside each burst")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one object a line, for programs")
    return parser


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


async def run(arguments: argparse.Namespace) -> None:
    """Raises RuntimeError where a cluster does not start, or cuts a stream short."""
    longest = 2 + max(
        max([*arguments.prompts, *arguments.handoffs]) + arguments.output_len,
        arguments.burst_prompt + arguments.burst_output,
    )
    bursts: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        model = write_random_model(Path(name), arguments.shape, longest)
        for topology in arguments.topology.split(","):
            flags = [
                *TOPOLOGIES[topology], "--slots", str(max(arguments.streams)), "--device", arguments.device,
                "--dtype", arguments.dtype, "--gpu-memory", arguments.gpu_memory,
                "--max-context-tokens", str(longest), "--log-level", "warning",
                "--transport", arguments.transport, "--tensor-parallel", str(arguments.tensor_parallel),
                *arguments.up,
            ]  # fmt: skip
            environment = {} if topology == "apart" or arguments.tensor_parallel > 1 else first_gpu()
            async with baton_up(model, MODEL, flags, environment) as addresses:
                found = await _bursts(arguments, topology, addresses)
                bursts += found
                for prompt in arguments.prompts:
                    for streams in arguments.streams:
                        loop = await _loop(arguments, addresses, streams, prompt)
                        show({"topology": topology, "load": "loop", **loop}, arguments.json)
                show(
                    {"topology": topology, "load": "links", **await _links(addresses["admin"])},
                    arguments.json,
                )
    if arguments.alone:
        await _alone(arguments, bursts)


async def _bursts(
    arguments: argparse.Namespace, topology: str, addresses: dict[str, str]
) -> list[dict[str, Any]]:
    """A burst of each size, after one that opens links and fills caches."""
    vocab, prompt = SHAPES[arguments.shape].config["vocab_size"], arguments.burst_prompt
    batch_wakeups()  # as any busy gRPC client would
    found = []
    async with grpc.aio.insecure_channel(addresses["grpc"]) as channel:
        bursts = Bursts(channel, addresses["admin"], MODEL, vocab)
        await bursts.warm(max(arguments.streams), prompt, arguments.burst_output // 4)
        for streams in arguments.streams:
            result: dict[str, Any] = {"topology": topology, "load": "burst"}
            result |= await bursts.run(streams, prompt, arguments.burst_output)
            show(result, arguments.json)
            found.append(result)
        for tokens in arguments.handoffs:
            await bursts.one_by_one(1, tokens)
            one = await bursts.one_by_one(_HANDOFFS, tokens)
            show({"topology": topology, "load": "handoff", **one}, arguments.json)
    return found


async def _loop(
    arguments: argparse.Namespace, addresses: dict[str, str], streams: int, prompt: int
) -> dict[str, Any]:
    """A closed loop of `streams` clients, by loadgen."""
    with tempfile.TemporaryDirectory() as folder:
        result = await _program(
            _LOADGEN_S, "loadgen", "run", f"grpc://{addresses['grpc']}", "--admin", addresses["admin"],
            "--concurrency", str(streams),
            "--input-len", str(prompt), "--output-len", str(arguments.output_len),
            "--num-requests", str(arguments.requests * streams), "--warmup", "2",
            "--vocab-size", str(SHAPES[arguments.shape].config["vocab_size"]),
            "--seed", str(arguments.seed), "--out", folder, "--json",
        )  # fmt: skip
    figures: dict[str, float | None] = {}
    for name in ("ttft", "tpot", "itl"):
        percentiles = result["quantities"][name]["percentiles"]  # empty where no request of the window has it
        for point in ("50", "99"):
            value = percentiles.get(point, {}).get("value")
            figures[f"{name}_p{point}_ms"] = value and round(value, 3)
    return {
        "streams": streams, "prompt": prompt, "output": arguments.output_len, "ok": result["ok"],
        "failed": result["failed"], **figures, "output_tok_s": round(result["throughput"]["output_tokens"]),
        "invalid": [reason["kind"] for reason in result["invalid"]],
    }  # fmt: skip


async def _links(admin: str) -> dict[str, Any]:
    """The links of all workers."""
    reports = [worker.report for worker in await worker_reports(admin)]
    return {
        "transports": sorted({link.transport for report in reports for link in report.links}),
        "handoffs": sum(report.handoffs_committed for report in reports),
        "received_gb": round(sum(report.bytes_received for report in reports) / 1e9, 3),
        "fell": sum(report.link_fallbacks for report in reports),
        "broken": sum(report.links_broken for report in reports),
        "checksum_failures": sum(report.checksum_failures for report in reports),
    }


async def _alone(arguments: argparse.Namespace, bursts: list[dict[str, Any]]) -> None:
    """The bare engine's step at each burst's batch and mean context, and the cluster's difference from it."""
    for burst in bursts:
        context = max(1, burst["mean_context"] - _ALONE_MEAN)
        result = await _program(
            _ALONE_S, "bench.decode", "--shape", arguments.shape, "--dtype", arguments.dtype,
            "--batch", str(burst["streams"]), "--context", str(context), "--json",
        )  # fmt: skip
        over = {
            "client": round((burst["tpot_ms"] / result["tpot_ms"] - 1) * 100, 2),
            "engine": round((burst["engine"]["mean_ms"] / result["tpot_ms"] - 1) * 100, 2),
        }
        settings = {name: burst[name] for name in ("topology", "streams", "mean_context", "tpot_ms")}
        alone = {"load": "alone", **settings, "alone_ms": result["tpot_ms"], "over_alone_percent": over}
        show(alone, arguments.json)


async def _program(within_s: float, *words: str) -> dict[str, Any]:
    """Runs a module and parses the last line of its output, a JSON object. Raises RuntimeError."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *words, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(within_s):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = out.decode().splitlines()
    if not lines:
        raise RuntimeError(f"{words[0]} wrote nothing and ended with {process.returncode}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result
