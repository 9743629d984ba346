"""An engine's state of one request while it is prefilled, and the parameters it carries. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.engine.blocks import BlockTables
from baton.engine.output_ring import Finish


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. Temperature 0 is greedy; top_k 0 and top_p 1 keep all."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """When a worker ends a sequence: `max_tokens` of output in all, or any of at most 8 stop ids."""

    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt (and what earlier attempts emitted) on its way through prefill.

    `computed` tokens have KV in `blocks`, which the sequence holds one reference of, unless they are
    lent to it by a reservation of the same worker (`borrowed`).
    """

    token_ids: tuple[int, ...]
    prompt_length: int
    sampling: SamplingParams
    limits: Limits
    blocks: BlockTables | None = None
    borrowed: bool = False
    computed: int = field(default=0, init=False)

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def first_number(self) -> int:
        """Index in the output of the token that this prefill will sample."""
        return self.length - self.prompt_length

    @property
    def end(self) -> int:
        """Length of the whole sequence at which it ends."""
        return self.prompt_length + self.limits.max_tokens

    def finish_of(self, token: int) -> Finish:
        """Why `token`, sampled by this prefill, ends the sequence; NONE where it does not."""
        if token in self.limits.stop_token_ids:
            return Finish.STOP
        return Finish.LENGTH if self.length + 1 >= self.end else Finish.NONE
