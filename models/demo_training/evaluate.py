"""Marks the demo model's greedy answers, through `transformers` or through a running cluster.

    python -m models.demo_training.evaluate --dtype float32 --count 500
    python -m models.demo_training.evaluate --cluster 127.0.0.1:50051 --count 500 --parts copy,json

For a cluster it also says how many tokens a decode step gave out, by part: how well drafts suit its text.

One JSON object on stdout; progress on stderr. The questions are those of `exam`, the same for everyone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from models.demo_training.exam import MAX_ANSWER_TOKENS, PARTS, questions
from models.demo_training.tasks.turn import Turn

DEMO_MODEL = Path(__file__).parents[2] / "baton" / "demo_model"
# Prompt tokens of a batch, its padding and room for the answers included; in float32 the KV cache of 200,000
# takes 2.5 GB, and attention's scores come on top.
GPU_BATCH_TOKENS, CPU_BATCH_TOKENS = 200_000, 20_000
AT_ONCE = 4  # on a CPU a long prompt takes seconds, and who waits a minute for a slot is refused
SAMPLES = 20

# Answers a list of questions, each the first of its conversation.
Answerer = Callable[[Sequence[str]], list[str]]


@dataclass(frozen=True, slots=True)
class Marked:
    """One part's questions and what came back."""

    turns: Sequence[Turn]
    answers: Sequence[str]

    @property
    def right(self) -> int:
        return sum(turn.right(answer) for turn, answer in zip(self.turns, self.answers, strict=True))

    @property
    def percent(self) -> float:
        return 100 * self.right / len(self.turns)


def mark(answerer: Answerer, parts: Sequence[str], count: int) -> dict[str, Marked]:
    """The first `count` questions of each part, answered."""
    marked = {}
    for part in parts:
        began = time.monotonic()
        turns = questions(part, count)
        marked[part] = Marked(turns, answerer([turn.question for turn in turns]))
        _say(f"{part}: {marked[part].right} of {count} right, {time.monotonic() - began:.1f} s")
    return marked


class Transformers:
    """The checkpoint through `transformers`, on a device of torch's name, in a dtype of torch's name."""

    def __init__(self, model: Path, dtype: str, device: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._torch = torch
        self._batch_tokens = CPU_BATCH_TOKENS if device == "cpu" else GPU_BATCH_TOKENS
        self._tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self._model = loaded.to(device).eval()

    def __call__(self, asked: Sequence[str]) -> list[str]:
        prompts = [
            self._tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
            )
            for question in asked
        ]
        answers = [""] * len(asked)
        for some in self._batches(prompts):
            for number, answer in zip(some, self._generate([prompts[n] for n in some]), strict=True):
                answers[number] = answer
        return answers

    def _batches(self, prompts: Sequence[str]) -> Iterator[list[int]]:
        """Numbers of prompts of about equal length."""
        lengths = [len(self._tokenizer(prompt).input_ids) for prompt in prompts]
        order = sorted(range(len(prompts)), key=lengths.__getitem__)
        while order:
            size = max(1, self._batch_tokens // (lengths[order[-1]] + MAX_ANSWER_TOKENS))
            yield order[-size:]
            del order[-size:]

    def _generate(self, prompts: list[str]) -> list[str]:
        batch = self._tokenizer(prompts, padding=True, return_tensors="pt").to(self._model.device)
        with self._torch.inference_mode():
            ids = self._model.generate(**batch, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False)
        texts: list[str] = self._tokenizer.batch_decode(
            ids[:, batch.input_ids.shape[1] :], skip_special_tokens=True
        )
        return texts


class ThroughCluster:
    """The checkpoint through the gRPC API of a running cluster. `predictions`: question → the request's
    prediction, where it has one."""

    def __init__(
        self, address: str, at_once: int = AT_ONCE, predictions: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._address = address
        self._at_once = at_once
        self._predictions = predictions
        self._steps = self._accepted = 0

    def take_tokens_per_step(self) -> float | None:
        """Tokens that a decode step gave out on average since the last call; None where none was counted."""
        steps, accepted = self._steps, self._accepted
        self._steps = self._accepted = 0
        return (steps + accepted) / steps if steps else None

    def __call__(self, asked: Sequence[str]) -> list[str]:
        return asyncio.run(self._ask_all(asked))

    async def _ask_all(self, asked: Sequence[str]) -> list[str]:
        from baton.client import AsyncClient, Message, Sampling

        turn = asyncio.Semaphore(self._at_once)
        async with await AsyncClient.connect(self._address) as client:

            async def ask(question: str) -> str:
                async with turn:
                    fields: Sampling = {"temperature": 0, "max_tokens": MAX_ANSWER_TOKENS}
                    if question in self._predictions:
                        fields["prediction"] = self._predictions[question]
                    completion = await client.complete([Message("user", question)], **fields)
                if (trace := completion.choices[0].trace) is not None:
                    self._steps += trace.decode_steps
                    self._accepted += trace.accepted_draft_tokens
                return completion.text

            return list(await asyncio.gather(*map(ask, asked)))


def report(marked: dict[str, Marked]) -> dict[str, Any]:
    """Scores in percent, and samples of small talk and of what was wrong."""
    talk = [
        {"question": turn.question, "answer": answer}
        for part in ("small talk", "beyond me")
        if part in marked
        for turn, answer in zip(marked[part].turns, marked[part].answers, strict=True)
    ]
    wrong = {
        part: [
            {"question": turn.question[-200:], "answer": answer, "expected": turn.answer}
            for turn, answer in zip(one.turns, one.answers, strict=True)
            if not turn.right(answer)
        ][:5]
        for part, one in marked.items()
    }
    scores = {part: {"right": one.right, "of": len(one.turns)} for part, one in marked.items()}
    return {"scores": scores, "samples": talk[:SAMPLES], "wrong": wrong}


def main() -> int:
    """Evaluates and returns 0; scores are for the reader to judge."""
    parser = argparse.ArgumentParser(description="Marks the demo model's greedy answers.")
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument(
        "--cluster", metavar="HOST:PORT", help="gRPC address of a cluster that serves the model"
    )
    parser.add_argument(
        "--at-once", type=int, default=AT_ONCE, help=f"requests to the cluster (default {AT_ONCE})"
    )
    parser.add_argument(
        "--predict", action="store_true", help="the right answer is the prediction of each request to it"
    )
    parser.add_argument("--dtype", default="float32", help="through transformers (default float32)")
    parser.add_argument("--device", default="cpu", help="through transformers (default cpu)")
    parser.add_argument("--count", type=int, default=500, help="questions of each part (default 500)")
    parser.add_argument("--parts", default=",".join(PARTS), help="default: all")
    arguments = parser.parse_args()
    parts, count = arguments.parts.split(","), arguments.count
    if not arguments.cluster:
        through = f"transformers, {arguments.dtype}, {arguments.device}"
        answerer = Transformers(arguments.model, arguments.dtype, arguments.device)
        print(json.dumps({"through": through, **report(mark(answerer, parts, count))}, indent=1))
        return 0
    known = {turn.question: turn.answer for part in parts for turn in questions(part, count)}
    cluster = ThroughCluster(
        arguments.cluster, arguments.at_once, predictions=known if arguments.predict else {}
    )
    marked, tokens = dict[str, Marked](), dict[str, float | None]()
    for part in parts:
        marked |= mark(cluster, [part], count)
        tokens[part] = cluster.take_tokens_per_step()
    print(json.dumps({"through": "cluster", "tokens_per_step": tokens, **report(marked)}, indent=1))
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
