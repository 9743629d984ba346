"""Decode steps by the GPU kernels on several ranks, whose double runs in Triton's interpreter in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.decode.step_rows import StepRows
from baton.engine.kernels.gpu.step import step_kernels as kernels
from baton.engine.model.modules import Model
from baton.engine.model.weight_formats import weight_formats
from baton.engine.parallel.exchange import ExchangeTimeoutError
from baton.engine.sequence import SamplingParams
from baton.model_spec.layout import FP8
from tests.engine.executor.test_ranks_in_steps import SHAPE, starts
from tests.engine.local_engine import LocalEngine, Start
from tests.engine.model.quantization.packing import FORMATS
from tests.engine.parallel.host.turn_group import HostGroup
from tests.engine.parallel.turns import TurnGroup
from tests.support.checkpoints import FAMILIES
from tests.support.host_kernels import needs_compiler

# One of each: a norm behind each branch, norms of heads, biases, projections that are stored as one.
SLOW = pytest.mark.slow
CASES = {case.name: case for case in FAMILIES}
GREEDY = SamplingParams()
DIVIDED = ("gemma3-windows", "qwen3-norms", "llama-tied-biases", "phi3-partial", "qwen2-mixed-windows")


def on_ranks(folder: Path, **options: Any) -> LocalEngine:
    return LocalEngine(folder, graph=True, **{"ranks": 2, "group": TurnGroup, **options})


def kept_in(made: list[TurnGroup]) -> Callable[[Sequence[Model], int, int], TurnGroup]:
    """Makes groups that a test looks at."""

    def make(models: Sequence[Model], rows: int, prompt_rows: int) -> TurnGroup:
        made.append(TurnGroup(models, rows, prompt_rows))
        return made[-1]

    return make


@pytest.mark.parametrize("most", [3, pytest.param(5, marks=SLOW)])
@pytest.mark.parametrize("name", DIVIDED)
def test_families_decode_as_on_one_device(tmp_path: Path, name: str, most: int) -> None:
    """`most` tokens: the first is prefill's, and the second of the short prompt has a block of its own."""
    folder = CASES[name].make(tmp_path / "model")
    prompts = [list(range(3, 24)), [7, 200, 31]]
    outputs, made = [], list[TurnGroup]()
    for engine in (
        LocalEngine(folder, checkpoint=True, slots=2),
        on_ranks(folder, checkpoint=True, slots=2, group=kept_in(made)),
    ):
        keys = [engine.start(prompt, max_tokens=most) for prompt in prompts]
        outputs.append(engine.run(*keys))
    assert outputs[0] == outputs[1]
    assert [turn.norms for turn in made[0].turns] == [made[0].sums] * 2


@needs_compiler
@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("gemma3-windows", 3),
        *(pytest.param(name, 4, marks=SLOW) for name in ("gemma3-windows", "llama-tied-biases")),
    ],
)
def test_steps_exchange_by_the_kernels_themselves(tmp_path: Path, name: str, most: int) -> None:
    """Rows, parts, norms and logits are where the kernels look for them; three ranks' vocabulary is not
    divided evenly."""
    shape = {"hidden_size": 96, "intermediate_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
    folder = CASES[name].make(tmp_path / "model", **shape)
    prompts, outputs = [list(range(3, 24)), [7, 200, 31]], []
    for engine in (
        LocalEngine(folder, checkpoint=True, slots=2),
        on_ranks(folder, checkpoint=True, slots=2, ranks=3, group=HostGroup),
    ):
        keys = [engine.start(prompt, max_tokens=most) for prompt in prompts]
        outputs.append(engine.run(*keys))
        assert not engine.decode.device_hung()
    assert outputs[0] == outputs[1]


@needs_compiler
@pytest.mark.parametrize(
    ("node", "late", "waits"),
    [
        (0, 0, 1),
        (4, 1, 0),
        (5, 1, 0),
        *(pytest.param(*case, marks=SLOW) for case in ((1, 1, 0), (1, 0, 1))),
    ],
    ids=str,
)
def test_a_step_that_one_device_is_late_for(tmp_path: Path, node: int, late: int, waits: int) -> None:
    """The device is late at the step's begin, a sum or its end: no step is published from it on, and the
    device that waited is known."""
    made: list[HostGroup] = []

    def group(models: Sequence[Model], rows: int, prompt_rows: int) -> HostGroup:
        made.append(HostGroup(models, rows, prompt_rows))
        return made[0]

    engine = on_ranks(tmp_path / "model", slots=2, changes=SHAPE, group=group)
    key = engine.start([5, 6, 7], max_tokens=20)
    engine.step()
    engine.step()
    assert not engine.decode.device_hung()
    output, position = list(engine.output[key]), int(engine.state.position[key[0]])
    made[0].late = node, late
    engine.step()
    late_key = engine.start([9, 8], max_tokens=20)
    engine.step()
    assert made[0].late is None
    assert (engine.output[key], int(engine.state.position[key[0]])) == (output, position)
    assert len(engine.output[late_key]) == 1, "the token that its prompt gave it"
    with pytest.raises(ExchangeTimeoutError) as caught:
        engine.decode.device_hung()
    timeout = caught.value.timeout
    assert (timeout.node, timeout.rank, timeout.peer) == (node, waits, late)
    assert timeout.layer == {1: 0, 4: 1}.get(node)


@pytest.mark.parametrize(
    ("ranks", "numerics", "most"),
    [(2, "fast", 6), pytest.param(2, "exact", 10, marks=SLOW), pytest.param(4, "exact", 10, marks=SLOW)],
)
def test_requests_with_every_feature(tmp_path: Path, ranks: int, numerics: str, most: int) -> None:
    requests = starts(12, most)
    found = []
    for engine in (
        LocalEngine(tmp_path / "one", slots=12, blocks=200, changes=SHAPE),
        on_ranks(tmp_path / "more", slots=12, blocks=200, changes=SHAPE, ranks=ranks, numerics=numerics),
    ):
        keys = engine.start_many(requests)
        found.append((engine.run(*keys), [engine.logprobs[key] for key in keys]))
    (outputs, logprobs), (mine, my_logprobs) = found
    assert mine == outputs
    for one, other in zip(chain(*logprobs), chain(*my_logprobs), strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert other.logprob == pytest.approx(one.logprob, abs=1e-4)


@pytest.mark.parametrize("most", [3, pytest.param(6, marks=SLOW)])
def test_a_cache_of_codes(tmp_path: Path, most: int) -> None:
    """Each device quantises the keys and values of its heads, and reads the codes that it is handed."""
    outputs = []
    for ranks in (1, 2):
        options = {"cache_dtype": FP8, "slots": 2, "changes": SHAPE, "ranks": ranks}
        engine = on_ranks(tmp_path / str(ranks), **options, group=TurnGroup if ranks > 1 else None)
        keys = [engine.start(prompt, max_tokens=most) for prompt in (range(3, 24), (7, 50, 31))]
        outputs.append(engine.run(*keys))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("name", "numerics", "most"),
    [
        ("fp8 by channel", "exact", 3),
        *(
            pytest.param(f"fp8 by {by}", numerics, 6, marks=SLOW)
            for by in ("channel", "tensor", "block")
            for numerics in ("exact", "fast")
        ),
    ],
)
def test_weights_in_fp8(tmp_path: Path, name: str, numerics: str, most: int) -> None:
    """Each device has its part of the codes and of their scales; o_proj and down_proj yield their parts of
    the sums from these."""
    shape = {"hidden_size": 192, "intermediate_size": 192, "num_key_value_heads": 4}
    source = FAMILIES[0].make(tmp_path / "source", **shape)
    packed, _ = next(one for one in FORMATS if one.name == name).write(source, tmp_path / "fp8")
    prompts, outputs = [list(range(3, 24)), [7, 200, 31]], []
    for ranks in (1, 2):
        options = {"checkpoint": True, "slots": 2, "formats": weight_formats, "numerics": numerics}
        engine = on_ranks(packed, **options, ranks=ranks, group=TurnGroup if ranks > 1 else None)
        assert engine.model.layers[0].attention.output.linear.format.startswith("fp8")
        keys = [engine.start(prompt, max_tokens=most) for prompt in prompts]
        outputs.append(engine.run(*keys))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("kind", [TurnGroup, pytest.param(HostGroup, marks=[SLOW, needs_compiler])])
def test_sums_yield_codes_for_products_of_codes(tmp_path: Path, kind: type[TurnGroup]) -> None:
    """The model is in bfloat16, whose products in fp8 multiply codes. Logprobs of the first token that is
    decoded are as near to those of the same weights in float32 as one device's, which the interpreter rounds
    as roughly."""
    fp8 = partial(weight_formats, quantization="fp8")
    options: dict[str, Any] = {"slots": 2, "changes": SHAPE, "formats": fp8}
    wanted = first_decoded(LocalEngine(tmp_path / "wanted", **options))
    errors = []
    for ranks in (1, 2):
        group = kind if ranks > 1 else None
        fast = {"dtype": "bfloat16", "numerics": "fast", "ranks": ranks, "group": group}
        engine = on_ranks(tmp_path / str(ranks), **options, **fast)
        found = first_decoded(engine)
        common = found.keys() & wanted.keys()
        assert len(common) >= 25
        errors.append(sum((found[token] - wanted[token]) ** 2 for token in common) / len(common))
    if kind is TurnGroup:
        assert isinstance(engine.group, TurnGroup)
        # The head, behind the last sum, is not in fewer bits.
        assert [turn.coded for turn in engine.group.turns] == [engine.group.sums - 1] * 2
    assert errors[1] < 1.5 * errors[0]


def first_decoded(engine: LocalEngine) -> dict[tuple[int, int], float]:
    """Logprobs of the most probable first tokens that are decoded behind two prompts, by prompt and token."""
    sampling = SamplingParams(logprobs=20)
    prompts = [
        Start(tuple(range(3, 24)), 2, sampling, forced=5),
        Start((7, 50, 31), 2, sampling, forced=9),
    ]
    keys = engine.start_many(prompts)
    engine.run(*keys)
    found = dict[tuple[int, int], float]()
    for number, key in enumerate(keys):
        logprobs = engine.logprobs[key][1]
        assert logprobs is not None
        found |= {(number, token): logprob for token, logprob in logprobs.top}
    return found


def test_blocks_that_a_slot_is_given_later_are_on_every_device(tmp_path: Path) -> None:
    """One sequence grows while another runs; one is cancelled, and a new one gets its slot."""
    prompt = [1, 2, 3, 4, 5]
    expected = LocalEngine(tmp_path / "one", slots=2, changes=SHAPE)
    wanted = expected.run(*(expected.start(prompt[n:], max_tokens=9) for n in (0, 2)))
    engine = on_ranks(tmp_path / "two", slots=2, changes=SHAPE)
    cancelled = engine.start([9, 9], max_tokens=30)
    other = engine.start(prompt[2:], max_tokens=9)
    engine.step()
    engine.decode.cancel(*cancelled)
    while cancelled not in engine.finish:
        engine.step()
    engine.slots.release(*cancelled)
    engine.pools.release(engine.tables.pop(cancelled))
    growing = engine.start(prompt, max_tokens=9, capacity=len(prompt) + 1)
    while engine.reader.stalled_rows == 0:
        engine.step()
    engine.extend(growing, len(prompt) + 1, len(prompt) + 8)
    assert engine.run(growing, other) == wanted


@pytest.mark.parametrize(
    "sampling",
    [GREEDY, SamplingParams(0.9, 5, repetition_penalty=1.2, logprobs=2, seed=3)],
    ids=["greedy", "sampled"],
)
def test_nothing_is_published_once_the_exchange_has_failed(tmp_path: Path, sampling: SamplingParams) -> None:
    """Neither words nor slots move, whichever sampler the step has; the watchdog ends the process."""
    made: list[TurnGroup] = []
    engine = on_ranks(tmp_path / "model", slots=2, changes=SHAPE, group=kept_in(made))
    key = engine.start([5, 6, 7], max_tokens=20, sampling=sampling)
    for _ in range(3):
        assert engine.step()
    assert not engine.decode.device_hung()
    output, steps = list(engine.output[key]), made[0].steps
    assert len(output) == 4
    state = engine.state
    watched = state.records, state.active, state.sampler.counts.in_output
    before = [tensor.clone() for tensor in watched]
    progress = engine.decode.progress.tags.copy()

    made[0].whole.zero_()
    assert engine.step()
    assert made[0].steps == steps + 1
    assert engine.output[key] == output
    assert all(torch.equal(tensor, was) for tensor, was in zip(watched, before, strict=True))
    assert (engine.decode.progress.tags == progress).all()
    # One that is admitted now has the token that its prompt gave it, and no more.
    late = engine.start([9, 8], max_tokens=20, sampling=sampling)
    engine.step()
    engine.step()
    assert (engine.output[key], len(engine.output[late])) == (output, 1)
    with pytest.raises(ExchangeTimeoutError):
        engine.decode.device_hung()


def test_what_a_step_sends_is_all_that_a_follower_reads() -> None:
    """The count is the first word, at the place where a step's kernels look for it."""
    for rows in (1, 4, 13):
        first, other = (StepRows.empty(rows, torch.device("cpu")) for _ in range(2))
        first.control[kernels.ROWS.value] = rows
        arrays = first.slot, first.token, first.position
        for number, array in enumerate(arrays):
            array.copy_(torch.arange(rows) + 100 * number)
            assert array.data_ptr() % 16 == first.control.data_ptr() % 16, "aligned alike for any rows"
        assert first.sent[0] == rows == int(first.count)
        assert len(first.sent) == StepRows.words(rows)
        other.sent.copy_(first.sent)
        for mine, theirs in zip((other.slot, other.token, other.position), arrays, strict=True):
            assert torch.equal(mine, theirs)
        assert int(other.count) == rows
        other.sent[0] = 0  # as a follower that waited in vain
        assert int(other.count) == 0


def test_several_devices_take_no_drafts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2 rows a slot on several devices"):
        on_ranks(tmp_path / "drafts", changes=SHAPE, rows_per_slot=2, lookup_tokens=16)
