"""Prefill steps by the GPU kernels on several ranks, whose double runs in Triton's interpreter in turn."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from baton.device.streams.upload import put_ints
from baton.engine.decode import gpu_group
from baton.engine.model.modules import Model
from baton.engine.model.weight_formats import weight_formats
from baton.engine.parallel.exchange import ExchangeTimeoutError
from baton.engine.plan.step_plan import Chunk, StepPlan
from baton.engine.prefill import gpu_pass, graphs
from baton.engine.sequence import SamplingParams
from baton.engine.sequence import Sequence as Prompt
from baton.engine.shared_memory.logprob_records import Logprobs
from baton.model_spec.layout import FP8
from bench.engine_driver import prefill_step, take
from tests.engine.executor.test_ranks_in_steps import SHAPE, starts
from tests.engine.local_engine import LocalEngine, Start
from tests.engine.model.quantization.packing import FORMATS
from tests.engine.parallel.host.turn_group import HostGroup
from tests.engine.parallel.test_decode_on_ranks import CASES, DIVIDED, kept_in
from tests.engine.parallel.turns import TurnGroup
from tests.support.checkpoints import FAMILIES
from tests.support.host_kernels import needs_compiler

SLOW = pytest.mark.slow
PROMPTS = [tuple(range(3, 24)), (7, 50, 31), tuple(range(40, 56))]
BY = "tensor", "block"
GREEDY, DRAWN = SamplingParams(), SamplingParams(0.9, seed=11)
# Of HostGroup: a node of a model of two layers, the rank that is late there, and the one that waits.
LATE = [(0, 0, 1), (1, 1, 0), (1, 0, 1), (4, 1, 0), (5, 1, 0)]


def on_ranks(folder: Path, **options: Any) -> LocalEngine:
    return LocalEngine(folder, graph=True, **{"ranks": 2, "group": TurnGroup, "prompts": "eager", **options})


@pytest.mark.parametrize(
    ("name", "most"),
    [
        (DIVIDED[0], 2),
        pytest.param(DIVIDED[1], 2, marks=SLOW),
        *(pytest.param(name, 3, marks=SLOW) for name in DIVIDED),
    ],
)
def test_families_compute_prompts_as_one_device(tmp_path: Path, name: str, most: int) -> None:
    """Prompts take one step, two, or a part of one; decode steps then find keys and values on each device."""
    folder = CASES[name].make(tmp_path / "model")
    outputs, made = [], list[TurnGroup]()
    for engine in (
        LocalEngine(folder, checkpoint=True),
        on_ranks(folder, checkpoint=True, group=kept_in(made)),
    ):
        keys = engine.start_many([Start(prompt, most) for prompt in PROMPTS])
        outputs.append(engine.run(*keys))
    assert outputs[0] == outputs[1]
    assert int(made[0].whole) == 1


@needs_compiler
@pytest.mark.parametrize("name", [pytest.param("gemma3-windows", marks=SLOW), "llama-tied-biases"])
def test_steps_exchange_by_the_kernels_themselves(tmp_path: Path, name: str) -> None:
    """Parts, norms and logits are where the kernels look for them; three ranks' vocabulary is not divided
    evenly."""
    shape = {"hidden_size": 96, "intermediate_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
    folder = CASES[name].make(tmp_path / "model", **shape)
    outputs = []
    for engine in (
        LocalEngine(folder, checkpoint=True),
        on_ranks(folder, checkpoint=True, ranks=3, group=HostGroup),
    ):
        keys = engine.start_many([Start(prompt, 3) for prompt in PROMPTS[:2]])
        outputs.append(engine.run(*keys))
        assert not engine.prefill.device_hung()
        assert not engine.decode.device_hung()
    assert outputs[0] == outputs[1]


@needs_compiler
@pytest.mark.parametrize(
    ("behind", "node", "late", "waits", "never"),
    [
        *((0, *case, False) for case in (LATE[0], LATE[3])),
        (1, *LATE[4], False),
        (0, *LATE[1], True),
        *(pytest.param(0, *case, False, marks=SLOW) for case in (LATE[1], LATE[2], LATE[4])),
        pytest.param(1, *LATE[0], False, marks=SLOW),
        *(pytest.param(0, *case, True, marks=SLOW) for case in LATE[3:]),
        pytest.param(1, *LATE[4], True, marks=SLOW),
    ],
    ids=str,
)
def test_a_step_that_one_device_is_late_for(
    tmp_path: Path, behind: int, node: int, late: int, waits: int, never: bool
) -> None:
    """The device is late at the step's begin, a sum or its end, or at those of the step behind it that
    gathers logits: no first token is given out, nor one of a prompt that follows, no sequence that is decoded
    goes on, and the device that waited is known."""
    made: list[HostGroup] = []

    def group(models: Sequence[Model], rows: int, prompt_rows: int) -> HostGroup:
        made.append(HostGroup(models, rows, prompt_rows))
        return made[0]

    engine = on_ranks(tmp_path / "model", slots=2, changes=SHAPE, group=group)
    key = engine.start(PROMPTS[1], max_tokens=20)
    engine.step()
    assert not engine.prefill.device_hung()
    output = list(engine.output[key])
    made[0].behind, made[0].late, made[0].never = behind, (node, late), never
    for prompt in PROMPTS[1:]:
        add(engine, prompt)
        assert prefill_step(engine.executor) == []
    assert made[0].late is None
    engine.step()
    assert engine.output[key] == output
    assert take(engine.executor) == []
    with pytest.raises(ExchangeTimeoutError) as caught:
        engine.prefill.device_hung()
    timeout = caught.value.timeout
    assert (timeout.node, timeout.rank, timeout.peer) == (node, waits, late)
    assert timeout.layer == {1: 0, 4: 1}.get(node)


@pytest.mark.parametrize("first", [True, False], ids=["first chunk", "last chunk"])
def test_no_chunk_of_a_prompt_is_given_out_once_the_exchange_has_failed(tmp_path: Path, first: bool) -> None:
    """Not even one that draws no token: its blocks would be handed over, and found by other prompts."""
    made: list[TurnGroup] = []
    engine = on_ranks(tmp_path / "model", changes=SHAPE, group=kept_in(made))
    sequence = add(engine, PROMPTS[0])
    if not first:
        (result,) = prefill_step(engine.executor)
        assert (result.token, engine.prefill.tokens_run) == (None, 16)
    made[0].whole.zero_()
    before = engine.prefill.tokens_run
    assert prefill_step(engine.executor) == []
    assert engine.prefill.under_way
    assert engine.prefill.tokens_run == before == sequence.computed
    with pytest.raises(ExchangeTimeoutError):
        engine.prefill.device_hung()


@pytest.mark.parametrize("how", ["eager", pytest.param("graphs", marks=SLOW)])
def test_decode_steps_join_on_every_device(tmp_path: Path, how: str) -> None:
    outputs = []
    for engine in (
        LocalEngine(tmp_path / "one", changes=SHAPE),
        on_ranks(tmp_path / "two", changes=SHAPE, mixed=how),
    ):
        first = engine.start(PROMPTS[1], max_tokens=7)
        second = engine.start(PROMPTS[0], max_tokens=4, sampling=DRAWN)
        outputs.append(engine.run(first, second))
    assert outputs[0] == outputs[1]
    assert engine.mixed_steps == 2
    assert engine.prefill.under_way is False


@needs_compiler
def test_rows_that_join_are_sent_by_the_kernels_themselves(tmp_path: Path) -> None:
    """And those of a step that one device misses publish nothing."""
    outputs, made, one_output = [], list[HostGroup](), list[int]()

    def group(models: Sequence[Model], rows: int, prompt_rows: int) -> HostGroup:
        made.append(HostGroup(models, rows, prompt_rows))
        return made[0]

    for engine in (
        LocalEngine(tmp_path / "one", changes=SHAPE),
        on_ranks(tmp_path / "two", changes=SHAPE, mixed="eager", group=group),
    ):
        first = engine.start(PROMPTS[1], max_tokens=20)
        engine.start(PROMPTS[2], max_tokens=4)
        engine.read()
        outputs.append(list(engine.output[first]))
        while len(engine.output[first]) < 4:
            engine.step()
        one_output = one_output or engine.output[first]
    assert engine.mixed_steps == 1
    output = list(engine.output[first])
    assert outputs == [[], output[:2]], "the token it was admitted with, and one of the step that joined"
    assert output == one_output
    made[0].late = 2, 1
    add(engine, PROMPTS[1])
    assert prefill_step(engine.executor) == []
    engine.read()
    assert engine.output[first] == output
    with pytest.raises(ExchangeTimeoutError):
        engine.prefill.device_hung()


@pytest.mark.parametrize(
    ("group", "chunk"),
    [
        (TurnGroup, 4),
        pytest.param(TurnGroup, 16, marks=SLOW),
        pytest.param(HostGroup, 16, marks=[SLOW, needs_compiler]),
    ],
)
def test_graphs_on_every_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: type[TurnGroup], chunk: int
) -> None:
    """Captured on one alone after the other, which leaves counters and flags equal."""
    found = list[bool]()
    prepare = graphs.PrefillGraphs.prepare

    def watched(self: graphs.PrefillGraphs, *arguments: Any) -> Any:
        graph = prepare(self, *arguments)
        found.append(graph is not None)
        return graph

    monkeypatch.setattr(graphs.PrefillGraphs, "prepare", watched)
    outputs, shape = [], SHAPE | {"num_hidden_layers": 1}
    for engine in (
        LocalEngine(tmp_path / "one", changes=shape),
        on_ranks(tmp_path / "two", changes=shape, prompts="graphs", group=group, chunk=chunk),
    ):
        keys = engine.start_many([Start(prompt, 3) for prompt in PROMPTS[1:2]])
        outputs.append(engine.run(*keys))
        assert not engine.prefill.device_hung()
    assert outputs[0] == outputs[1]
    assert found == [True] * 2


def test_a_step_of_too_many_rows_is_launched_nowhere(tmp_path: Path) -> None:
    made: list[TurnGroup] = []
    engine = on_ranks(tmp_path / "model", changes=SHAPE, group=kept_in(made))
    prompt = add(engine, PROMPTS[0])
    with pytest.raises(ValueError, match="a pass of 21 rows, made for 16"):
        engine.prefill.launch(StepPlan(chunks=(Chunk(prompt, 0, 21),)))
    assert made[0].steps == 0


@pytest.mark.slow
def test_what_a_worker_does_at_its_start(tmp_path: Path) -> None:
    """Kernels are warmed up and graphs captured on one device alone after the other; then steps are timed on
    both."""
    made: list[TurnGroup] = []
    shape = SHAPE | {"num_hidden_layers": 1}
    engine = on_ranks(tmp_path / "two", changes=shape, prompts="started", group=kept_in(made))
    assert not made[0].alone
    assert made[0].steps == 8, "four of few rows, and four of the most"
    assert engine.scheduler.graph_rows == 2048
    assert engine.scheduler.row_times.rows == (64,)
    keys = engine.start_many([Start(prompt, 3) for prompt in PROMPTS[:2]])
    one = LocalEngine(tmp_path / "one", changes=shape)
    wanted = one.start_many([Start(prompt, 3) for prompt in PROMPTS[:2]])
    assert engine.run(*keys) == one.run(*wanted)


def test_every_device_has_its_inputs_before_one_is_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that needs memory or could wait for a device would hold up one that another waits for."""
    made, log = list[TurnGroup](), list[str]()

    def logged(*arguments: Any) -> None:
        log.append("inputs")
        put_ints(*arguments)

    def begun(begin: Callable[[Tensor | None], None], rows: Tensor | None) -> None:
        log.append("begin")
        begin(rows)

    for module in (gpu_pass, graphs):
        monkeypatch.setattr(module, "put_ints", logged)
    engine = on_ranks(tmp_path / "model", changes=SHAPE, group=kept_in(made))
    for turn in made[0].turns:
        monkeypatch.setattr(turn, "begin", partial(begun, turn.begin))
    add(engine, PROMPTS[1])
    assert len(prefill_step(engine.executor)) == 1
    assert log == ["inputs"] * 2 + ["begin"] * 4, "the step, and its logits"


def test_logits_of_more_rows_than_are_gathered_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logprobs of a prompt's tokens, and of the first one behind it."""
    monkeypatch.setattr(gpu_group, "PROMPT_LOGITS", 5)
    found, made = [], list[TurnGroup]()
    for engine in (
        LocalEngine(tmp_path / "one", changes=SHAPE),
        on_ranks(tmp_path / "two", changes=SHAPE, group=kept_in(made)),
    ):
        add(engine, PROMPTS[2], sampling=SamplingParams(logprobs=3)).prompt_logprobs = True
        (result,) = prefill_step(engine.executor)
        assert result.logprobs is not None
        found.append((result.token, [*result.prompt_logprobs, result.logprobs]))
    assert len(made[0].logits) == 5
    assert len(found[0][1]) == len(PROMPTS[2])
    assert found[0][0] == found[1][0]
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert [token for token, _ in other.top] == [token for token, _ in one.top]
        assert other.logprob == pytest.approx(one.logprob, abs=1e-4)


@pytest.mark.parametrize(("ranks", "most"), [(2, 4), pytest.param(4, 10, marks=SLOW)])
def test_requests_with_every_feature(tmp_path: Path, ranks: int, most: int) -> None:
    """Outputs are short: all tokens but the first are decoded, which `test_decode_on_ranks.py` tests."""
    requests, found = starts(6, most), []
    for engine in (
        LocalEngine(tmp_path / "one", slots=6, blocks=100, changes=SHAPE),
        on_ranks(tmp_path / "more", slots=6, blocks=100, changes=SHAPE, ranks=ranks, chunk=48),
    ):
        keys = engine.start_many(requests)
        found.append(engine.run(*keys))
    assert found[0] == found[1]


@pytest.mark.parametrize("most", [2, pytest.param(4, marks=SLOW)])
def test_a_cache_of_codes(tmp_path: Path, most: int) -> None:
    outputs = []
    for engine in (
        LocalEngine(tmp_path / "one", cache_dtype=FP8, changes=SHAPE, graph=True, prompts="eager"),
        on_ranks(tmp_path / "two", cache_dtype=FP8, changes=SHAPE),
    ):
        keys = engine.start_many([Start(prompt, most) for prompt in PROMPTS[:2]])
        outputs.append(engine.run(*keys))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("name", ["fp8 by channel", *(pytest.param(f"fp8 by {by}", marks=SLOW) for by in BY)])
def test_weights_in_fp8(tmp_path: Path, name: str) -> None:
    """Products are of codes of a rank's rows, whose scales are its own, so they are not those of one device,
    but as near to what they stand for; weights in blocks are dequantised."""
    packed = fp8_folder(tmp_path, name)
    draw = random.Random(name)
    prompts = [tuple(draw.choices(range(250), k=length)) for length in range(1, 11)]
    options: dict[str, Any] = {"checkpoint": True, "formats": weight_formats, "slots": 10, "chunk": 64}
    exact, one, ranks = (
        first_logprobs(engine, prompts)
        for engine in (
            LocalEngine(packed, **options),
            LocalEngine(packed, graph=True, prompts="eager", **options),
            on_ranks(packed, **options),
        )
    )
    assert distance(exact, ranks) < 1.2 * distance(exact, one) + 1e-3


def fp8_folder(folder: Path, name: str) -> Path:
    """A checkpoint of a format that ranks divide, by its name in FORMATS."""
    shape = {
        "hidden_size": 192, "intermediate_size": 192, "num_key_value_heads": 4, "num_hidden_layers": 1,
    }  # fmt: skip
    source = FAMILIES[0].make(folder / "source", **shape)
    packed, _ = next(one for one in FORMATS if one.name == name).write(source, folder / "fp8")
    return packed


def first_logprobs(engine: LocalEngine, prompts: Sequence[tuple[int, ...]]) -> list[Logprobs]:
    """The logprobs of each prompt's first token and of 20 others."""
    added = [add(engine, prompt, sampling=SamplingParams(logprobs=20)) for prompt in prompts]
    drawn = {id(one.chunk.sequence): one.logprobs for one in engine.compute() if one.token is not None}
    found = [drawn[id(sequence)] for sequence in added]
    assert None not in found
    return [one for one in found if one is not None]


def distance(some: Sequence[Logprobs], others: Sequence[Logprobs]) -> float:
    """The root mean square of the differences between the logprobs of tokens that both have."""
    squares = []
    for one, other in zip(some, others, strict=True):
        mine, theirs = dict(other.top), dict(one.top)
        squares += [(mine[token] - theirs[token]) ** 2 for token in mine.keys() & theirs.keys()]
    assert len(squares) >= 12 * len(some)
    return float((sum(squares) / len(squares)) ** 0.5)


def add(engine: LocalEngine, prompt: tuple[int, ...], **fields: Any) -> Prompt:
    """A prompt that the next prefill steps compute."""
    sequence = Start(prompt, **fields).sequence()
    sequence.blocks = engine.pools.allocate(len(prompt) + 1)
    sequence.borrowed = True
    engine.scheduler.add(sequence)
    return sequence
