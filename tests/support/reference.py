"""The truth for tokens: transformers on the same weights, with eager attention and experts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from baton.engine.kernels.reference.paged_attention import KV_TILE


def load_reference(folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    """The folder's model as transformers runs it."""
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    return model.eval()


def reference_logits(model: Any, token_ids: Sequence[int]) -> Tensor:
    """[len(token_ids), vocab] of one forward pass."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([list(token_ids)])).logits[0]
    return logits


def raw_logits(model: Any, token_ids: Sequence[int]) -> list[list[float]]:
    """A row a token, of a pass as long as rounds as ours does: the models' softmax sums in float32."""
    padding = [0] * (-len(token_ids) % KV_TILE)
    rows: list[list[float]] = reference_logits(model, [*token_ids, *padding])[: len(token_ids)].tolist()
    return rows


def reference_greedy(model: Any, prompt_ids: Sequence[int], count: int) -> list[int]:
    """`count` greedy tokens, each from a whole forward pass: slow, and with no cache to be wrong."""
    ids = list(prompt_ids)
    for _ in range(count):
        ids.append(int(reference_logits(model, ids)[-1].argmax()))
    return ids[len(prompt_ids) :]


def greedy_matches(
    model: Any, prompt_ids: Sequence[int], output_ids: Sequence[int], rounding: float = 0.0
) -> None:
    """Checks that `output_ids` is what the model would choose greedily after `prompt_ids`.

    One forward pass over both. A token whose logit is no more than `rounding` below the best passes too: on
    another device sums are rounded otherwise. Raises AssertionError that names the first difference and how
    close the reference's two best logits were there.
    """
    if not output_ids:
        return
    logits = reference_logits(model, [*prompt_ids, *output_ids[:-1]])[len(prompt_ids) - 1 :]
    expected, found = logits.argmax(-1), torch.tensor(list(output_ids))
    behind = logits.amax(-1) - logits.gather(1, found[:, None])[:, 0]
    wrong = ((expected != found) & (behind >= rounding)).nonzero()
    if not len(wrong):
        return
    at = int(wrong[0])
    best = logits[at].double().topk(2).values
    raise AssertionError(
        f"token {at} of {len(output_ids)} after a prompt of {len(prompt_ids)}: got {output_ids[at]}, "
        f"expected {int(expected[at])}; its logit leads the second best by {float(best[0] - best[1]):.3g}"
    )
