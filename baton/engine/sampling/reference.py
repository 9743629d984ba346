"""Draws the next token of each row.

Order: the edits of `logit_edits` (bias, penalties, stop ids held back), top-n-sigma, temperature, top-k,
top-p over what these left, min-p, draw. A draw takes the largest of (scaled logit + Gumbel noise) among the
tokens left, and the noise is Philox(seed, position, purpose, vocabulary index): a row's token depends on its
own logits, parameters, history, seed and position, and on nothing else in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from baton.device.streams.upload import put_values
from baton.engine.kernels.reference.philox import PURPOSE_DRAW, random_words
from baton.engine.sampling.logit_edits import NO_EDITS, LogitEdits
from baton.engine.sequence import SamplingParams
from baton.request_fields.field import Kind
from baton.request_fields.table import BY_NAME


@dataclass(frozen=True, slots=True)
class Sampling:
    """One row's parameters at each index; every tensor is [B].

    `temperature` float32: 0 takes the largest logit, the lowest index of several. `top_k` int: 0 or less
    keeps all. `top_p` float32: 1 or more keeps all. `seed` int64: the bits of an unsigned 64-bit seed.
    `min_p` and `top_n_sigma` float32: 0 keeps all.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor
    min_p: Tensor
    top_n_sigma: Tensor

    @classmethod
    def made(cls, column: Callable[[str], Tensor]) -> Sampling:
        """The parameters of a batch; `column`: name → tensor [B]."""
        return cls(**{field.name: column(field.name) for field in fields(cls)})

    @classmethod
    def of_params(cls, params: Sequence[SamplingParams], device: torch.device) -> Sampling:
        """The parameters of a batch from those of its requests, on the host."""

        def column(name: str) -> Tensor:
            values = [getattr(one, name) for one in params]
            if name == "seed":
                values = [seed - (1 << 64) if seed >= 1 << 63 else seed for seed in values]
            whole = BY_NAME[name].kind is Kind.INTEGER
            return put_values(values, torch.int64 if whole else torch.float32, device)

        return cls.made(column)

    def at(self, rows: Tensor) -> Sampling:
        """The parameters of `rows` (int64)."""
        return self.made(lambda name: getattr(self, name)[rows])


@dataclass(frozen=True, slots=True)
class Filters:
    """The rows of a batch that need each filter.

    `drawing` int64: those with a temperature. `ranked` int64: of these, by their place among them, those
    with top-k or top-p. `by_min_p`, `by_sigma`: whether any of them has min-p, top-n-sigma.
    """

    drawing: Tensor
    ranked: Tensor
    by_min_p: bool
    by_sigma: bool

    @classmethod
    def of(cls, sampling: Sampling, vocab_size: int) -> Filters:
        """Looks at the parameters, and so waits for their device; who has them on the host need not."""
        drawing = torch.nonzero(sampling.temperature > 0).flatten()
        mine = sampling.at(drawing)
        by_rank = ((mine.top_k > 0) & (mine.top_k < vocab_size)) | (mine.top_p < 1)
        by_min_p, by_sigma = bool((mine.min_p > 0).any()), bool((mine.top_n_sigma > 0).any())
        return cls(drawing, torch.nonzero(by_rank).flatten(), by_min_p, by_sigma)

    @classmethod
    def of_params(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> Filters:
        """The result of `of`, from the requests' parameters on the host."""
        drawing = [row for row, p in enumerate(params) if p.temperature > 0]
        drawn = [params[row] for row in drawing]
        ranked = [place for place, p in enumerate(drawn) if 0 < p.top_k < vocab_size or p.top_p < 1]
        return cls(
            drawing=put_values(drawing, torch.int64, device),
            ranked=put_values(ranked, torch.int64, device),
            by_min_p=any(p.min_p > 0 for p in drawn),
            by_sigma=any(p.top_n_sigma > 0 for p in drawn),
        )


@torch.inference_mode()
def sample(
    logits: Tensor,
    sampling: Sampling,
    positions: Tensor,
    edits: LogitEdits = NO_EDITS,
    filters: Filters | None = None,
) -> Tensor:
    """logits [B, V]; positions [B] int64, each the index in its sequence of the token drawn → [B] int64.

    `filters`: of `sampling`, where the caller knows them.
    """
    logits = edits.applied(logits)
    tokens = logits.argmax(-1)
    filters = filters or Filters.of(sampling, logits.shape[1])
    drawing = filters.drawing
    if drawing.numel():
        tokens[drawing] = _draw(logits[drawing].double(), sampling.at(drawing), positions[drawing], filters)
    return tokens


def _draw(logits: Tensor, sampling: Sampling, positions: Tensor, filters: Filters) -> Tensor:
    """logits [B, V] float64, which keeps tiny probabilities apart → [B] int64."""
    kept = filtered(logits, sampling, filters)
    return (kept + gumbel(sampling.seed, positions, logits.shape[1])).argmax(-1)


def filtered(logits: Tensor, sampling: Sampling, filters: Filters) -> Tensor:
    """logits [B, V] of rows that all draw → logits by temperature, with -inf for each token dropped.

    Top-n-sigma keeps those at most n standard deviations below the largest; top-k the k largest; top-p, of
    the distribution over these, the fewest largest whose probabilities reach p, at least one; min-p those at
    least that share of the likeliest. A token equal to the last one kept is kept as well.
    """
    if filters.by_sigma:
        logits = _near_the_largest(logits, sampling.top_n_sigma.double()[:, None])
    logits = logits / sampling.temperature.double()[:, None]
    ranked = filters.ranked
    if ranked.numel():
        kept = _ranked(logits[ranked], sampling.top_k[ranked], sampling.top_p[ranked])
        logits = logits.index_copy(0, ranked, kept)
    if filters.by_min_p:
        share = (logits - logits.amax(-1, keepdim=True)).exp()
        logits = logits.masked_fill(share < sampling.min_p.double()[:, None], -torch.inf)
    return logits


def _near_the_largest(logits: Tensor, deviations: Tensor) -> Tensor:
    """`filtered` by top-n-sigma alone; deviations [B, 1], 0 keeps all.

    Tang et al., "Top-nσ: Not All Logits Are You Need" (arXiv 2411.07641). As in llama.cpp, the standard
    deviation is that of all logits that are not -inf (of the population), and the filter is the first.
    """
    largest = logits.amax(-1, keepdim=True)
    there = logits > -torch.inf
    below = torch.where(there, logits - largest, 0.0)
    count = there.sum(-1, keepdim=True).clamp(min=1)
    mean = below.sum(-1, keepdim=True) / count
    variance = (below * below).sum(-1, keepdim=True) / count - mean * mean
    least = largest - deviations * variance.clamp(min=0).sqrt()
    return logits.masked_fill((logits < least) & (deviations > 0), -torch.inf)


def _ranked(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """`filtered` by top-k and top-p alone."""
    limits_k = (top_k > 0) & (top_k < logits.shape[1])
    limits_p = top_p < 1
    ordered = logits.sort(-1, descending=True).values
    last = torch.where(limits_k, top_k, logits.shape[1]).long() - 1
    threshold = ordered.gather(-1, last[:, None])
    # Ties at the threshold stand beside it, so a comparison rather than an index decides what is kept.
    left = ordered.masked_fill(ordered < threshold, -torch.inf)
    probabilities = left.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    needed = ((before < top_p[:, None]) & (left > -torch.inf)).sum(-1).clamp(min=1)
    nucleus = ordered.gather(-1, (needed - 1)[:, None])
    threshold = torch.where(limits_p[:, None], torch.maximum(threshold, nucleus), threshold)
    return logits.masked_fill(logits < threshold, -torch.inf)


def gumbel(seed: Tensor, positions: Tensor, count: int) -> Tensor:
    """seed, positions [B] int64 → standard Gumbel noise [B, count] float64."""
    words = random_words(seed, positions, PURPOSE_DRAW, count)
    uniform = (words.double() + 0.5) * 2.0**-32
    return -(-uniform.log()).log()
