"""Settings of one run of `bench.prefill`, and its arithmetic. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from bench.precision import Precision
from bench.shapes import SHAPES, Shape

# What an H100 does at most, dense, by its data sheet; what its library reaches alone is about 70 % of that.
PEAK_FLOPS = {"bfloat16": 989e12, "float16": 989e12}
BLOCK_TOKENS = 64
TIERS = ("device", "host", "disk")


@dataclass(frozen=True, slots=True)
class Case:
    """One run's settings, which its output repeats. `cached`: percent of each prompt in the cache tier."""

    shape: str
    precision: Precision
    prompts: int
    tokens: int
    chunk_tokens: int
    cached: int = 0
    tier: str = "device"

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
