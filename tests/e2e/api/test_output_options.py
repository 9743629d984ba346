"""Options that end an output or change its text, through a real cluster and both APIs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer

from tests.e2e.support.cluster import MODEL, Cluster, assert_all_free, baton_up
from tests.e2e.support.completions import Choice, complete
from tests.support.checkpoints import BEGIN_ID, END_ID, VOCAB_SIZE, make_checkpoint
from tests.support.reference import load_reference, reference_greedy

if TYPE_CHECKING:
    from baton.v1.router_pb2_grpc import RouterServiceAsyncStub

COUNT = 40


@dataclass(frozen=True)
class Known:
    """A prompt and what the model says greedily after it, nothing stopping it."""

    prompt: list[int]
    output: list[int]


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


@pytest.fixture(scope="module")
def known(model: Path) -> Known:
    """An output in which the end token comes, and not at once."""
    reference = load_reference(model)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(VOCAB_SIZE, (256, 20), generator=generator)
    rows, fresh, cache = prompts, prompts, None
    with torch.inference_mode():
        for _ in range(30):  # all side by side, since most never come to the end token
            step = reference(fresh, past_key_values=cache, use_cache=True)
            cache, fresh = step.past_key_values, step.logits[:, -1:].argmax(-1)
            rows = torch.cat([rows, fresh], dim=1)
    late = (rows[:, 26:] == END_ID).any(1) & (rows[:, 20:26] != END_ID).all(1)
    prompt = prompts[int(late.nonzero()[0])].tolist()
    return Known(prompt, reference_greedy(reference, prompt, COUNT))


class Apis:
    """The same request over gRPC, HTTP whole, and HTTP streamed, at once: steps that all share take a third
    of the processor time. All must say the same."""

    def __init__(self, cluster: Cluster, stub: RouterServiceAsyncStub, client: httpx.AsyncClient) -> None:
        self.cluster, self.stub, self.client = cluster, stub, client

    async def ask(self, known: Known, **fields: Any) -> Choice:
        fields = {"temperature": 0.0, "max_tokens": COUNT, **fields}
        answer, whole, streamed = await asyncio.gather(
            self.cluster.generate(self.stub, known.prompt, **fields),
            complete(self.client, known.prompt, **fields),
            complete(self.client, known.prompt, stream=True, **fields),
        )
        for completion in (whole, streamed):
            choice = completion.only
            assert (choice.token_ids, choice.text, choice.finish) == (
                answer.token_ids,
                answer.text,
                answer.finish,
            )
            assert completion.usage["completion_tokens"] == len(answer.token_ids)
        return Choice(answer.token_ids, answer.text, answer.finish)


@pytest.fixture
def apis(cluster: Cluster) -> Any:
    @asynccontextmanager
    async def opened() -> AsyncIterator[Apis]:
        async with cluster.stub() as stub, cluster.http() as client:
            yield Apis(cluster, stub, client)
            await assert_all_free(cluster, within_s=2)

    return opened


async def test_the_end_token_ends_unless_ignored(apis: Any, known: Known, tokenizer: Tokenizer) -> None:
    until = known.output.index(END_ID) + 1
    async with apis() as here:
        ended, ignored = await asyncio.gather(here.ask(known), here.ask(known, ignore_eos=True))
        assert (ended.token_ids, ended.finish) == (known.output[:until], "stop")
        assert ended.text == tokenizer.decode(known.output[: until - 1])
        assert (ignored.token_ids, ignored.finish) == (known.output, "length")
        assert ignored.text == tokenizer.decode(known.output)


async def test_special_tokens_are_text_only_when_asked_for(
    apis: Any, known: Known, tokenizer: Tokenizer
) -> None:
    async with apis() as here:
        shown = await here.ask(known, ignore_eos=True, skip_special_tokens=False)
    assert shown.token_ids == known.output
    assert shown.text == tokenizer.decode(known.output, skip_special_tokens=False)
    assert "<|end|>" in shown.text
    assert BEGIN_ID not in known.output or "<|begin|>" in shown.text


@pytest.mark.parametrize("number", [0, 1, 9])
async def test_stop_ids(apis: Any, known: Known, tokenizer: Tokenizer, number: int) -> None:
    """Also as the first token, which prefill judges: nothing is decoded then."""
    stop = known.output[number]
    until = known.output.index(stop) + 1
    async with apis() as here:
        unlikely = next(token for token in range(VOCAB_SIZE) if token not in known.output)
        choice = await here.ask(known, ignore_eos=True, stop_token_ids=[unlikely, stop])
    assert (choice.token_ids, choice.finish) == (known.output[:until], "stop")
    assert choice.text == tokenizer.decode(known.output[: until - 1])


@pytest.mark.parametrize("count", [1, 2, 7, 8, COUNT])
async def test_max_tokens(apis: Any, known: Known, count: int) -> None:
    async with apis() as here:
        choice = await here.ask(known, ignore_eos=True, max_tokens=count)
    assert (choice.token_ids, choice.finish) == (known.output[:count], "length")


@pytest.mark.parametrize("width", [1, 2, 3])
async def test_stop_strings(apis: Any, known: Known, tokenizer: Tokenizer, width: int) -> None:
    """The text is cut before the string, wherever it completes; also one over several tokens."""
    text = tokenizer.decode(known.output)
    windows = (tokenizer.decode(known.output[start : start + width]) for start in range(3, COUNT - width))
    parts = (window.strip("\ufffd") for window in windows)
    stop = next(part for part in parts if len(part) >= width and "\ufffd" not in part)
    async with apis() as here:
        choice, absent = await asyncio.gather(
            here.ask(known, ignore_eos=True, stop=[stop, "never in it"]),
            here.ask(known, ignore_eos=True, stop=["never in it", stop + "\x00\x01"]),
        )
        assert choice.text == text[: text.index(stop)]
        assert choice.finish == "stop"
        assert choice.token_ids == known.output[: len(choice.token_ids)]
        assert stop in tokenizer.decode(choice.token_ids)
        assert stop not in tokenizer.decode(choice.token_ids[:-1])
        assert (absent.text, absent.finish) == (text, "length")


async def test_a_stop_string_split_over_tokens(apis: Any, known: Known, tokenizer: Tokenizer) -> None:
    """The last character of one token with the first of the next, neither a stop by itself."""
    text = tokenizer.decode(known.output)
    for number in range(3, COUNT):
        left, right = (tokenizer.decode([token]) for token in known.output[number - 1 : number + 1])
        stop = left[-1:] + right[:1]
        if len(stop) == 2 and "\ufffd" not in stop and text.count(stop) == 1:
            break
    else:
        raise AssertionError("no two readable tokens side by side")
    async with apis() as here:
        choice = await here.ask(known, ignore_eos=True, stop=[stop])
    assert choice.token_ids == known.output[: number + 1]
    assert (choice.text, choice.finish) == (text[: text.index(stop)], "stop")


@pytest.mark.parametrize(
    "lengths",
    [
        # Of one token, at the ends of blocks and chunks, and of several chunks; in no order.
        (18, 1, 90, 7, 8, 17, 45, 6),
        pytest.param(tuple(random.Random(4).choices(range(1, 91), k=20)), marks=pytest.mark.slow),
    ],
    ids=["ends", "random"],
)
async def test_a_list_of_prompts_has_indexed_choices(
    cluster: Cluster, tokenizer: Tokenizer, lengths: Sequence[int]
) -> None:
    """The answers come whole and streamed."""
    draw = random.Random(4)
    prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]
    texts = ["one text", "and another, longer: naïve 接力"]
    fields: dict[str, Any] = {"temperature": 0.0, "max_tokens": 9, "ignore_eos": True}
    async with cluster.http() as client:
        for several in (prompts, texts):
            single = await asyncio.gather(*(complete(client, prompt, **fields) for prompt in several))
            alone = [answer.only for answer in single]
            for stream in (False, True):
                together = await complete(client, several, stream=stream, **fields)
                assert [together.choices[index] for index in range(len(several))] == alone
                assert together.usage["completion_tokens"] == 9 * len(several)
                sizes = [len(one if isinstance(one, list) else tokenizer.encode(one).ids) for one in several]
                assert together.usage["prompt_tokens"] == sum(sizes)
        await assert_all_free(cluster, within_s=2)


async def test_a_stream_is_not_one_lump(cluster: Cluster, known: Known) -> None:
    body = {"model": MODEL, "prompt": known.prompt, "max_tokens": COUNT, "stream": True, "ignore_eos": True}
    async with cluster.http() as client, client.stream("POST", "/v1/completions", json=body) as response:
        events = [line async for line in response.aiter_lines() if line.startswith("data: {")]
    assert len(events) > 3


@pytest.mark.slow
async def test_random_weights_need_only_a_configuration(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "whole")
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "config.json").write_bytes((tmp_path / "whole" / "config.json").read_bytes())
    with baton_up(folder, "--weights", "random", "--dtype", "float32", "--both", "1") as cluster:
        async with cluster.stub() as stub:
            answer = await cluster.generate(stub, [1, 2, 3], max_tokens=8, ignore_eos=True)
        async with cluster.http() as client:
            body = {"model": MODEL, "prompt": "héllo", "max_tokens": 4, "ignore_eos": True}
            usage = (await client.post("/v1/completions", json=body)).json()["usage"]
    assert len(answer.token_ids) == 8
    assert usage == {
        "prompt_tokens": 6,
        "completion_tokens": 4,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
