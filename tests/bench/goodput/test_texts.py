"""Text that repeats itself under load: its prompts, its classes of requests, and its model."""

from __future__ import annotations

import itertools
import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import pytest

from bench.goodput.arms import WORKLOADS
from bench.goodput.runs import Limits, Load, judged_by_class
from bench.goodput.servers import Target
from bench.goodput.texts import NEW, REPEATS, RepeatingText, add_text_options
from loadgen.analysis.run_folder import Run
from loadgen.cli import parser as loadgen_parser
from loadgen.commands.run import settings_of
from loadgen.common.settings import RequestClass
from tests.bench.goodput.test_report import run_at


def options(*words: str) -> Namespace:
    parser = ArgumentParser()
    add_text_options(parser)
    return parser.parse_args(words, Namespace(shape="tiny", dtype="fp32", device="cpu"))


def test_a_text_is_read_from_its_options() -> None:
    chat, tiny = WORKLOADS["chat"], WORKLOADS["tiny"]
    assert RepeatingText.of(options(), [chat]) is None
    found = RepeatingText.of(options("--text", "markov:0.7", "--new-share", "0.25"), [tiny])
    assert found is not None
    assert (found.chance, found.new_share) == (0.7, 0.25)
    with pytest.raises(ValueError, match="between 0 and 1"):
        RepeatingText.of(options("--text", "markov:2"), [tiny])
    with pytest.raises(ValueError, match="share below 1, not 1"):
        RepeatingText.of(options("--text", "markov:0.7", "--new-share", "1"), [tiny])
    with pytest.raises(ValueError, match="chat are not of one length"):
        RepeatingText.of(options("--text", "markov:0.7"), [tiny, chat])


def test_prompts_are_chains_of_their_own_for_every_seed(tmp_path: Path) -> None:
    text = RepeatingText(0.8, 0.0, 32)
    seen: set[tuple[int, ...]] = set()
    for seed in (1, 2):
        path = tmp_path / f"{seed}.jsonl"
        assert text.write_prompts(path, 64, 100.0, seed) == ["--prompts", str(path), "--temperature", "1"]
        prompts = [json.loads(line)["prompt"] for line in path.read_text().splitlines()]
        assert len(prompts) == 625, "a quarter more than arrive on average, and 500"
        assert {len(prompt) for prompt in prompts} == {64}
        seen |= {tuple(prompt) for prompt in prompts}
        follows = [(a + 1) % 32 == b for prompt in prompts for a, b in itertools.pairwise(prompt)]
        assert sum(follows) / len(follows) == pytest.approx(0.8 + 0.2 / 32, abs=0.02)
    assert len(seen) == 2 * 625


def test_loadgen_takes_the_words_of_a_run(tmp_path: Path) -> None:
    text = RepeatingText(0.8, 0.5, 32)
    load = Load(WORKLOADS["tiny"], 3.0, 5.0, 7, Limits(500.0, 6.0, 0.9), text=text)
    prompts = text.write_prompts(tmp_path / "prompts.jsonl", load.workload.prompt_tokens, 15.0, 7)
    words = load.words(Target("http://x"), tmp_path / "out", 256, prompts)
    settings = settings_of(loadgen_parser("run").parse_args(words))
    assert settings.prompts.file == str(tmp_path / "prompts.jsonl")
    found = {one.name: (one.weight, one.temperature) for one in settings.load.classes}
    assert found == {REPEATS: (0.5, 1.0), NEW: (0.5, 2.0)}


def test_the_length_of_a_workloads_prompts() -> None:
    assert WORKLOADS["1k-256"].prompt_tokens == 1024
    with pytest.raises(ValueError, match="chat are not of one length"):
        _ = WORKLOADS["chat"].prompt_tokens


def test_classes_are_judged_apart(tmp_path: Path) -> None:
    limits = Limits(500.0, 6.0, 0.9)
    slow, quick = run_at(tmp_path / "slow", 9.0, 8.0), run_at(tmp_path / "quick", 9.0, 5.0)
    assert judged_by_class(quick, 9.0, limits) == {}
    records: list[Any] = []
    for run, name in ((slow, NEW), (quick, REPEATS)):
        for record in run.records:
            record.klass = name
            records.append(record)
    load = quick.settings.load.model_copy(
        update={"classes": (RequestClass(name=REPEATS), RequestClass(name=NEW))}
    )
    settings = quick.settings.model_copy(update={"load": load})
    both = Run(quick.path, settings, records, quick.summary, quick.about)
    assert judged_by_class(both, 9.0, limits) == {REPEATS: 1.0, NEW: 0.0}


@pytest.mark.slow
def test_the_model_of_a_text_has_weights_and_a_tokenizer(tmp_path: Path) -> None:
    folder = RepeatingText(0.8, 0.0, 32).write_model(tmp_path / "model", "tiny", "fp32", "cpu")
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= names
