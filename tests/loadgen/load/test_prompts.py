"""Prompts that are sent: lengths, sharing, files, and the cost of text."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.common.errors import LoadgenError
from loadgen.common.settings import RequestClass, Words
from loadgen.load.distributions import Distribution
from loadgen.load.prompt_files import FileWorkload, form_of, read_prompts
from loadgen.load.workload import Conversation, SyntheticWorkload
from loadgen.targets.preflight import learn_words
from tests.loadgen.builders import settings
from tests.loadgen.fake_server import Behaviour, serving


def conversations(count: int, **prompts: Any) -> list[Conversation]:
    workload = SyntheticWorkload(settings(prompts=prompts))
    return [one for number in range(count) if (one := workload.conversation(number)) is not None]


def ids_of(one: Conversation) -> list[int]:
    content = one.turns[0].content
    assert isinstance(content, list)
    return content


def common(first: list[int], second: list[int]) -> int:
    """Tokens of the common prefix."""
    return next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )


@pytest.mark.parametrize("dataset", ["random", "document", "code", "chat"])
def test_lengths_are_exact_and_ids_in_the_vocabulary(dataset: str) -> None:
    for one in conversations(40, dataset=dataset, input_len="uniform:1-90", vocab_size=11, output_len="7"):
        (turn,) = one.turns
        assert turn.tokens == len(ids_of(one))
        assert 1 <= turn.tokens <= 90
        assert turn.output_tokens == 7
        assert set(ids_of(one)) <= set(range(11))


def test_a_conversation_is_the_same_in_every_process() -> None:
    some = conversations(10, input_len="uniform:5-50", output_len="exp:20", turns="uniform:1-3")
    again = SyntheticWorkload(
        settings(prompts={"input_len": "uniform:5-50", "output_len": "exp:20", "turns": "uniform:1-3"})
    )
    assert [again.conversation(number) for number in (7, 3)] == [some[7], some[3]]
    assert len({tuple(ids_of(one)) for one in some}) == 10


def test_random_prompts_share_nothing() -> None:
    some = [ids_of(one) for one in conversations(30, input_len="64", vocab_size=50_000)]
    assert all(common(a, b) == 0 for n, a in enumerate(some) for b in some[:n])


def test_shared_prefixes() -> None:
    some = [
        ids_of(one)
        for one in conversations(60, input_len="100", prefix_len=40, num_prefixes=3, vocab_size=9999)
    ]
    prefixes = Counter(tuple(one[:40]) for one in some)
    assert len(prefixes) == 3
    assert min(prefixes.values()) >= 8
    assert all(common(a, b) in (0, 40) for n, a in enumerate(some) for b in some[:n])


def test_conversations_share_a_system_prompt_before_their_first_message() -> None:
    some = conversations(40, input_len="50", system_len=300, num_prefixes=2, turns="3", vocab_size=9999)
    for one in some:
        assert [turn.tokens for turn in one.turns] == [350, 50, 50]
        assert [len(turn.content) for turn in one.turns] == [350, 50, 50]
    assert len({tuple(one.turns[0].content[:300]) for one in some}) == 2
    messages = {tuple(turn.content[-50:]) for one in some for turn in one.turns}
    assert len(messages) == 3 * len(some)


def test_documents_are_asked_different_questions() -> None:
    some = [
        ids_of(one)
        for one in conversations(
            40, dataset="document", input_len="500", question_len=20, num_prefixes=2, vocab_size=9999
        )
    ]
    assert len({tuple(one[:480]) for one in some}) == 2
    assert len({tuple(one[480:]) for one in some}) == 40


def test_code_repeats_itself() -> None:
    """Far more runs of four that were there before than in random ids."""

    def repeated(ids: list[int]) -> float:
        fours = [tuple(ids[at : at + 4]) for at in range(len(ids) - 3)]
        return 1 - len(set(fours)) / len(fours)

    code = np.mean(
        [repeated(ids_of(one)) for one in conversations(5, dataset="code", input_len="2000", vocab_size=500)]
    )
    plain = np.mean([repeated(ids_of(one)) for one in conversations(5, input_len="2000", vocab_size=500)])
    assert code > 0.2
    assert plain < 0.01


def test_classes_have_their_shares_lengths_and_limits() -> None:
    classes = (
        RequestClass(name="chat", weight=3, input_len="10", tenant="a", priority=1),
        RequestClass(name="batch", weight=1, input_len="200", output_len="5"),
    )
    workload = SyntheticWorkload(settings(classes=classes, prompts={"output_len": "9"}))
    some = [one for number in range(800) if (one := workload.conversation(number)) is not None]
    counts = Counter(one.klass.name for one in some)
    assert counts["chat"] == pytest.approx(600, abs=60)
    assert {(one.klass.name, one.turns[0].tokens, one.turns[0].output_tokens) for one in some} == {
        ("chat", 10, 9),
        ("batch", 200, 5),
    }


@pytest.mark.parametrize(
    ("text", "mean", "std"),
    [
        ("7", 7, 0),
        ("uniform:2-10", 6, 8 / 12**0.5),
        ("normal:100,10", 100, 10),
        ("lognormal:128,0.5", 128, 64),
        ("exp:0.5", 0.5, 0.5),
    ],
)
def test_distributions(text: str, mean: float, std: float) -> None:
    random = np.random.default_rng(1)
    one = Distribution.parse(text)
    values = np.array([one.draw(random) for _ in range(20_000)])
    assert values.mean() == pytest.approx(mean, rel=0.03)
    assert values.std() == pytest.approx(std, rel=0.05, abs=1e-9)


def test_lengths_are_at_least_one_and_reach_both_ends() -> None:
    random = np.random.default_rng(1)
    lengths = {Distribution.parse("uniform:0-3").draw_length(random) for _ in range(200)}
    assert lengths == {1, 2, 3}
    assert Distribution.parse("0").draw_length(random) == 1


@pytest.mark.parametrize("text", ["", "x", "-3", "uniform:3", "normal:5", "exp:", "uniform:1-2-3", "nan"])
def test_what_is_no_distribution(text: str) -> None:
    with pytest.raises(LoadgenError, match="no distribution"):
        Distribution.parse(text)


def test_prompts_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    lines: list[dict[str, Any]] = [
        {"prompt": [1, 2, 3]},
        {"token_ids": [4, 5], "output_len": 77},
        {"prompt": [6]},
    ]
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    prompts = read_prompts(str(file))
    assert form_of(prompts, "ids") == "ids"
    workload = FileWorkload(settings(prompts={"file": str(file), "output_len": "9"}), prompts)
    asked = [workload.conversation(number) for number in range(6)]
    contents = [one.turns[0].content for one in asked if one is not None]
    assert sorted(map(tuple, contents[:3])) == [(1, 2, 3), (4, 5), (6,)]
    assert contents[:3] == contents[3:]
    lengths = {tuple(one.turns[0].content): one.turns[0].output_tokens for one in asked if one is not None}
    assert lengths[(4, 5)] == 77
    assert lengths[(6,)] == 9


def test_sharegpt(tmp_path: Path) -> None:
    file = tmp_path / "share.json"
    turns = [("human", "Hello"), ("gpt", "Hi"), ("human", "And now?"), ("gpt", "Bye")]
    file.write_text(json.dumps([{"conversations": [{"from": who, "value": what} for who, what in turns]}]))
    prompts = read_prompts(str(file))
    assert prompts[0].turns == ("Hello", "And now?")
    assert (form_of(prompts, "ids"), form_of(prompts, "chat")) == ("text", "chat")


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("", "no prompt"),
        ("{", "entry 1"),
        ('{"prompt": "x"}\n{"promt": "y"}', "entry 2: has no 'token_ids'"),
        ('{"prompt": []}', "entry 1: a prompt is a text or a list of token ids"),
        ('{"prompt": [1, "a"]}', "a list of token ids"),
        ('{"prompt": "x", "output_len": 0}', "output_len"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str, reported: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(text)
    with pytest.raises(LoadgenError, match=reported):
        read_prompts(str(file))


def test_a_file_of_ids_and_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "both.jsonl"
    file.write_text('{"prompt": "x"}\n{"prompt": [1]}')
    with pytest.raises(LoadgenError, match="either"):
        form_of(read_prompts(str(file)), "ids")


@given(st.integers(1, 4), st.integers(0, 9), st.integers(1, 200))
def test_text_has_the_length_that_is_counted(cost: int, overhead: int, tokens: int) -> None:
    words = Words(words=(" time", " year", " work"), cost=cost, overhead=overhead)
    workload = SyntheticWorkload(settings(prompts={"input_len": str(tokens), "words": words}))
    one = workload.conversation(3)
    assert one is not None
    turn = one.turns[0]
    assert isinstance(turn.content, str)
    assert turn.tokens == overhead + cost * len(turn.content.split())
    assert turn.tokens <= max(tokens, overhead + cost)
    assert turn.tokens > tokens - cost


@pytest.mark.parametrize("form", ["text", "chat"])
async def test_words_cost_what_the_server_bills(form: str) -> None:
    """Also where a word is several tokens, and a template adds its own."""
    async with serving(Behaviour(tokens_a_word=3, tokens_a_prompt=5)) as (_, _grpc, url):
        learned = await learn_words(settings(url=url, target={"form": form}))
    assert (learned.cost, learned.overhead) == (3, 5)
    assert len(learned.words) > 20


async def test_words_over_grpc() -> None:
    async with serving(Behaviour(tokens_a_word=1, tokens_a_prompt=1)) as (_, url, _http):
        learned = await learn_words(settings(url=url, target={"form": "text"}))
    assert (learned.cost, learned.overhead) == (1, 1)


async def test_words_that_differ_are_refused() -> None:
    async with serving(Behaviour(tokens_a_word=0, tokens_a_prompt=5)) as (_, _grpc, url):
        with pytest.raises(LoadgenError, match="send token ids"):
            await learn_words(settings(url=url, target={"form": "text"}))
