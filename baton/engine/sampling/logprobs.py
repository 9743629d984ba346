"""Log-probabilities of raw logits: before bias, penalties, temperature and all else."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.shared_memory.logprob_records import LogprobBatch


@torch.inference_mode()
def logprobs_of(logits: Tensor, tokens: Tensor, rows: list[int], counts: list[int]) -> LogprobBatch:
    """The logprobs of the tokens of some rows of a batch, and of each row's likeliest others.

    logits [B, V] of any float dtype, tokens [B] int64. `rows`: which rows; `counts`: how many of the
    likeliest tokens each of them asked for. Computed in float64.
    """
    index = torch.tensor(rows, dtype=torch.int64, device=logits.device)
    mine = logits[index].double().log_softmax(-1)
    chosen = mine.gather(-1, tokens[index][:, None])[:, 0]
    ids = likeliest(mine, min(max(counts), logits.shape[1]))
    return LogprobBatch(
        rows=index.cpu().numpy(),
        counts=torch.tensor(counts).clamp(max=ids.shape[1]).numpy(),
        chosen=chosen.cpu().numpy(),
        ids=ids.cpu().numpy(),
        values=mine.gather(-1, ids).cpu().numpy(),
    )


def likeliest(values: Tensor, count: int) -> Tensor:
    """values [R, V] → the ids [R, count] of the largest, best first; of equals the lowest ids, in order."""
    if count == 0:
        return torch.empty(values.shape[0], 0, dtype=torch.int64, device=values.device)
    last = values.topk(count, sorted=True).values[:, -1:]
    # topk takes any of several equal to the last: take all above it, and the first of its equals.
    above, equal = values > last, values == last
    wanted = count - above.sum(-1, keepdim=True)
    taken = above | (equal & (equal.cumsum(-1) <= wanted))
    ids = torch.nonzero(taken)[:, 1].view(values.shape[0], count)
    order = values.gather(-1, ids).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(-1, order)
