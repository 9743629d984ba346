"""A hostile client, as a process of its own: `python -m tests.e2e.faults.fuzzer` reads a JSON plan on stdin.

It sends malformed and oversized requests, stops reading, trickles bytes and calls every internal method
without credentials, on a schedule drawn from a seed: action i starts at a fixed time whatever became of the
others, so that two runs send the same bytes at the same times, to a cluster or to a server that discards
them. The schedule begins with each action once. One JSON object with what came of it goes to stdout.
"""

from __future__ import annotations

import json
import random
import select
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice

import grpc

from tests.e2e.faults import odd_requests

_CONNECT_S = 2.0
_MIB = 1 << 20


@dataclass(frozen=True)
class Plan:
    """Targets, duration and rates of the fuzzer. Ports are of 127.0.0.1."""

    http: int
    grpc: int
    # Ports of workers: gRPC, transfers, metrics.
    internal: tuple[int, ...]
    model: str
    seconds: float
    every_s: float
    seed: int
    # The largest body; the full size is 16 MiB.
    largest: int = 16 * _MIB
    # A connection that the peer neither answers nor closes is given up after this.
    give_up_s: float = 8.0
    concurrent: int = 24

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> Plan:
        fields = json.loads(text)
        return cls(**{**fields, "internal": tuple(fields["internal"])})


Action = Callable[["Fuzzer", random.Random], str]


class Fuzzer:
    """Runs the schedule; `counts` says what came of each kind of action."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.counts: Counter[str] = Counter()
        self._running = threading.Semaphore(plan.concurrent)
        self._lock = threading.Lock()

    def run(self) -> Counter[str]:
        """Blocks until the last action has ended. Actions beyond `concurrent` are skipped and counted."""
        dice = random.Random(self.plan.seed)
        began = time.monotonic()
        threads = []
        for number, action in enumerate(islice(_actions(dice), int(self.plan.seconds / self.plan.every_s))):
            own = random.Random(dice.randrange(1 << 60))
            time.sleep(max(0.0, began + number * self.plan.every_s - time.monotonic()))
            if not self._running.acquire(blocking=False):
                self.counts["skipped"] += 1
                continue
            thread = threading.Thread(target=self._one, args=(action, own), daemon=True)
            thread.start()
            threads.append(thread)
        for thread in threads:
            thread.join(self.plan.give_up_s + _CONNECT_S)
        return self.counts

    def _one(self, action: Action, dice: random.Random) -> None:
        try:
            outcome = action(self, dice)
        except OSError as error:
            outcome = type(error).__name__
        finally:
            self._running.release()
        with self._lock:
            self.counts[f"{action.__name__}: {outcome}"] += 1


def _actions(dice: random.Random) -> Iterator[Action]:
    """Each action once, fewer than may run at a time, so that none of these is skipped; then any."""
    yield from dice.sample(ACTIONS, len(ACTIONS))
    while True:
        yield dice.choice(ACTIONS)


def connect(port: int) -> socket.socket:
    one = socket.create_connection(("127.0.0.1", port), _CONNECT_S)
    one.settimeout(_CONNECT_S)
    return one


def send(one: socket.socket, data: bytes) -> bool:
    """Sends what the peer takes; False where it closed, or took nothing more for a while."""
    view = memoryview(data)
    while view:
        try:
            view = view[one.send(view[: 256 << 10]) :]
        except OSError:
            return False
    return True


def answer(one: socket.socket, wait_s: float) -> str:
    """The status of an HTTP answer, `closed`, or `nothing` at the deadline."""
    until = time.monotonic() + wait_s
    head = b""
    while (left := until - time.monotonic()) > 0:
        if not select.select([one], [], [], left)[0]:
            break
        try:
            chunk = one.recv(65536)
        except OSError:
            return "closed"
        if not chunk:
            return "closed"
        head += chunk
        if b"\r\n" in head:
            words = head.split(b" ", 2)
            return words[1].decode("latin-1") if head.startswith(b"HTTP/") else "answered"
    return "nothing"


def post(body: bytes, path: str = "/v1/completions", more: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{more}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _exchange(plan: Plan, port: int, data: bytes) -> str:
    with connect(port) as one:
        send(one, data)
        return answer(one, plan.give_up_s)


def large_header(fuzzer: Fuzzer, dice: random.Random) -> str:
    size = dice.choice((64 << 10, _MIB, min(8 * _MIB, fuzzer.plan.largest)))
    return _exchange(
        fuzzer.plan, fuzzer.plan.http, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"a" * size
    )


def many_headers(fuzzer: Fuzzer, dice: random.Random) -> str:
    lines = b"".join(b"X-%d: y\r\n" % number for number in range(dice.choice((200, 2000, 20000))))
    return _exchange(
        fuzzer.plan, fuzzer.plan.http, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n" + lines + b"\r\n"
    )


def trickled_head(fuzzer: Fuzzer, dice: random.Random) -> str:
    with connect(fuzzer.plan.http) as one:
        until = time.monotonic() + fuzzer.plan.give_up_s
        while time.monotonic() < until:
            if not send(one, b"G" if dice.random() < 0.9 else b"E"):
                return "closed"
            if select.select([one], [], [], 0.5)[0]:
                return answer(one, 0.5)
    return "nothing"


def silent_connection(fuzzer: Fuzzer, dice: random.Random) -> str:
    with connect(dice.choice((fuzzer.plan.http, fuzzer.plan.grpc, *fuzzer.plan.internal))) as one:
        return answer(one, fuzzer.plan.give_up_s)


def stalled_body(fuzzer: Fuzzer, _: random.Random) -> str:
    return _exchange(fuzzer.plan, fuzzer.plan.http, post(b"x" * 100_000)[:-50_000])


def endless_chunks(fuzzer: Fuzzer, dice: random.Random) -> str:
    head = post(b"", more="Transfer-Encoding: chunked\r\n").replace(b"Content-Length: 0\r\n", b"")
    with connect(fuzzer.plan.http) as one:
        send(one, head)
        for _ in range(fuzzer.plan.largest // (64 << 10)):
            if not send(one, b"10000\r\n" + dice.randbytes(16) * 4096 + b"\r\n"):
                break
        return answer(one, fuzzer.plan.give_up_s)


def malformed_json(fuzzer: Fuzzer, dice: random.Random) -> str:
    body = dice.choice((b"{", b"[" * 100_000, b'{"model": 1e999}', dice.randbytes(500), b'"' + b"\\u12" * 99))
    return _exchange(fuzzer.plan, fuzzer.plan.http, post(body))


def _body(fuzzer: Fuzzer, **fields: object) -> bytes:
    return post(json.dumps({"model": fuzzer.plan.model, "max_tokens": 1, **fields}).encode())


def unbroken_text(fuzzer: Fuzzer, dice: random.Random) -> str:
    size = dice.choice((200_000, 1_000_000, fuzzer.plan.largest))
    return _exchange(
        fuzzer.plan, fuzzer.plan.http, _body(fuzzer, prompt="a" * min(size, fuzzer.plan.largest))
    )


def many_ids(fuzzer: Fuzzer, _: random.Random) -> str:
    return _exchange(fuzzer.plan, fuzzer.plan.http, _body(fuzzer, prompt=[7] * (fuzzer.plan.largest // 4)))


def many_biases(fuzzer: Fuzzer, _: random.Random) -> str:
    bias = {str(number): 1 for number in range(fuzzer.plan.largest // 14)}
    return _exchange(fuzzer.plan, fuzzer.plan.http, _body(fuzzer, prompt="a", logit_bias=bias))


def many_messages(fuzzer: Fuzzer, _: random.Random) -> str:
    one = {"role": "user", "content": "a"}
    body = json.dumps({"model": fuzzer.plan.model, "messages": [one] * (fuzzer.plan.largest // 34)}).encode()
    return _exchange(fuzzer.plan, fuzzer.plan.http, post(body, "/v1/chat/completions"))


def wrong_types(fuzzer: Fuzzer, dice: random.Random) -> str:
    keys = ("prompt", "max_tokens", "n", "stop", "temperature", "stream_options", "logit_bias", "seed")
    values: tuple[object, ...] = (None, -1, 1e308, [], {}, [[]], "x", True, {"a": [1] * 50})
    return _exchange(fuzzer.plan, fuzzer.plan.http, _body(fuzzer, **{dice.choice(keys): dice.choice(values)}))


def reader_that_stops(fuzzer: Fuzzer, _: random.Random) -> str:
    with connect(fuzzer.plan.http) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        send(one, _body(fuzzer, prompt=[5, 6, 7], max_tokens=40, stream=True))
        time.sleep(fuzzer.plan.give_up_s)
        return answer(one, 1.0)


def odd_path(fuzzer: Fuzzer, dice: random.Random) -> str:
    """A path that a proxy, a rule and a router may each read in another way."""
    path = dice.choice(odd_requests.PATHS)
    if dice.random() < 0.5:  # a known route, spelt differently
        path = dice.choice(odd_requests.ROUTES) + dice.choice(odd_requests.SUFFIXES)
    method = dice.choice(odd_requests.METHODS)
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    return _exchange(fuzzer.plan, fuzzer.plan.http, head.encode("latin-1"))


def http_variant(fuzzer: Fuzzer, dice: random.Random) -> str:
    """A request that is written in another way than clients write it, or that is none."""
    body = json.dumps({"model": fuzzer.plan.model, "prompt": "a", "max_tokens": 1}).encode()
    return _exchange(fuzzer.plan, fuzzer.plan.http, dice.choice(odd_requests.http_variants(body)))


def odd_text(fuzzer: Fuzzer, dice: random.Random) -> str:
    """Text that is no Unicode, in any field that a text may be in."""
    body = dice.choice(odd_requests.odd_texts(fuzzer.plan.model))
    return _exchange(fuzzer.plan, fuzzer.plan.http, post(body, "/v1/chat/completions"))


def tool_schema(fuzzer: Fuzzer, dice: random.Random) -> str:
    """Tools whose schemas refer to themselves, nest deeply, or are large; now and then one of them forced."""
    body = odd_requests.with_tools(fuzzer.plan.model, dice, fuzzer.plan.largest)
    return _exchange(fuzzer.plan, fuzzer.plan.http, post(body, "/v1/chat/completions"))


def grammar(fuzzer: Fuzzer, dice: random.Random) -> str:
    """A grammar that is broken, expensive to compile, or large."""
    wanted = odd_requests.grammar(dice, fuzzer.plan.largest)
    return _exchange(
        fuzzer.plan, fuzzer.plan.http, _body(fuzzer, prompt="a", max_tokens=4, structured_outputs=wanted)
    )


def garbage(fuzzer: Fuzzer, dice: random.Random) -> str:
    port = dice.choice((fuzzer.plan.grpc, *fuzzer.plan.internal))
    return _exchange(
        fuzzer.plan,
        port,
        dice.choice((dice.randbytes(4096), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + dice.randbytes(999))),
    )


_METHODS = tuple(
    f"/baton.v1.{method}"
    for method in (
        "WorkerService/Describe",
        "WorkerService/GetAudit",
        "PrefillService/Prefill",
        "PrefillService/ProvideTicket",
        "DecodeService/Reserve",
        "DecodeService/Subscribe",
        "DecodeService/Attach",
        "DecodeService/Cancel",
        "DecodeService/GetHandoff",
        "TransferService/OpenLink",
        "TransferService/Send",
    )
)


def stranger(fuzzer: Fuzzer, dice: random.Random) -> str:
    """A gRPC call without credentials, of any internal method on any internal port."""
    return _call(fuzzer.plan, dice.choice(fuzzer.plan.internal), dice.choice(_METHODS), _message(dice))


def public_garbage(fuzzer: Fuzzer, dice: random.Random) -> str:
    size = dice.choice((10, 10_000, fuzzer.plan.largest))
    return _call(
        fuzzer.plan,
        fuzzer.plan.grpc,
        "/baton.v1.RouterService/Generate",
        dice.randbytes(16) * (size // 16 + 1),
    )


def _message(dice: random.Random) -> bytes:
    """Bytes that are no message, a plausible one with random fields, or a large one."""

    def field(number: int, data: bytes) -> bytes:
        return bytes([number << 3 | 2, len(data)]) + data

    plausible = field(1, dice.randbytes(16)) + field(2, dice.randbytes(32)) + bytes([3 << 3, 1])
    return dice.choice((b"", dice.randbytes(64), plausible, dice.randbytes(16) * (64 << 10)))


def _call(plan: Plan, port: int, method: str, message: bytes) -> str:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        call = channel.unary_unary(method, None, None)
        try:
            call(message, timeout=plan.give_up_s)
            return "OK"
        except grpc.RpcError as error:
            return str(error.code().name)


ACTIONS: tuple[Action, ...] = (
    large_header,
    many_headers,
    trickled_head,
    silent_connection,
    stalled_body,
    endless_chunks,
    malformed_json,
    unbroken_text,
    many_ids,
    many_biases,
    many_messages,
    wrong_types,
    reader_that_stops,
    odd_path,
    http_variant,
    odd_text,
    tool_schema,
    grammar,
    garbage,
    stranger,
    stranger,
    public_garbage,
)


def main() -> None:
    counts = Fuzzer(Plan.load(sys.stdin.read())).run()
    print(json.dumps(dict(sorted(counts.items()))))


if __name__ == "__main__":
    main()
