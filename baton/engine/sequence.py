"""An engine's state of one request while it is prefilled, and the parameters it carries. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.engine.memory.blocks import BlockTables
from baton.engine.shared_memory.mask_board import Mask
from baton.engine.shared_memory.output_ring import Finish
from baton.request_fields.field import Stage
from baton.request_fields.generated import SamplingValues
from baton.request_fields.table import SAMPLING_NUMBERS

MAX_LOGIT_BIAS = 300
# Parameters of each stage, with the value that changes nothing.
_PENALTIES, _FILTERS = (
    tuple((field.name, field.unused) for field in SAMPLING_NUMBERS if field.stage is stage)
    for stage in (Stage.PENALTY, Stage.FILTER)
)


@dataclass(frozen=True, slots=True)
class SamplingParams(SamplingValues):
    """Sampling parameters of a request; the table of request fields says what each parameter does.

    `logit_bias`: at most MAX_LOGIT_BIAS (token id, bias), each id once. `logprobs`: how many of the
    likeliest tokens' are reported beside the chosen one's; None: no logprobs at all.
    """

    @property
    def penalizes(self) -> bool:
        """True where the draw depends on the tokens before it."""
        return any(getattr(self, name) != unused for name, unused in _PENALTIES)

    @property
    def filters(self) -> bool:
        """True where tokens are dropped before the draw."""
        return self.temperature > 0 and any(getattr(self, name) != unused for name, unused in _FILTERS)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits at which a worker ends a sequence: `max_tokens` of output in all, or any of at most 8 stop ids.

    No stop id is drawn before `min_tokens` of output. `max_tokens` 0: a prompt is run and nothing drawn.
    """

    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt (and what earlier attempts emitted) on its way through prefill.

    `computed` tokens have KV in `blocks`, which the sequence holds one reference of, unless they are
    lent to it by a reservation of the same worker (`borrowed`). With `prompt_logprobs` the logprobs of
    the prompt's own tokens are computed too. `hashes` are those of its full blocks; empty
    where it does not use the prefix cache. `canary`: it is the engine's own, and left out of counts.
    `first_token_in_s`: until when its first token is due, in seconds from its arrival at the scheduler.
    """

    token_ids: tuple[int, ...]
    prompt_length: int
    sampling: SamplingParams
    limits: Limits
    blocks: BlockTables | None = None
    borrowed: bool = False
    prompt_logprobs: bool = False
    hashes: tuple[bytes, ...] = ()
    canary: bool = False
    first_token_in_s: float = math.inf
    # Which tokens may come next, as in `baton.engine.shared_memory.mask_board`; None: all.
    mask: Mask | None = None
    # Set by the owner of the cached blocks: takes one reference of each cached block, in place of the
    # sequence's own first blocks, and returns the tables that the sequence uses from now on.
    lend: Callable[[BlockTables], BlockTables] | None = None
    computed: int = field(default=0, init=False)
    # Tokens whose chunks were launched, on a device that runs behind its host; computed ones included.
    begun: int = field(default=0, init=False)
    # Tokens whose KV was found in the prefix cache, and the number of first blocks that were found or added.
    cached: int = field(default=0, init=False)
    hashed_blocks: int = field(default=0, init=False)
    # True once the prefix cache has given its blocks; and until when it waits for reads from disk.
    prefix_taken: bool = field(default=False, init=False)
    disk_wait_ends: float | None = field(default=None, init=False)

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def reached(self) -> int:
        """Tokens that no further chunk need compute: they have KV, or will."""
        return max(self.computed, self.begun)

    @property
    def first_number(self) -> int:
        """Index in the output of the token that this prefill will sample."""
        return self.length - self.prompt_length

    @property
    def draws(self) -> bool:
        """True if a token is sampled at the end of the prompt."""
        return self.limits.max_tokens > 0

    @property
    def stops_from(self) -> int:
        """Index in the sequence of the first token that a stop id may be."""
        return self.prompt_length + self.limits.min_tokens

    @property
    def end(self) -> int:
        """Length of the whole sequence at which it ends."""
        return self.prompt_length + self.limits.max_tokens

    def finish_of(self, token: int) -> Finish:
        """Says why `token`, sampled by this prefill, ends the sequence; NONE where it does not."""
        if token in self.limits.stop_token_ids:
            return Finish.STOP
        return Finish.LENGTH if self.length + 1 >= self.end else Finish.NONE
