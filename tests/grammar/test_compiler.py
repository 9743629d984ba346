"""Grammars compiled apart: what one does to the process that compiles it is an error of that grammar
alone."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import resource
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.base.process_stat import is_running, process_stat
from baton.v1.masks_pb2 import MaskCommand, MaskEvent
from baton.v1.types_pb2 import Choices, Grammar
from services.grammar.channel_process import ChannelProcess
from services.grammar.client import MaskClient
from services.grammar.compiler import GrammarCompiler
from services.grammar.grammar_source import grammar_source
from services.router.request.bounds import MAX_CHOICES, MAX_GRAMMAR_BYTES, MAX_RULES
from services.router.tools.families import HERMES
from services.router.tools.tool_use import Tool, ToolUse
from tests.grammar.model import ids_of, make_folder
from tests.grammar.worker import AB, LIMITS, WAIT_S, Worker
from tests.support.waiting import until

YES_OR_NO = Grammar(choice=Choices(choices=["yes", "no"]))
A, B = ids_of("ab")
BYTES = 10 * MAX_GRAMMAR_BYTES


def chain(rules: int, separator: str = ":", start: str = "start") -> str:
    """Rules of which each is the next one: the compiler goes as deep."""
    names = [start, *(f"R{number}" for number in range(1, rules))]
    lines = [f"{one}{separator} {following}" for one, following in itertools.pairwise(names)]
    return "\n".join([*lines, f'{names[-1]}{separator} "a"'])


def nested(opening: str, inner: str, closing: str, size: int) -> str:
    times = size // (len(opening) + len(closing))
    return opening * times + inner + closing * times


def exponential() -> str:
    kinds = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 8} for n in range(20)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": {**kinds, "d20": {"type": "string"}}})


def tools(schema: str, count: int) -> Grammar:
    """The grammar of forced calls; structural: literals around schemas."""
    found = [Tool(f"f{number}", json.loads(schema)) for number in range(count)]
    return HERMES.grammar(ToolUse(tuple(found), tuple(found)), {})


# A grammar is refused after 2 s of a core, which on a busy machine are many.
PATIENT_S = 100.0

# Of each kind of grammar, at ten times its bound and more, what has crashed or stalled compilers.
HOSTILE: dict[str, Grammar] = {
    "json of ten times the bytes": Grammar(json_schema=json.dumps({"enum": ["x" * 50] * (BYTES // 54)})),
    "json of many properties": Grammar(
        json_schema=json.dumps({"properties": {f"p{n}": {"type": "string"} for n in range(BYTES // 26)}})
    ),
    "json, nested": Grammar(json_schema=nested('{"items":', "{}", "}", BYTES)),
    "json, exponential": Grammar(json_schema=exponential()),
    "json, deep pattern": Grammar(json_schema=json.dumps({"type": "string", "pattern": "(a{1000}){1000}"})),
    "regex of ten times the bytes": Grammar(regex="|".join(f"a{n}" for n in range(BYTES // 8))),
    "regex, nested": Grammar(regex=nested("(", "a", ")", BYTES)),
    "regex, repeated": Grammar(regex="(a{1000}){1000}"),
    "regex, repeated five times": Grammar(regex="(((((a{100}){100}){100}){100}){100})"),
    "ten times the choices": Grammar(
        choice=Choices(choices=[f"choice {n}" for n in range(10 * MAX_CHOICES)])
    ),
    "choices of ten times the bytes": Grammar(
        choice=Choices(choices=[f"{'x' * 1000}{n}" for n in range(BYTES // 1000)])
    ),
    "ten times the rules of Lark": Grammar(grammar=chain(10 * MAX_RULES)),
    "terminals of Lark": Grammar(grammar="start: R\n" + chain(10 * MAX_RULES, start="R")),
    "Lark, nested": Grammar(grammar="start: " + nested("(", '"a"', ")", BYTES)),
    "Lark, nested terminals": Grammar(grammar="start: R\nR: " + nested('"a" (', '"b"', ")", BYTES)),
    "Lark, repeated": Grammar(grammar='start: (("a"~1000)~1000)~1000'),
    "ten times the rules of GBNF": Grammar(grammar=chain(10 * MAX_RULES, " ::=", "root")),
    "structural, nested": tools(nested('{"items":', "{}", "}", 700), 128),
    "structural, exponential": tools(exponential(), 128),
}


@pytest.fixture
async def compiler(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[GrammarCompiler]:
    """A compiler with the bounds of its parameter. A request waits as long as a busy machine takes."""
    bounds = {"wait_s": PATIENT_S, **getattr(request, "param", {})}
    one = GrammarCompiler(make_folder(tmp_path), **bounds)
    yield one
    await one.stop()


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> list[Grammar]:
    """The grammars that the compile process has been given and has not answered."""
    given: list[Grammar] = []
    call = ChannelProcess.call

    async def noted(process: ChannelProcess, command: MaskCommand) -> MaskEvent:
        grammar = command.compile.grammar
        given.append(grammar)
        try:
            return await call(process, command)
        finally:
            given.remove(grammar)

    monkeypatch.setattr(ChannelProcess, "call", noted)
    return given


class WholeWorker(Worker):
    """A worker with the compile process and one mask process."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.client = MaskClient(self.setup, self.fail, compile_wait_s=PATIENT_S)

    async def follow(self, slot: int) -> None:
        await self.client.follow((slot, 1), 3, AB, LIMITS, ())


# Of each kind of grammar, at its bound.
AT_BOUND: dict[str, Grammar] = {
    "json": Grammar(json_schema=json.dumps({"enum": ["x" * 50 + str(n) for n in range(2000)]})),
    "regex": Grammar(regex="|".join(f"{n}b" for n in range(18_000))),
    "choice": Grammar(choice=Choices(choices=[f"c{n}" for n in range(MAX_CHOICES)])),
    "Lark": Grammar(grammar=chain(MAX_RULES)),
    "GBNF": Grammar(grammar=chain(MAX_RULES, " ::=", "root")),
    "structural": tools(json.dumps({"properties": {f"p{n}": {"type": "string"} for n in range(25)}}), 128),
}


async def test_what_is_within_the_bounds_can_be_used(compiler: GrammarCompiler) -> None:
    for name, grammar in AT_BOUND.items():
        assert grammar.ByteSize() <= MAX_GRAMMAR_BYTES, name
        assert await compiler.source(name, grammar) == grammar_source(grammar), name


QUICK = ("json, nested", "regex, repeated", "ten times the rules of Lark", "structural, exponential")


@pytest.mark.parametrize("names", [QUICK, pytest.param(tuple(HOSTILE), marks=pytest.mark.slow)], ids=len)
async def test_whatever_is_compiled_a_running_output_gets_its_masks(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    """Each hostile grammar, of a tenant of its own, beside an output of another."""
    worker = WholeWorker(tmp_path)
    refused: list[tuple[str, ErrorKind]] = []
    await worker.client.source("alice", YES_OR_NO)
    await worker.follow(0)
    before = worker.client.pids

    async def hostile(tenant: str, grammar: Grammar) -> None:
        try:
            await worker.client.next_mask(await worker.client.source(tenant, grammar), LIMITS, ())
        except BatonError as error:
            refused.append((tenant, error.kind))

    position, token = 3, A
    try:
        for name in names:
            running = asyncio.create_task(hostile(name, HOSTILE[name]))
            while not running.done():
                worker.draw(0, 1, token)
                position, token = position + 1, A + B - token
                assert (await worker.next_mask())[:3] == (0, 1, position)
                await asyncio.wait((running,), timeout=0.02)
            await running
        assert worker.client.pids == before
        assert (worker.client.restarts, worker.client.followed) == (0, 1)
        assert worker.failed.empty()
    finally:
        await worker.client.stop()
    assert {kind for _, kind in refused} == {ErrorKind.INVALID}, refused
    assert {"ten times the rules of Lark", "regex, repeated", "json, nested"} <= {name for name, _ in refused}


async def test_what_was_found_out_is_remembered(compiler: GrammarCompiler) -> None:
    crashing = HOSTILE["ten times the rules of Lark"]
    messages = []
    for _ in range(2):
        with pytest.raises(BatonError) as caught:
            await compiler.source("mallory", crashing)
        assert caught.value.kind is ErrorKind.INVALID
        messages.append(caught.value.message)
        assert await compiler.source("", YES_OR_NO) == grammar_source(YES_OR_NO)
    assert messages[0] == messages[1]
    assert len(compiler.known) == 2
    assert compiler.pid is not None
    os.kill(compiler.pid, signal.SIGKILL)
    for tenant in ("", "alice"):
        assert await compiler.source(tenant, YES_OR_NO) == grammar_source(YES_OR_NO), "known, process or not"


async def test_a_grammar_that_ended_a_mask_process_is_refused_from_then_on(compiler: GrammarCompiler) -> None:
    source = await compiler.source("", YES_OR_NO)
    compiler.refuse(source, BatonError(ErrorKind.INVALID, "it crashed"))
    with pytest.raises(BatonError, match="it crashed"):
        await compiler.source("alice", YES_OR_NO)


SLOW = [Grammar(regex=f"({letter}{{900}}){{900}}") for letter in "abc"]


@pytest.mark.parametrize("compiler", [{"wait_s": 0.1}], indirect=True)
async def test_a_request_waits_for_its_grammar_as_long_as_it_may(compiler: GrammarCompiler) -> None:
    """One that is not compiled by then may be asked for again: it may be usable."""
    await compiler.start()
    with pytest.raises(BatonError, match=r"did not come within 0\.1 s") as caught:
        await compiler.source("mallory", SLOW[0])
    assert caught.value.kind is ErrorKind.CONFLICT


async def test_a_tenants_grammars_are_compiled_one_by_one_and_others_do_not_wait_for_them(
    compiler: GrammarCompiler, compiling: list[Grammar]
) -> None:
    await compiler.start()
    most = 0

    async def slow(grammar: Grammar) -> None:
        with contextlib.suppress(BatonError):
            await compiler.source("mallory", grammar)

    tasks = [asyncio.create_task(slow(grammar)) for grammar in SLOW]
    waited = 0
    while not all(task.done() for task in tasks):
        most = max(most, len(compiling))
        grammar = Grammar(regex=f"bystander {waited}")
        assert await compiler.source("alice", grammar) == grammar_source(grammar)
        waited += 1
        await asyncio.sleep(0.005)
    assert most == 1
    assert waited
    await until(lambda: not compiler._turns, WAIT_S)


async def test_who_leaves_and_comes_back_has_no_more_than_one_compiled_at_a_time(
    compiler: GrammarCompiler, compiling: list[Grammar]
) -> None:
    await compiler.start()
    most = 0
    for number in range(10):
        grammar = Grammar(regex=f"(a{{9{number}0}}){{900}}")
        task = asyncio.create_task(compiler.source("mallory", grammar))
        await asyncio.sleep(0.01)
        most = max(most, len(compiling))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert most == 1
    async with asyncio.timeout(WAIT_S):
        assert await compiler.source("mallory", YES_OR_NO)
    await until(lambda: not compiler._turns, WAIT_S)


def copies(compiler: GrammarCompiler) -> list[int]:
    """Ids of the compile process's copies that run."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        stat = process_stat(int(name))
        if stat is not None and stat.parent == compiler.pid and not stat.ended:
            found.append(int(name))
    return found


async def test_a_copy_is_used_for_several_small_grammars_and_not_after_one_that_it_refused(
    compiler: GrammarCompiler,
) -> None:
    await compiler.start()
    used = set()
    for number in range(20):
        await compiler.source("", Grammar(regex=f"number {number}"))
        used.add(await spare_of(compiler))
    assert len(used) < 20
    for hostile in (Grammar(regex="("), HOSTILE["ten times the rules of Lark"], EXPENSIVE):
        before = await spare_of(compiler)
        with pytest.raises(BatonError) as caught:
            await compiler.source("", hostile)
        assert caught.value.kind is ErrorKind.INVALID
        assert await compiler.source("", Grammar(regex=f"after {hostile.ByteSize()}"))
        assert await spare_of(compiler, but=before) != before
    before = await spare_of(compiler)
    for number in range(70):
        await compiler.source("", Grammar(regex=f"another {number}"))
    assert await spare_of(compiler, but=before) != before, "not for ever"


EXPENSIVE = HOSTILE["regex, repeated"]


async def spare_of(compiler: GrammarCompiler, but: int | None = None) -> int:
    """The id of the copy that waits for the next grammar, once the others and `but` have ended."""
    async with asyncio.timeout(WAIT_S):
        while len(found := copies(compiler)) != 1 or found == [but]:  # noqa: ASYNC110  another process
            await asyncio.sleep(0.01)
    return found[0]


async def test_a_caller_that_leaves_during_the_start_harms_no_other(compiler: GrammarCompiler) -> None:
    leaving = [asyncio.create_task(compiler.source("", YES_OR_NO)) for _ in range(3)]
    staying = asyncio.create_task(compiler.source("", AB_GRAMMAR))
    for task in leaving:
        await asyncio.sleep(0.02)
        task.cancel()
    async with asyncio.timeout(WAIT_S):
        assert await staying == AB
    assert compiler.restarts == 0


AB_GRAMMAR = Grammar(regex="(ab)+")


@contextlib.contextmanager
def lacking(kind: int, limit: int) -> Iterator[None]:
    """A resource that this process lacks meanwhile."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


async def test_what_the_grammar_is_not_to_blame_for_may_succeed_elsewhere(compiler: GrammarCompiler) -> None:
    """No descriptors; a process that is killed, or killed while it compiles; a copy that is killed."""
    with lacking(resource.RLIMIT_NOFILE, 3), pytest.raises(BatonError) as caught:
        await compiler.source("", YES_OR_NO)
    assert caught.value.kind is ErrorKind.CONFLICT
    assert await compiler.source("", YES_OR_NO)
    for victim in ("process", "copy"):
        assert compiler.pid is not None
        spare = await spare_of(compiler)
        os.kill(spare, signal.SIGSTOP)
        task = asyncio.create_task(compiler.source("", Grammar(regex=f"of a {victim} that ends")))
        await asyncio.sleep(0.1)
        pids = (compiler.pid, spare)
        os.kill(compiler.pid if victim == "process" else spare, signal.SIGKILL)
        with pytest.raises(BatonError) as caught:
            await task
        assert caught.value.kind is ErrorKind.CONFLICT, victim
        assert await compiler.source("", Grammar(regex=f"of a {victim} that ends"))
        await until(lambda: not compiler._turns, WAIT_S)
    assert not any(map(is_running, pids))


@pytest.mark.parametrize("compiler", [{"stopped_s": 0.2}], indirect=True)
async def test_a_compile_process_that_is_stopped_is_replaced(compiler: GrammarCompiler) -> None:
    await compiler.start()
    assert compiler.pid is not None
    os.kill(compiler.pid, signal.SIGSTOP)
    with pytest.raises(BatonError) as caught:
        await compiler.source("", YES_OR_NO)
    assert caught.value.kind is ErrorKind.CONFLICT
    assert await compiler.source("", YES_OR_NO)


async def test_the_end_of_the_front_leaves_no_copy(compiler: GrammarCompiler) -> None:
    await compiler.source("", YES_OR_NO)
    left = [compiler.pid, await spare_of(compiler)]
    await compiler.stop()
    async with asyncio.timeout(WAIT_S):
        while any(is_running(pid) for pid in left if pid is not None):  # noqa: ASYNC110  another's
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("compiler", [{"known_bytes": 4096}], indirect=True)
async def test_what_is_known_is_bounded_in_bytes(compiler: GrammarCompiler) -> None:
    for number in range(12):
        await compiler.source("", Grammar(regex=f"a{number}"))
    assert 1 < len(compiler.known) < 12
    assert compiler.known.bytes <= 4096
