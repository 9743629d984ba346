"""One network in training: its steps, its losses, and how many answers it would get whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from models.demo_training.batches import Batch, Rows
from models.demo_training.conversation import RowMaker
from models.demo_training.exam import questions
from models.demo_training.network import Llama
from models.demo_training.optimizer import Optimizer
from models.demo_training.recipe import Recipe
from models.demo_training.state import Progress


class Trainer:
    """A network on its device, its optimizer, and what it has seen."""

    def __init__(self, recipe: Recipe, device: torch.device, *, compiled: bool) -> None:
        self.recipe = recipe
        self.device = device
        torch.manual_seed(recipe.plan.seed)
        self.network = Llama(recipe.shape).to(device)
        self.optimizer = Optimizer(self.network, recipe.rates)
        self.progress = Progress(recipe.settings)
        # Since the last report: steps, weighted losses, the answers' losses, their tokens.
        self._sums = torch.zeros(4, device=device)
        self._losses: Callable[[Tensor, Tensor], Tensor] = self.network.losses
        if compiled:
            self._losses = torch.compile(self.network.losses, dynamic=False)

    def step(self, batch: Batch) -> None:
        """Makes one update by a batch."""
        parts = [self._moved(rows) for rows in batch]
        total = torch.stack([weights.sum() for _, _, weights in parts]).sum()
        for ids, answers, weights in parts:
            with self._autocast():
                losses = self._losses(ids[:, :-1], ids[:, 1:])
            loss = (losses * weights).sum() / total
            loss.backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                self._sums[1:] += torch.stack([loss, (losses * answers).sum(), answers.sum()])
        self.optimizer.step(self.recipe.scale(self.progress.steps))
        self.progress.steps += 1
        self._sums[0] += 1

    def take_losses(self) -> tuple[float, float]:
        """Weighted loss, and loss of an answer's token in nats: means since the last call."""
        steps, weighted, answered, tokens = self._sums.tolist()
        self._sums.zero_()
        return weighted / steps, answered / tokens

    @torch.no_grad()
    def exactness(self, maker: RowMaker, part: str, count: int, at_once: int = 32) -> float:
        """Share of questions of which every token of the answer is the network's first choice, given those
        before it: then greedy decoding gives that answer, too."""
        right = 0
        pairs = [(maker.prompt(turn.question), maker.encode(turn.answer)) for turn in questions(part, count)]
        for start in range(0, count, at_once):
            some = pairs[start : start + at_once]
            longest = max(len(prompt) + len(answer) for prompt, answer in some)
            ids = torch.zeros(len(some), longest, dtype=torch.long, device=self.device)
            for row, (prompt, answer) in enumerate(some):
                ids[row, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer], device=self.device)
            with self._autocast():
                best = self.network(ids).argmax(-1).cpu()
            for row, (prompt, answer) in enumerate(some):
                first = len(prompt) - 1
                right += best[row, first : first + len(answer) + 1].tolist() == [*answer, maker.end]
        return right / count

    def _moved(self, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, which targets are answers, and what each target weighs."""
        ids = torch.from_numpy(rows.ids.astype(np.int16)).to(self.device, non_blocking=True).long()
        answers = torch.from_numpy(rows.answers[:, 1:]).to(self.device, non_blocking=True).float()
        return ids, answers, answers + (1 - answers) * self.recipe.rest_weight

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if self.device.type == "cpu":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)
