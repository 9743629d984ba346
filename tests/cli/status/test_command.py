"""`baton status`, once and watched: which port they ask, and what they show of each."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.rpc.grpc_errors import to_status
from baton.v1 import router_pb2
from services.cli.common import admin_call
from services.cli.main import main
from services.cli.status import source as status_source
from tests.cli.status.statuses import decode, prefill, status

COMMANDS = [["status"], ["status", "--watch", "--once"]]
IDS = ["status", "watch"]
NOTE = "on the router's admin port only (--admin HOST:PORT)"
UNUSED = "127.0.0.1:1"


@dataclass(frozen=True, slots=True)
class Served:
    """A router's public and admin addresses."""

    public: str
    admin: str


@contextlib.contextmanager
def serving() -> Iterator[Served]:
    """A router that answers GetStatus on both ports, with one worker of each role."""
    servers = [grpc.server(ThreadPoolExecutor(2)) for _ in range(2)]
    ports = [server.add_insecure_port("127.0.0.1:0") for server in servers]
    full = status(prefill("prefill-0"), decode("decode-0"))
    full.grpc_address = f"0.0.0.0:{ports[0]}"
    answers = {
        "RouterService": router_pb2.GetStatusResponse(router=full.router).SerializeToString(),
        "AdminService": full.SerializeToString(),
    }
    for server, (service, answer) in zip(servers, answers.items(), strict=True):
        handler = grpc.unary_unary_rpc_method_handler(lambda asked, context, answer=answer: answer)
        named = grpc.method_handlers_generic_handler(f"baton.v1.{service}", {"GetStatus": handler})
        server.add_generic_rpc_handlers((named,))
        server.start()
    try:
        yield Served(*(f"127.0.0.1:{port}" for port in ports))
    finally:
        for server in servers:
            server.stop(None).wait()


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as one:
        yield one


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(status_source, "DEFAULT_ADDRESS", UNUSED)


@pytest.mark.parametrize("command", COMMANDS, ids=IDS)
def test_the_admin_port_shows_workers(
    command: list[str], served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    for address in ([], [served.public], [UNUSED]):
        assert main([*command, *address, "--admin", served.admin]) == 0
        shown = capsys.readouterr().out
        assert "prefill-0" in shown
        assert "decode-0" in shown
        assert NOTE not in shown


@pytest.mark.parametrize("command", COMMANDS, ids=IDS)
def test_without_an_address_loopbacks_default_port_is_asked(
    command: list[str], served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(status_source, "DEFAULT_ADDRESS", served.admin)
    assert main(command) == 0
    assert "decode-0" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS, ids=IDS)
def test_a_public_address_gives_totals_unless_the_default_admin_port_is_its_own(
    command: list[str], served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, served.public]) == 0
    shown = capsys.readouterr().out
    assert "a-model-of-some-length serving" in shown
    assert NOTE in shown
    assert "decode-0" not in shown

    monkeypatch.setattr(status_source, "DEFAULT_ADDRESS", served.admin)
    assert main([*command, f"grpc://{served.public}"]) == 0
    assert "decode-0" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS, ids=IDS)
def test_another_routers_admin_port_is_not_taken_for_this_ones(
    command: list[str], served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two clusters of one host: the default admin port is the other one's."""
    with serving() as other:
        monkeypatch.setattr(status_source, "DEFAULT_ADDRESS", other.admin)
        assert main([*command, served.public]) == 0
    shown = capsys.readouterr().out
    assert NOTE in shown
    assert "decode-0" not in shown


def test_json_of_both_ports(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--json", "--admin", served.admin]) == 0
    full = json.loads(capsys.readouterr().out)
    assert main(["status", "--json", served.public]) == 0
    totals = json.loads(capsys.readouterr().out)
    assert full["router"] == totals["router"]
    assert [worker["worker"]["identity"]["name"] for worker in full["workers"]] == ["prefill-0", "decode-0"]
    assert (totals["workers"], totals["grpcAddress"]) == ([], "")


def error_of(command: list[str], capsys: pytest.CaptureFixture[str], code: int = 1) -> str:
    """The one line that a command ends with."""
    assert main(command) == code
    reported = capsys.readouterr()
    assert reported.out == ""
    assert reported.err.count("\n") == 1
    return reported.err


ADMIN_COMMANDS = [
    *COMMANDS,
    ["drain", "--router"],
    ["drain", "decode-0"],
    ["pool", "list"],
    ["pool", "switch", "p"],
]


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [([], True), ([UNUSED], False), (["--admin", UNUSED], False)],
    ids=["default", "public", "admin"],
)
def test_no_answer_costs_one_line_which_all_commands_share(
    arguments: list[str],
    hint: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(admin_call, "DEFAULT_ADDRESS", UNUSED)
    commands = COMMANDS if arguments == [UNUSED] else ADMIN_COMMANDS
    (line,) = {error_of([*command, *arguments], capsys) for command in commands}
    assert line.startswith(f"baton: error: no answer from {UNUSED}: UNAVAILABLE ")
    assert ("--admin HOST:PORT" in line) == hint


@contextlib.contextmanager
def refusing(error: BatonError) -> Iterator[str]:
    """The address of a router that answers every call with an error."""
    refusal = to_status(error)

    def refuse(asked: object, context: grpc.ServicerContext) -> None:
        context.abort_with_status(refusal)

    server = grpc.server(ThreadPoolExecutor(2))
    handler = grpc.unary_unary_rpc_method_handler(refuse)
    methods = {
        "RouterService": ["GetStatus"],
        "AdminService": ["GetStatus", "Drain", "SwitchPool"],
    }
    for service, names in methods.items():
        handlers = dict.fromkeys(names, handler)
        named = grpc.method_handlers_generic_handler(f"baton.v1.{service}", handlers)
        server.add_generic_rpc_handlers((named,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize(
    ("kind", "code"),
    [(ErrorKind.UNAVAILABLE, 1), (ErrorKind.INTERNAL, 1), (ErrorKind.NOT_FOUND, 2), (ErrorKind.CONFLICT, 2)],
)
def test_what_a_router_answers_is_not_called_no_answer(
    kind: ErrorKind, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with refusing(BatonError(kind, "so it is")) as address:
        lines = {error_of([*command, "--admin", address], capsys, code) for command in ADMIN_COMMANDS}
        assert lines == {"baton: error: so it is\n"}


def test_a_refusal_names_the_variable_of_the_port_that_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with refusing(BatonError(ErrorKind.UNAUTHENTICATED, "who is this?")) as address:
        lines = {error_of([*command, "--admin", address], capsys) for command in ADMIN_COMMANDS}
        assert lines == {f"baton: error: {address}: who is this? (set BATON_CLUSTER_SECRET)\n"}
        lines = {error_of([*command, address], capsys) for command in COMMANDS}
        assert lines == {f"baton: error: {address}: who is this? (set BATON_API_KEY)\n"}


@pytest.mark.parametrize("arguments", [[], ["decode-0", "--router"], ["--resume"]], ids=" ".join)
def test_a_drain_of_what_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["drain", *arguments])
    assert exited.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
