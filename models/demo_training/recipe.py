"""The recipe of a training run: its network, its data, its rates. Two of them: the shipped model's, and a
small one that shows on a CPU that all parts work."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from models.demo_training.batches import BatchPlan
from models.demo_training.network import Shape
from models.demo_training.optimizer import LearningRates


@dataclass(frozen=True, slots=True)
class Recipe:
    """Settings of a training run. `rest_weight`: what a token that is not the assistant's weighs in the loss,
    the assistant's being 1."""

    shape: Shape
    plan: BatchPlan
    rates: LearningRates
    warmup_steps: int
    cooldown_share: float
    rest_weight: float = 0.02

    def scale(self, step: int) -> float:
        """Factor of the learning rates: warm-up, a plateau, and linearly to 0 at the last step."""
        steps = self.plan.steps
        rising = min(1.0, (step + 1) / self.warmup_steps)
        return rising * min(1.0, (steps - step) / (self.cooldown_share * steps))

    @property
    def settings(self) -> dict[str, Any]:
        """All settings of the recipe, for the state's file."""
        return asdict(self)


FULL = Recipe(
    shape=Shape(),
    plan=BatchPlan(seed=1, steps=6_000, short_rows=64, short_tokens=1024, long_rows=10, long_tokens=4096),
    rates=LearningRates(),
    warmup_steps=100,
    cooldown_share=0.6,
)
SMOKE = Recipe(
    shape=Shape(hidden=64, intermediate=128, layers=2, heads=2, kv_heads=1, head_dim=32),
    plan=BatchPlan(seed=1, steps=400, short_rows=4, short_tokens=256, long_rows=1, long_tokens=512),
    rates=LearningRates(),
    warmup_steps=10,
    cooldown_share=0.5,
)
RECIPES = {"full": FULL, "smoke": SMOKE}
