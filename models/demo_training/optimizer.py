"""The optimizer: Muon for the matrices, Adam for embedding and norms.

Muon replaces a matrix's averaged gradient by the nearest orthogonal matrix, roughly, through a few
Newton-Schulz steps (K. Jordan and others, 2024, "Muon: an optimizer for hidden layers"). Its momentum is
kept in bfloat16, so that a training state stays small; all matrices of a shape are worked on at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# The quintic x -> ax + bx^3 + cx^5 of that work: five passes bring singular values into about [0.7, 1.2].
_QUINTIC = (3.4445, -4.7750, 2.0315)
_PASSES = 5


@dataclass(frozen=True, slots=True)
class LearningRates:
    """Settings; learning rates are those of the plateau, in float."""

    matrix: float = 0.02
    embedding: float = 0.004
    norm: float = 0.01
    decay: float = 0.02
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.98)
    epsilon: float = 1e-10


class Optimizer:
    """Updates the weights of a network in place. `state` holds all it remembers, by name, for safetensors."""

    def __init__(self, network: nn.Module, rates: LearningRates) -> None:
        self._rates = rates
        self.steps = 0
        self._groups: dict[torch.Size, list[tuple[str, nn.Parameter]]] = defaultdict(list)
        self._others: list[tuple[str, nn.Parameter]] = []
        self.state: dict[str, Tensor] = {}
        for name, weight in network.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                self._groups[weight.shape].append((name, weight))
                self.state[f"momentum.{name}"] = torch.zeros_like(weight, dtype=torch.bfloat16)
            else:
                self._others.append((name, weight))
                self.state[f"mean.{name}"] = torch.zeros_like(weight)
                self.state[f"square.{name}"] = torch.zeros_like(weight)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Makes one update with every learning rate times `scale`, and clears the gradients."""
        self.steps += 1
        for shape, members in self._groups.items():
            self._step_matrices(shape, members, scale)
        for name, weight in self._others:
            self._step_adam(name, weight, scale)

    def load(self, state: Mapping[str, Tensor], steps: int) -> None:
        """Goes on where a saved state was."""
        self.steps = steps
        for name, tensor in self.state.items():
            tensor.copy_(state[name])

    def _step_matrices(
        self, shape: torch.Size, members: list[tuple[str, nn.Parameter]], scale: float
    ) -> None:
        rates = self._rates
        momenta = [self.state[f"momentum.{name}"] for name, _ in members]
        gradients = [_taken(weight).to(torch.bfloat16) for _, weight in members]
        torch._foreach_mul_(momenta, rates.momentum)
        torch._foreach_add_(momenta, gradients)
        ahead = torch._foreach_add(gradients, momenta, alpha=rates.momentum)
        directions = list(orthogonal(torch.stack(list(ahead))).float().unbind())
        rate = scale * rates.matrix
        weights: list[Tensor] = [weight for _, weight in members]
        torch._foreach_mul_(weights, 1 - rate * rates.decay)
        torch._foreach_add_(weights, directions, alpha=-rate * max(1.0, shape[0] / shape[1]) ** 0.5)

    def _step_adam(self, name: str, weight: nn.Parameter, scale: float) -> None:
        rates, gradient = self._rates, _taken(weight)
        mean, square = self.state[f"mean.{name}"], self.state[f"square.{name}"]
        first, second = rates.betas
        mean.lerp_(gradient, 1 - first)
        square.lerp_(gradient.square(), 1 - second)
        unbiased = (square / (1 - second**self.steps)).sqrt_().add_(rates.epsilon)
        rate = scale * (rates.embedding if weight.ndim == 2 else rates.norm)
        weight.addcdiv_(mean, unbiased, value=-rate / (1 - first**self.steps))


def orthogonal(matrices: Tensor) -> Tensor:
    """About the orthogonal factor of each of `(count, rows, columns)`, bfloat16."""
    a, b, c = _QUINTIC
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_PASSES):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return torch.as_tensor(x.mT if tall else x)


def _taken(weight: nn.Parameter) -> Tensor:
    gradient = weight.grad
    assert gradient is not None
    weight.grad = None
    return gradient
