"""What NCCL does when the peer of a link is killed, stopped, or aborts; on two GPUs of one host.

    python -m bench.nccl --json [--only orphaned,killed,stopped,costs,ends] [--limit 230]

One process per GPU, each with two-rank communicators of its own (`bench.nccl.end`); this program sends them
commands, kills and stops them, and prints what it observed, one line per case. It has no GPU itself, and
every answer has a deadline, so that a case that hangs delays no other. Modes: `p2p` (NVLink, memory by
cuMem), `legacy` (NVLink, memory by cudaIpc), `shm` (through the host's memory), `net` (sockets).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.case_output import show
from bench.nccl.stage import Facts, Peer, SilentError, Stage

_SENDER, _RECEIVER = 0, 1
_OLD, _NEW, _MARK = 0x11, 0x22, 0xAB
_CTAS = (1, 2, 4, 8, 16, 32)


def connect(sender: Peer, receiver: Peer, name: str, ctas: int = 16, blocking: bool = True) -> Facts:
    """Opens a link and makes its first transfer, in which NCCL connects the two ends."""
    begun = time.monotonic()
    number = sender.call("unique_id", 20)["id"]
    for rank, peer in ((0, sender), (1, receiver)):
        peer.send_command("connect", name=name, id=number, rank=rank, ctas=ctas, blocking=blocking)
    made = sender.receive(25), receiver.receive(25)
    for peer in (sender, receiver):
        peer.call("buffer", name="small", mb=64, value=_OLD)
    first = transfer(sender, receiver, name, "small", 64)
    return {
        "state": [answer.get("state", answer) for answer in made],
        "created_s": [answer.get("created_s") for answer in made],
        "memory_mb": [answer.get("memory_mb") for answer in made],
        "first_transfer": first["ended"],
        "all_s": round(time.monotonic() - begun, 3),
    }


def transfer(sender: Peer, receiver: Peer, name: str, buffer: str, mb: int, times: int = 1) -> Facts:
    """Transfers from one end to the other; both answers, and the receiver's device time in ms."""
    sender.send_command("send", name=name, buffer=buffer, mb=mb, times=times)
    receiver.send_command("receive", name=name, buffer=buffer, mb=mb, times=times)
    sent, received = sender.receive(), receiver.receive()
    if "error" in sent or "error" in received:
        return {"ended": False, "sent": sent, "received": received}
    return receiver.call("elapsed", name=name, within=5.0) | {"enqueue_us": sent["enqueue_us"]}


def begin_long(stage: Stage, sender: Peer, receiver: Peer) -> bool:
    """Starts a long transfer; whether both ends are in the middle of it on return."""
    long: Facts = {"name": "link", "buffer": "long", "mb": stage.long_mb, "times": stage.long_times}
    receiver.send_command("receive", **long)
    sender.call("send", **long)
    receiver.receive()
    time.sleep(0.02)
    return not receiver.call("wait", name="link", within=0.0)["ended"]


def long_buffers(stage: Stage, sender: Peer, receiver: Peer) -> None:
    sender.call("buffer", name="long", mb=stage.long_mb, value=_NEW)
    receiver.call("buffer", name="long", mb=stage.long_mb, value=_OLD)


def killed(stage: Stage, facts: Facts, victim: str, at: str) -> None:
    """Kills one of two ends during a transfer or before it; the other continues with a third."""
    sender, receiver = stage.peer(_SENDER), stage.peer(_RECEIVER)
    dead, left = (sender, receiver) if victim == "sender" else (receiver, sender)
    third = stage.peer(_SENDER if dead is sender else _RECEIVER)
    facts["link"] = connect(sender, receiver, "link")
    other = (third, left) if dead is sender else (left, third)
    connect(*other, "other")
    facts["via"] = left.call("paths")["via"]
    long_buffers(stage, sender, receiver)
    facts["steps_alone"] = left.call("steps", 20, replays=40)
    if at == "moving":
        facts["moving"] = begin_long(stage, sender, receiver)
    else:
        move = "receive" if dead is sender else "send"
        left.call(move, name="link", buffer="long", mb=stage.long_mb)
    facts["kill_s"] = dead.kill()
    facts["left_alone"] = left.call("wait", name="link", within=1.0)
    facts["steps_before_abort"] = left.call("steps", 20, replays=40)
    facts["other_before_abort"] = transfer(*other, "other", "small", 64)
    facts["abort"] = left.call("end", 12, name="link", how="abort", within=8.0)
    facts["usable"] = left.call("usable")
    facts["steps_after"] = left.call("steps", 20, replays=40)
    facts["other_after"] = transfer(*other, "other", "small", 64)
    if left is receiver:
        facts["arrived"] = left.call("count", buffer="long", value=_OLD)
    begun = time.monotonic()
    again = stage.peer(_SENDER if dead is sender else _RECEIVER)
    pair = (again, left) if dead is sender else (left, again)
    facts["again"] = connect(*pair, "again")
    facts["again_with_start_s"] = round(time.monotonic() - begun, 2)
    facts["warnings"] = left.call("paths")["warnings"]


def stopped(stage: Stage, facts: Facts, at: str, registered: bool = False) -> None:
    """The sender is stopped, the receiver aborts, fills all its memory with a mark, and the sender resumes.

    `moving`: it is stopped within a transfer. `idle`: before one, which it begins when it wakes.
    """
    sender, receiver = stage.peer(_SENDER), stage.peer(_RECEIVER)
    facts["link"] = connect(sender, receiver, "link")
    long_buffers(stage, sender, receiver)
    if registered:
        facts["registered"] = [p.call("register", name="link", buffer="long") for p in (sender, receiver)]
    facts["via"] = receiver.call("paths")["via"]
    if at == "idle":  # first: does a transfer go on while its sender's process is stopped?
        facts["moving"] = begin_long(stage, sender, receiver)
        facts["sender_is"] = sender.stop()
        facts["goes_on_while_stopped"] = receiver.call("wait", name="link", within=2.0)
        sender.go_on()
        facts["and_then"] = receiver.call("wait", name="link", within=5.0)["ended"]
        facts["sender_is"] = sender.stop()
        receiver.call("receive", name="link", buffer="long", mb=stage.long_mb)
        time.sleep(0.1)
    else:
        facts["moving"] = begin_long(stage, sender, receiver)
        facts["sender_is"] = sender.stop()
    facts["abort"] = receiver.call("end", 12, name="link", how="abort", within=8.0)
    if at == "moving":
        facts["arrived"] = receiver.call("count", buffer="long", value=_OLD)
    facts["fill"] = receiver.call("fill", buffer="long", value=_MARK)
    facts["hoard"] = receiver.call("hoard", 25, value=_MARK)
    facts["usable_while_stopped"] = receiver.call("usable")
    sender.go_on()
    if at == "idle":
        facts["sends_late"] = sender.call("send", 15, name="link", buffer="long", mb=stage.long_mb)
    facts["sender_waits"] = sender.call("wait", name="link", within=1.0)
    facts["late"] = late_bytes(receiver)
    facts["sender_aborts"] = sender.call("end", 12, name="link", how="abort", within=8.0)
    facts["sender_usable"] = sender.call("usable")
    facts["late_after_both"] = late_bytes(receiver)
    receiver.call("spoil")
    facts["a_spoilt_byte_is_seen"] = receiver.call("check_hoard", value=_MARK)["changed_pages"] == 1
    receiver.call("drop_hoard")
    facts["receiver_usable"] = receiver.call("usable")
    facts["again"] = connect(sender, receiver, "again")
    facts["warnings"] = [peer.call("paths")["warnings"] for peer in (sender, receiver)]


def late_bytes(receiver: Peer) -> Facts:
    in_buffer = receiver.call("count", buffer="long", value=_MARK)
    return {"in_buffer": in_buffer, "in_other_memory": receiver.call("check_hoard", value=_MARK)}


def costs(stage: Stage, facts: Facts) -> None:
    """For each number of multiprocessors of a communicator: set-up, memory, speed, and its effect on
    steps."""
    sender, receiver = stage.peer(_SENDER), stage.peer(_RECEIVER)
    for peer in (sender, receiver):
        peer.call("buffer", name="long", mb=256, value=_OLD)
    facts["steps_alone"] = receiver.call("steps", 20, replays=100)
    for ctas in _CTAS:
        name = f"c{ctas}"
        fact: Facts = {"link": connect(sender, receiver, name, ctas)}
        facts[name] = fact
        for mb in (8, 64, 256):
            transfer(sender, receiver, name, "long", mb, 3)
            moved = transfer(sender, receiver, name, "long", mb, 10)
            fact[f"gb_s_{mb}"] = _rate(mb, 10, moved)
            fact["enqueue_us"] = moved.get("enqueue_us")
        receiver.call("receive", name=name, buffer="long", mb=256)
        fact["steps_beside_posted"] = receiver.call("steps", 20, replays=100)
        sender.call("send", name=name, buffer="long", mb=256)
        receiver.call("wait", name=name, within=2.0)
        fact["steps_beside_moving"] = _steps_beside_moving(sender, receiver, name)
    facts["not_blocking"] = connect(sender, receiver, "not_blocking", 16, blocking=False)
    facts["not_blocking"]["transfer"] = transfer(sender, receiver, "not_blocking", "long", 64, 10)
    facts["free_mb"] = [peer.call("free")["free_mb"] for peer in (sender, receiver)]
    for ctas in _CTAS:
        name = f"c{ctas}"
        for peer in (sender, receiver):
            facts["registered"] = peer.call("register", name=name, buffer="long")
        transfer(sender, receiver, name, "long", 256, 3)
        facts[name]["gb_s_256_registered"] = _rate(256, 10, transfer(sender, receiver, name, "long", 256, 10))


def _rate(mb: int, times: int, moved: Facts) -> object:
    if not moved.get("ms"):
        return moved
    return round(times * mb * (1 << 20) / moved["ms"] / 1e6, 1)


def _steps_beside_moving(sender: Peer, receiver: Peer, name: str) -> Facts:
    """The receiver's step times during a transfer, and the transfer's speed meanwhile."""
    sender.send_command("send", name=name, buffer="long", mb=256, times=150)
    receiver.call("receive", name=name, buffer="long", mb=256, times=150)
    steps = receiver.call("steps", 20, replays=20)
    flowing = not receiver.call("wait", name=name, within=0.0)["ended"]
    sender.receive()
    moved = receiver.call("elapsed", 25, name=name, within=20.0)
    return steps | {"flowed_throughout": flowing, "gb_s": _rate(256, 150, moved)}


def ends(stage: Stage, facts: Facts) -> None:
    """With both ends alive: one aborts or revokes, then the other; how long each takes, and reconnecting."""
    sender, receiver = stage.peer(_SENDER), stage.peer(_RECEIVER)
    facts["first"] = connect(sender, receiver, "link")
    facts["steps_alone"] = receiver.call("steps", 20, replays=100)
    receiver.call("begin_steps")
    time.sleep(0.5)
    facts["steps_beside_nothing"] = receiver.call("end_steps")
    facts["rounds"] = rounds = []
    for how in ("abort", "abort", "abort", "revoke"):
        receiver.call("receive", name="link", buffer="small", mb=64)
        fact: Facts = {"how": how, "sender": sender.call("end", 12, name="link", how=how, within=5.0)}
        rounds.append(fact)
        fact["receiver_alone"] = receiver.call("wait", name="link", within=0.3)
        receiver.call("begin_steps")
        fact["receiver"] = receiver.call("end", 12, name="link", how=how, within=5.0)
        fact["steps_beside_the_end"] = receiver.call("end_steps")
        fact["usable"] = [peer.call("usable")["usable"] for peer in (sender, receiver)]
        if how == "revoke":
            fact["destroy"] = [
                p.call("end", 12, name="link", how="destroy", within=5.0) for p in (sender, receiver)
            ]
        receiver.call("begin_steps")
        fact["again"] = connect(sender, receiver, "link")
        fact["steps_beside_connecting"] = receiver.call("end_steps")
    calls: Facts = {}
    facts["calls_beside_posted"] = calls
    receiver.call("prepare_calls")
    while True:
        receiver.call("receive", name="link", buffer="small", mb=64)
        answer = receiver.call("calls_that_wait", 20, name="link", first=len(calls))
        calls.update(answer["calls"])
        sender.call("send", name="link", buffer="small", mb=64)
        receiver.call("wait", name="link", within=3.0)
        if not answer["calls"]:
            break


def orphaned(stage: Stage, facts: Facts, how: str) -> None:
    """Kills two senders of one receiver while both of its kernels wait, and aborts one link long before the
    other: whether the first abort, and a launch meanwhile, waits for the second."""
    receiver = stage.peer(_RECEIVER)
    senders = {name: stage.peer(_SENDER) for name in ("link", "other")}
    for name, sender in senders.items():
        facts[name] = connect(sender, receiver, name)
    for name in senders:
        receiver.call("receive", name=name, buffer="small", mb=64)
    for sender in senders.values():
        sender.kill()
    two: Facts = {"first": "link", "second": "other", "how": how, "later_s": 1.5}
    facts["ends"] = receiver.call("end_two", 12, **two)
    if how == "revoke":
        facts["destroy"] = {
            name: receiver.call("end", 12, name=name, how="destroy", within=5.0) for name in senders
        }
    facts["usable"] = receiver.call("usable")


_CASES: list[tuple[str, str, Callable[..., None], Facts]] = [
    ("orphaned", "p2p", orphaned, {"how": "abort"}),
    ("orphaned", "p2p", orphaned, {"how": "revoke"}),
    ("killed", "p2p", killed, {"victim": "sender", "at": "waiting"}),
    ("killed", "p2p", killed, {"victim": "receiver", "at": "moving"}),
    ("stopped", "p2p", stopped, {"at": "idle"}),
    ("stopped", "p2p", stopped, {"at": "moving"}),
    ("costs", "p2p", costs, {}),
    ("ends", "p2p", ends, {}),
    ("stopped", "legacy", stopped, {"at": "idle"}),
    ("stopped", "p2p", stopped, {"at": "idle", "registered": True}),
    ("killed", "p2p", killed, {"victim": "sender", "at": "moving"}),
    ("killed", "legacy", killed, {"victim": "receiver", "at": "moving"}),
    ("stopped", "shm", stopped, {"at": "idle"}),
    ("killed", "p2p", killed, {"victim": "receiver", "at": "waiting"}),
    ("killed", "legacy", killed, {"victim": "sender", "at": "moving"}),
    ("killed", "shm", killed, {"victim": "sender", "at": "moving"}),
    ("stopped", "net", stopped, {"at": "idle"}),
    ("stopped", "p2p", stopped, {"at": "moving", "registered": True}),
    ("stopped", "legacy", stopped, {"at": "moving"}),
    ("killed", "net", killed, {"victim": "sender", "at": "moving"}),
]


@contextlib.contextmanager
def _case(name: str, mode: str, what: Facts, folder: Path, as_json: bool) -> Iterator[tuple[Stage, Facts]]:
    """Reports what was measured before a failure."""
    facts: Facts = {}
    stage, begun = Stage(mode, folder), time.monotonic()
    try:
        yield stage, facts
    except (SilentError, OSError, KeyError) as error:
        facts["broke_off"] = f"{type(error).__name__}: {error}"
    finally:
        stage.end()
        show(
            {"case": name, "mode": mode, **what, **facts, "took_s": round(time.monotonic() - begun, 1)},
            as_json,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="orphaned,killed,stopped,costs,ends")
    parser.add_argument("--limit", type=float, default=230.0, help="begin no case after so many seconds")
    arguments = parser.parse_args()
    import torch

    import bench.nccl.end  # noqa: F401 (what is imported here, the ends have when they are forked)

    begun = time.monotonic()
    print(f"torch {torch.__version__}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        for name, mode, run, what in _CASES:
            if name not in arguments.only.split(","):
                continue
            if time.monotonic() - begun > arguments.limit:
                show({"case": name, "mode": mode, **what, "left_out": "no time"}, arguments.json)
                continue
            with _case(name, mode, what, Path(folder), arguments.json) as (stage, facts):
                run(stage, facts, **what)


if __name__ == "__main__":
    main()
