"""Rates of transfers: blocks gathered, checksummed, sent, verified and scattered, and raw bytes beside them.

    python -m bench.transfer --transport grpc|ipc [--mb 8,64,256] [--rounds 5] [--json]
    python -m bench.transfer --transport ipc|nccl --device cuda [--peer 1] [--mb 8,64] [--rounds 5] [--json]
    python -m bench.transfer --transport grpc|ipc|nccl --decode 64 [--device cuda [--peer 1]] [--shape tiny]
        [--steps 512] [--rounds 2] [--json]

Two processes, as many scattered blocks of 1 MiB as hold the megabytes (10^6 bytes), from the
first push until the receiver has verified and scattered the last and found the commit right, by the clock
that both share; `acknowledged_gb_s`: until the sender has received that. `raw_gb_s`: grpc alone, as many
messages of a piece's size over one stream, in the same rounds; over ipc, as many pieces copied into a window
of shared memory. Each figure is the median of the rounds', in 10^9 bytes a second.

On a GPU: blocks of 8 MiB, as an 8B model has in 16 bits, from the first GPU to the one that `--peer` names
(0: to itself); raw is one copy of as many bytes between the two, over nccl one send.
`final_gb_s` counts from when the blocks are final, as a handoff's do when its prompt's last step ends: they
were handed over a millisecond before, as prefill does it, and only the commit is sent then. What arrived last
is compared with what was sent.

With --decode: the receiver's process decodes meanwhile, --decode sequences of 1,024 tokens on random weights
of `--shape`, and 1,024 tokens' KV goes from this process to spare blocks of the very same cache: no transfer,
as many as keep the batch (Poisson), two under way at all times; `bench/transfer/decode_windows.py` has the
windows.
Steps are timed by the GPU's own clock, on a CPU by the host's. The receiver's GPU is the one that `--peer`
names, the sender's is the first, except with grpc: there what is sent lies in the host's memory. `--peer 0`
is one GPU for both processes, which take turns on it: that slows a step by itself. Every transfer is
verified, and the last one of a window compared byte by byte; where one fails there are no figures.

`python -m bench.cluster gpu --handoffs` measures how much of a handoff comes after a prompt's last step.
With --json one object a case goes to stdout; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import count
from statistics import median
from typing import TYPE_CHECKING

import grpc

from bench.options import add_shape_option, program_parser, show
from bench.transfer.ends import (
    TRANSFER,
    ReceiverProcess,
    block_bytes_on,
    blocks_for,
    receiver_process,
    ticket_for,
)
from bench.transfer.sending import SendingEnd
from kvtransfer.sender.transfer import Transfer

if TYPE_CHECKING:
    from bench.transfer.devices import HeldStep


def two_processes(
    megabytes: int, rounds: int, transport: str, device: str = "cpu", peer: str = "cpu"
) -> dict[str, float]:
    """Measures one case; a warm-up round, which opens the link and touches the memory, is not counted."""
    blocks = blocks_for(megabytes, device)
    size = blocks * block_bytes_on(device) / 1e9
    with receiver_process(blocks, transport, peer) as receiver, ExitStack() as ends:
        sending = SendingEnd(blocks, device=device, transport=transport)
        raw = _raw(ends, receiver, megabytes, transport, device, peer)
        numbers = count(1)

        def begin() -> Transfer:
            number = next(numbers)
            receiver.expect(number, blocks)
            return sending.begin(*ticket_for(receiver.ready_line["endpoints"], number, blocks))

        step = None if device == "cpu" else _held_step(device)
        seconds: list[float] = []
        final: list[float] = []
        acknowledged: list[float] = []
        raw_seconds: list[float] = []
        for _ in range(rounds + 1):
            begun, acknowledged_at = sending.commit(begin())
            seconds.append(receiver.verified_at() - begun)
            acknowledged.append(acknowledged_at - begun)
            if step is not None:
                begun, _ = sending.commit_ahead(begin(), step)
                final.append(receiver.verified_at() - begun)
            raw_seconds.append(raw())
        receiver.compare(blocks)
        if sending.transport != transport:
            raise RuntimeError(f"the link went over {sending.transport}")
        sending.close()
    found = {
        "gb_s": size / median(seconds[1:]),
        "raw_gb_s": size / median(raw_seconds[1:]),
        "best_gb_s": size / min(seconds[1:]),
        "acknowledged_gb_s": size / median(acknowledged[1:]),
    }
    return found | ({"final_gb_s": size / median(final[1:])} if final else {})


def _held_step(device: str) -> HeldStep:
    import torch

    from bench.transfer.devices import HeldStep

    return HeldStep(torch.device(device))


def _raw(
    ends: ExitStack, receiver: ReceiverProcess, megabytes: int, transport: str, device: str, peer: str
) -> Callable[[], float]:
    """The time in s of as many bytes over the transport alone; `ends` closes what that needs."""
    if device == "cpu":
        return partial(receiver.raw_seconds, megabytes)
    size = blocks_for(megabytes, device) * block_bytes_on(device)
    if transport == "nccl":
        from bench.transfer.devices import RawNccl

        alone = RawNccl(receiver, size, device)
        ends.callback(alone.close)
        return alone.seconds
    from bench.transfer.devices import RawCopies

    return RawCopies(size, device, peer).seconds


def report(arguments: argparse.Namespace, megabytes: int, figures: dict[str, float]) -> dict[str, object]:
    return {
        "transport": arguments.transport,
        "mb": megabytes,
        "rounds": arguments.rounds,
        "block_bytes": block_bytes_on(arguments.device),
        "piece_bytes": TRANSFER.piece_bytes if arguments.device == "cpu" else None,
        "peer": arguments.peer if arguments.device == "cuda" else None,
        "window_pieces": TRANSFER.window_pieces,
        **{name: round(value, 3) for name, value in figures.items()},
        "device": _device(arguments.device),
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    return {"grpc": grpc.__version__, "python": platform.python_version()}


def _device(name: str) -> str:
    if name == "cpu":
        return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    import torch

    return f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}"


def decode(arguments: argparse.Namespace) -> None:
    """Prints one JSON object for each kind of window, or a table of them."""
    from bench.transfer.decode_windows import beside_decode, table

    asked = ("transport", "shape", "output_len", "rounds")
    about: dict[str, object] = {"batch": arguments.decode} | {name: vars(arguments)[name] for name in asked}
    about |= {"peer": arguments.peer if arguments.device == "cuda" else None}
    about |= {"device": _device(arguments.device), "versions": _versions()}
    found = [about | case for case in beside_decode(arguments)]
    if not arguments.json:
        table(found)
        return
    for case in found:
        show(case, as_json=True)


def _arguments() -> argparse.Namespace:
    parser = program_parser("transfer", __doc__)
    parser.add_argument("--transport", choices=["grpc", "ipc", "nccl"], default="grpc")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the blocks lie")
    parser.add_argument(
        "--peer", type=int, default=0, help="with cuda: the receiver's GPU; the sender's is 0"
    )
    parser.add_argument("--mb", default="8,64,256", help="comma-separated sizes of a transfer, in 10^6 bytes")
    parser.add_argument(
        "--rounds", type=int, default=5, help="transfers of each size, and raw ones; with decode: of windows"
    )
    parser.add_argument("--decode", type=int, default=0, metavar="BATCH", help="sequences decoded meanwhile")
    add_shape_option(parser)
    parser.add_argument("--steps", type=int, default=512, help="with decode: of a window")
    parser.add_argument("--output-len", type=int, default=256, help="with decode: tokens of each request")
    parser.add_argument("--json", action="store_true", help="one object a case on stdout")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and arguments.transport == "grpc" and not arguments.decode:
        parser.error("--device cuda goes with --transport ipc or nccl, or with --decode")
    if arguments.transport == "nccl" and (arguments.device != "cuda" or not arguments.peer):
        parser.error("--transport nccl goes with --device cuda and another GPU as --peer")
    if arguments.decode and (arguments.rounds < 2 or arguments.steps < 2):
        parser.error("--decode wants two rounds of two steps at least")
    return arguments


def main() -> None:
    arguments = _arguments()
    sizes = [int(part) for part in arguments.mb.split(",")]
    if arguments.decode:
        decode(arguments)
        return
    for megabytes in sizes:
        print(f"{megabytes} MB …", file=sys.stderr)
        where = ("cuda:0", f"cuda:{arguments.peer}") if arguments.device == "cuda" else ("cpu", "cpu")
        figures = two_processes(megabytes, arguments.rounds, arguments.transport, *where)
        show(report(arguments, megabytes, figures), arguments.json)


if __name__ == "__main__":
    main()
