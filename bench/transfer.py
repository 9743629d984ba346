"""How fast blocks travel: gathered, checksummed, sent, verified, scattered; raw bytes beside it.

    python -m bench.transfer --transport grpc|ipc [--mb 8,64,256] [--rounds 5] [--json]
    python -m bench.transfer --transport ipc|nccl --device cuda [--peer 1] [--mb 8,64] [--rounds 5] [--json]
    python -m bench.transfer --transport grpc|ipc --streams 64 [--pace 0.75] [--step-ms 5] [--json]

Without streams: two processes, as many scattered blocks of 1 MiB as hold the megabytes (10^6 bytes), from the
first push to the acknowledged commit. `raw_gb_s` is grpc alone: as many messages of a piece's size over one
stream, in the same rounds; over ipc, as many pieces copied into a window of shared memory. Each figure is the
median of the rounds', in 10^9 bytes a second.

On a GPU: blocks of 8 MiB, as an 8B model has in 16 bits, from the first GPU to the one that `--peer` names
(0: to itself); raw is one copy of as many bytes between the two. What arrived last is compared with what was
sent.

With streams: a router, a prefill and a decode worker with fake engines (`bench/fake_engine.py`) serve so
many closed-loop clients in this process, and a sender in another keeps transferring to that decode worker,
one transfer after the other, for as long as they run. A transfer's time ends when the worker's engine has
verified and scattered its last block; `sustained_gb_s` is all bytes over all time, reservations included, and
`--pace` bounds it. `ring_to_client_ms_p99` is the streams', `…_alone` theirs with no transfer.
With --json one object a case goes to stdout; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable
from functools import partial
from statistics import median

import grpc

from bench.case_output import show
from bench.transfer_ends import (
    TRANSFER,
    SendingEnd,
    block_bytes_on,
    blocks_for,
    receiver_process,
    ticket_for,
)


def two_processes(
    megabytes: int, rounds: int, transport: str, device: str = "cpu", peer: str = "cpu"
) -> dict[str, float]:
    """One case; a first round, which opens the link and touches the memory, is not counted."""
    blocks = blocks_for(megabytes, device)
    size = blocks * block_bytes_on(device) / 1e9
    with receiver_process(blocks, transport, peer) as receiver:
        sending = SendingEnd(blocks, device=device, transport=transport)
        raw_seconds: Callable[[], float] = partial(receiver.raw_seconds, megabytes)
        if device != "cpu":
            from bench.transfer_devices import RawCopies

            raw_seconds = RawCopies(blocks * block_bytes_on(device), device, peer).seconds
        seconds: list[float] = []
        raw: list[float] = []
        for number in range(1, rounds + 2):
            receiver.expect(number, blocks)
            transfer = sending.begin(*ticket_for(receiver.said["address"], number, blocks))
            seconds.append(sending.commit(transfer))
            raw.append(raw_seconds())
        receiver.compare(blocks)
        if sending.transport != transport:
            raise RuntimeError(f"the link went over {sending.transport}")
        sending.close()
    return {
        "gb_s": size / median(seconds[1:]),
        "raw_gb_s": size / median(raw[1:]),
        "best_gb_s": size / min(seconds[1:]),
    }


def report(arguments: argparse.Namespace, megabytes: int, figures: dict[str, float]) -> dict[str, object]:
    return {
        "transport": arguments.transport,
        "mb": megabytes,
        "streams": arguments.streams,
        "rounds": arguments.rounds,
        "pace": arguments.pace,
        "block_bytes": block_bytes_on(arguments.device),
        "piece_bytes": TRANSFER.piece_bytes if arguments.device == "cpu" else None,
        "peer": arguments.peer if arguments.device == "cuda" else None,
        "window_pieces": TRANSFER.window_pieces,
        **{name: round(value, 3) for name, value in figures.items()},
        "device": _device(arguments.device),
        "versions": {"grpc": grpc.__version__, "python": platform.python_version()},
    }


def _device(name: str) -> str:
    if name == "cpu":
        return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    import torch

    return f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.transfer", description="How fast blocks travel.")
    parser.add_argument("--transport", choices=["grpc", "ipc", "nccl"], default="grpc")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the blocks lie")
    parser.add_argument(
        "--peer", type=int, default=0, help="with cuda: the receiver's GPU; the sender's is 0"
    )
    parser.add_argument("--mb", default="8,64,256", help="comma-separated sizes of a transfer, in 10^6 bytes")
    parser.add_argument("--rounds", type=int, default=5, help="transfers of each size, and raw ones")
    parser.add_argument("--streams", type=int, default=0, help="token streams on the same worker meanwhile")
    parser.add_argument("--step-ms", type=float, default=10.0, help="with streams: time of one engine step")
    parser.add_argument("--output-len", type=int, default=200, help="with streams: tokens of each request")
    parser.add_argument("--pace", type=float, default=0.0, help="with streams: GB/s on average at most")
    parser.add_argument("--json", action="store_true", help="one object a case on stdout")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and (arguments.transport == "grpc" or arguments.streams):
        parser.error("--device cuda goes with --transport ipc or nccl, and without --streams")
    if arguments.transport == "nccl" and (arguments.device != "cuda" or not arguments.peer):
        parser.error("--transport nccl goes with --device cuda and another GPU as --peer")
    sizes = [int(part) for part in arguments.mb.split(",")]
    if arguments.streams:
        from bench.transfer_streams import beside_streams

        for megabytes, figures in beside_streams(arguments, sizes):
            show(report(arguments, megabytes, figures), arguments.json)
        return
    for megabytes in sizes:
        print(f"{megabytes} MB …", file=sys.stderr)
        where = ("cuda:0", f"cuda:{arguments.peer}") if arguments.device == "cuda" else ("cpu", "cpu")
        figures = two_processes(megabytes, arguments.rounds, arguments.transport, *where)
        show(report(arguments, megabytes, figures), arguments.json)


if __name__ == "__main__":
    main()
