"""Settings of one run of an engine by itself, and its arithmetic: lower bounds, operations, bytes, sizes.
Torch-free.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from bench.markov_text import chance_of
from bench.shapes import SHAPES, Precision, Shape

# Output tokens over which a step's time is taken, as vLLM's figures were.
FIRST, LAST = 33, 160
# A large batch is admitted over several steps; each of its sequences lives that much longer.
SPARE = 18
BLOCK_TOKENS = 64
# More than an H200 reads from its memory. What a GPU really reads is measured (`bench.decode.timing`).
MOST_READ_BYTES_S = 5e12
# Kept free beside weights and KV: logits, graphs, the driver's own.
RESERVE_BYTES = 3.0e9

# What an H100 does at most, dense, by its data sheet; what its library reaches alone is about 70 % of that.
PEAK_FLOPS = {"bfloat16": 989e12, "float16": 989e12}
TIERS = ("device", "host", "disk")

RANDOM = "random"
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "filters": {"temperature": 0.8, "top_p": 0.95, "top_k": 50},
    "penalties": {
        "temperature": 0.8,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
    },
    "logprobs": {"logprobs": 5},
}


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """One run's settings, which its output repeats. `rows_per_slot`: rows that each sequence has in a step,
    all but one of drafts, of which a share of `accept` is right. `text`: "random", or as
    `bench.markov_text.chance_of` reads it: drafts are then looked up in each sequence's own text, and a
    sequence has up to `rows_per_slot` rows. `lookahead_mb`: of a lookahead table in which nothing is found;
    `ends`: outputs that one learns a second. `tensor_parallel`: devices that divide the model."""

    shape: str
    precision: Precision
    batch: int
    context: int
    sampling: str
    numerics: str
    rows_per_slot: int = 1
    accept: float = 0.0
    text: str = RANDOM
    lookahead_mb: int = 0
    ends: float = 0.0
    tensor_parallel: int = 1

    @property
    def chance(self) -> float | None:
        """Chance, of text that repeats itself, that a token is followed by its successor. Raises ValueError
        for a text of another name."""
        return None if self.text == RANDOM else chance_of(self.text)

    @property
    def sampled(self) -> dict[str, Any]:
        """Arguments of `SamplingParams`. Text of a known chance is drawn at temperature 1."""
        return SAMPLINGS[self.sampling] | ({} if self.chance is None else {"temperature": 1.0})

    @property
    def model(self) -> Shape:
        return SHAPES[self.shape]

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token."""
        return round(self.model.kv_elements() * self.model.kv_element_bytes(self.precision))

    def floor_ms(self, mean_context: float, read_bytes_s: float, rows: float | None = None) -> float:
        """The lower bound of a step's time: the bytes that it must read, at the memory's bandwidth; of
        experts those that its rows are expected to take; of several devices each reads its part. `rows`:
        sequences; None: the batch."""
        model, sequences = self.model, self.batch if rows is None else rows
        of_rows = sequences * model.kv_elements_read(mean_context)
        weights = model.weight_bytes(self.precision, sequences * self.rows_per_slot)
        read = weights + of_rows * model.kv_element_bytes(self.precision)
        return read / self.tensor_parallel / read_bytes_s * 1e3


@dataclass(frozen=True, slots=True)
class EngineSize:
    """The size that an engine is built for: slots, tokens per slot, additional blocks, rows a slot, whether
    some drafts are right, of which chance its text is, if it is not random, and megabytes of a lookahead
    table."""

    slots: int
    tokens: int
    spare: int = 0
    rows_per_slot: int = 1
    accepts: bool = False
    chance: float | None = None
    lookahead_mb: int = 0

    @classmethod
    def steady(cls, cases: list[DecodeCase], seconds: float | None) -> EngineSize:
        """The size for batches that decode `LAST` tokens, or as many as fit into `seconds` at the lower
        bound."""
        first = cases[0]
        output = LAST
        if seconds is not None:
            least_ms = min(case.floor_ms(case.context, MOST_READ_BYTES_S) for case in cases)
            output = LAST + math.ceil(seconds * 1e3 / least_ms)
        rows = max(case.rows_per_slot for case in cases)
        accepts = any(case.accept for case in cases)
        output = (output + SPARE) * (rows if accepts or first.chance else 1)
        slots = max(case.batch for case in cases)
        tokens = first.context + output + 1
        return cls(
            slots, tokens, rows_per_slot=rows, accepts=accepts, chance=first.chance,
            lookahead_mb=first.lookahead_mb,
        )  # fmt: skip

    def blocks(self) -> int:
        """Blocks of one cache group, including scratch."""
        return 1 + self.slots * -(-self.tokens // BLOCK_TOKENS) + self.spare

    def kv_bytes(self, case: DecodeCase) -> int:
        return self.blocks() * BLOCK_TOKENS * case.token_bytes

    def lacking(self, case: DecodeCase, free_bytes: float) -> str | None:
        """Says why an engine of this size does not fit into the free memory; None if it fits."""
        weights = case.model.held_bytes(case.precision)
        wanted = (weights + self.kv_bytes(case)) / case.tensor_parallel + RESERVE_BYTES
        if wanted <= free_bytes:
            return None
        return (
            f"{self.slots} sequences of {self.tokens} tokens want {self.kv_bytes(case) / 1e9:.1f} GB of KV "
            f"beside {weights / 1e9:.1f} GB of weights and {RESERVE_BYTES / 1e9:.0f} GB for the rest; "
            f"{free_bytes / 1e9:.1f} GB are free"
        )


@dataclass(frozen=True, slots=True)
class PrefillCase:
    """One run's settings, which its output repeats. `cached`: percent of each prompt in the cache tier.
    `tensor_parallel`: devices that divide the model."""

    shape: str
    precision: Precision
    prompts: int
    tokens: int
    chunk_tokens: int
    cached: int = 0
    tier: str = "device"
    tensor_parallel: int = 1

    @property
    def model(self) -> Shape:
        return SHAPES[self.shape]

    @property
    def prefix(self) -> int:
        """Cached tokens of a prompt: whole blocks, never its last token."""
        wanted = self.tokens * self.cached // 100
        return min(wanted, self.tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS

    @property
    def flops(self) -> float:
        """Operations of the prompts' uncached tokens: products, attention, the head once per prompt."""
        config, new = self.model.config, self.tokens - self.prefix
        head = config["vocab_size"] * config["hidden_size"]
        body = self.model.weight_elements() - head
        seen = (self.prefix + 1 + self.tokens) / 2 * new
        width = config["num_attention_heads"] * config["head_dim"]
        attention = 4.0 * config["num_hidden_layers"] * width * seen
        return float(self.prompts * (2.0 * body * new + attention + 2.0 * head))

    @property
    def blocks(self) -> int:
        """Blocks of a cache group for all prompts."""
        return self.prompts * -(-(self.tokens + 1) // BLOCK_TOKENS)


def parse_prompts(text: str) -> list[tuple[int, int]]:
    """Parses `8x1024,1x8192` into [(8, 1024), (1, 8192)]. Raises ValueError."""
    cases = []
    for part in text.split(","):
        prompts, _, tokens = part.partition("x")
        if int(prompts) < 1 or int(tokens) < 2:
            raise ValueError(f"{part}: at least one prompt, of two tokens")
        cases.append((int(prompts), int(tokens)))
    return cases
