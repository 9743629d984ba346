"""The model that this router serves, as its clients see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.router.request.validate import RequestLimits

if TYPE_CHECKING:
    from services.router.text.model_info import ModelInfo
    from services.router.workers.pools import Pools

_NO_LIMIT = 2**62


class ServedModel:
    """Combines the limits of the model's files with those of the workers that serve it."""

    def __init__(self, name: str, info: ModelInfo, pools: Pools) -> None:
        self.name = name
        self._info = info
        self._pools = pools

    @property
    def max_context_tokens(self) -> int:
        """Tokens that prompt and output may have together: the least of the model's limit and the
        workers'."""
        return min(self._info.max_context_tokens, self._pools.max_context_tokens or _NO_LIMIT)

    def limits(self) -> RequestLimits:
        """The limits that apply to a request now."""
        vocab_size = min(self._info.vocab_size, self._pools.vocab_size or _NO_LIMIT)
        return RequestLimits(self.name, self._info.eos_token_ids, vocab_size, self.max_context_tokens)
