"""A placed request's share of its workers, in this router's own counters, until it is released."""

from __future__ import annotations

import bisect
from collections.abc import Callable

from baton.base.prefill_defaults import MOST_PREFILL_SHARE
from services.router.placement.forecast import loaded_step_s
from services.router.workers.decode_load import LoadMark
from services.router.workers.worker import Worker

# Fewer output tokens say little of a worker's pace: the first gap, which a handoff is in, is one of them.
_LEAST_TOKENS = 16


class PrefillClaim:
    """A prompt's tokens in this router's counters of a prefill worker. Every method is idempotent."""

    def __init__(
        self,
        prefill: Worker,
        tokens: int,
        seconds: float = 0.0,
        cost: float = 0.0,
        left_s: float | None = None,
    ) -> None:
        """`seconds`: predicted, to compute them. `cost`: of the whole request, in prompt tokens. `left_s`:
        until its first token is due."""
        self.prefill = prefill
        self.cost = cost or float(tokens)
        self._tokens = tokens
        prefill.queued_tokens += tokens
        self._in_backlog = prefill.backlog.add(seconds, tokens, left_s)
        prefill.prefill_share.add(seconds)

    def prefill_ended(self) -> None:
        """Releases the tokens: prefill has computed them, or never will."""
        tokens, self._tokens = self._tokens, 0
        self.prefill.queued_tokens -= tokens
        self.prefill.backlog.ended(self._in_backlog)
        if tokens:
            self.prefill.changed()

    def release(self) -> None:
        """Releases everything that the request claims at its workers."""
        self.prefill_ended()

    def link_failed(self, reason: str) -> None:
        """Records that the link to the decode worker failed; there is none for a prompt without output."""

    def handed_off(self) -> None:
        """Records that the KV blocks have reached the decode worker."""


class Claim(PrefillClaim):
    """A request's share in this router's counters of a pair of workers. The owner calls `release` when
    decode's reservation has ended too."""

    def __init__(
        self,
        prefill: Worker,
        decode: Worker,
        tokens: int,
        reserved: int,
        *,
        seconds: float = 0.0,
        context: int = 0,
        tpot_s: float | None = None,
        reason: str = "",
        cost: float = 0.0,
        left_s: float | None = None,
        on_decoded: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        """`reserved`: tokens that it may have at most, `context`: on average while it decodes. `reason`: why
        this prefill worker, where decode could compute the prompt too. `on_decoded` is called at its end with
        its output tokens."""
        super().__init__(prefill, tokens, seconds, cost, left_s)
        self.decode = decode
        self.reason = reason
        self._on_decoded = on_decoded
        self._reserved = reserved
        self._context = context
        self._tpot_s = tpot_s
        self._released = False
        decode.claimed_slots += 1
        decode.reserved_tokens += reserved
        decode.claimed_context += context
        if tpot_s is not None:
            bisect.insort(decode.tpot_limits, tpot_s)
        decode.load_changed()
        self._claimed_at = decode.loads.mark().at
        # Whether it is sent over a link that failed before, to try that again.
        self._tries_link = prefill is not decode and prefill.links.try_again(decode)
        # Since when it is decoded; None: its prompt is not computed yet.
        self._decoded_since: LoadMark | None = None

    @property
    def prefills_itself(self) -> bool:
        """True if one worker does both, so that no blocks are handed over."""
        return self.prefill is self.decode

    @property
    def has_certain_room(self) -> bool:
        """True if prefill may start before decode has reserved the slot."""
        return not self.prefills_itself and self.decode.has_certain_room

    def prefill_ended(self) -> None:
        super().prefill_ended()
        if self._decoded_since is None and not self._released:
            self.decode.decoding_slots += 1
            self.decode.load_changed()
            self._decoded_since = self.decode.loads.mark(self.decode.backlog.computed_s)

    def link_failed(self, reason: str) -> None:
        self.prefill.links.failed(self.decode, reason)
        self._link_tried()

    def handed_off(self) -> None:
        if not self.prefills_itself:
            self.prefill.links.worked(self.decode)
        self._link_tried()

    def _link_tried(self) -> None:
        if self._tries_link:
            self._tries_link = False
            self.prefill.links.tried(self.decode)

    def decoded(self, tokens: int, tpot_s: float) -> None:
        """Records that the request has ended at decode with `tokens` output tokens, all of this claim, one
        every `tpot_s`: corrects what is predicted for later ones, unless prompts took nearly all of the time
        meanwhile. To be called right before or after `release`."""
        self._on_decoded(tokens)
        if self._decoded_since is None:
            return
        self.decode.first_token_s.observe(self._decoded_since.at - self._claimed_at)
        if tokens < _LEAST_TOKENS:
            return
        # By what is known now of the worker: after a start its first costs are rough.
        costs = self.decode.costs
        load = self.decode.loads.mean_since(self._decoded_since, self.decode.backlog.computed_s)
        if costs.decode_step_s > 0 and 0 <= load.prefill_share < MOST_PREFILL_SHARE:
            self.decode.tpot_ratio.ended(tpot_s, loaded_step_s(costs, load))

    def release(self) -> None:
        """Releases everything, the slot too."""
        super().release()
        self._link_tried()
        if not self._released:
            self._released = True
            self.decode.claimed_slots -= 1
            self.decode.decoding_slots -= self._decoded_since is not None
            self.decode.reserved_tokens -= self._reserved
            self.decode.claimed_context -= self._context
            if self._tpot_s is not None:
                self.decode.tpot_limits.remove(self._tpot_s)
            self.decode.load_changed()
            self.decode.turnover.add()
            self.decode.changed()
