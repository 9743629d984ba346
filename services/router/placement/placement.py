"""Chooses the pair of workers for a request: the decode worker and the prefill worker that delay all requests
least (`worker_order`).

A request is placed only if decode has a free slot and prefill will start it soon (few tokens go before it
there), so that no slot waits long for its first token.

Decode workers on which a request, or one that runs there, would miss its TPOT limit come last, the least risk
first. Where late requests are refused, one with a limit is placed on none of them. Elsewhere, if all that run
have limits as tight, a request that has time until its first token waits for room under its limit, and one
that is late while others would miss theirs: so bursts are smoothed, and fewer miss their limits.

The prefill worker with the earliest predicted first token is chosen, by measured costs; before any are known,
the one with the fewest tokens queued there, less the prompt's cached tokens. So the longest cached prefix
wins, unless that worker's queue is longer by more than the hits save.

A combined worker that exchanges sequences with others may compute a prompt for itself or leave it to another
(conditional disaggregation). Placement takes the way that delays requests less, all together: the prompt
itself, those that wait behind it, and those that the worker decodes, whose steps take longer meanwhile. So it
computes short or mostly cached prompts, prompts while it decodes little, and what would otherwise wait for
long. A prompt whose best worker has a full queue waits for it rather than go to one that decodes. Where all
workers are combined, `prefill_division` says which compute prompts.

Among pairs that are equal by this, one of the same group is chosen: workers of one container, between which
blocks need no network.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, auto
from functools import cache, partial
from typing import NamedTuple

from services.router.placement.claim import Claim, PrefillClaim
from services.router.placement.early_refusal import Demand, check_in_time
from services.router.placement.fitting import FailedPair, Fit, Fitting, fit_of
from services.router.placement.forecast import (
    PromptAt,
    mean_context,
    output_token_cost,
    prompt_at,
    usual_output,
)
from services.router.placement.pools import Pools, bind
from services.router.placement.prefill_division import DecodeChoice, PrefillDivision
from services.router.placement.ready_pairs import some_pair, unusable_reason
from services.router.placement.room import STUCK_S, MayUse, Room, Waits, worth_waiting
from services.router.placement.worker_order import DecodeOrder, PrefillOrder, WorkerOrder
from services.router.request.limits import Needs
from services.router.request.request import ClientCall
from services.router.request.slo import Due
from services.router.workers.backlog import Queued
from services.router.workers.directory import Directory
from services.router.workers.other_claims import FIRST, Precedence
from services.router.workers.worker import Worker

# Seconds within which a prompt of more than `prefill_ahead_tokens` must end for the next one to be sent after
# it.
_NEXT_WITHIN_S = 0.25
# A worker that decodes, too, has a third prompt queued behind two others, up to this many times
# `prefill_ahead_tokens`: steps of which a decode step is part hold the ends of several prompts, and take the
# worker least where two wait when one is begun (docs/decisions/0044-decode-steps-in-prefill-steps.md).
_WITH_THIRD = 1.5

Cached = Callable[[Worker], int]


class NoRoom(Enum):
    """The reason why a request is not placed: no decode worker that it may use has room, or only such as
    would compute much of its prompt that another one has cached, or no prefill worker would start its prompt
    soon, or it is beyond the limits of all workers, while others are served."""

    DECODE = auto()
    CACHED = auto()
    PREFILL = auto()
    UNFIT = auto()


class _Pair(NamedTuple):
    """The workers of a request; `computed_by`: a key of `Placement.placed`; `reason`: see `Claim`."""

    prefill: Worker
    decode: Worker
    computed_by: str
    reason: str


class Placement:
    """Chooses among the workers of one pool, by this router's own counters, corrected by heartbeats."""

    def __init__(
        self, directory: Directory, pools: Pools, prefill_ahead_tokens: int, *, refuse_late: bool = False
    ) -> None:
        """`refuse_late`: requests that cannot meet their limits are refused."""
        self._directory = directory
        self.pools = pools
        self._ahead = prefill_ahead_tokens
        self.refuse_late = refuse_late
        self.division = PrefillDivision()
        # Called after each claim.
        self.on_claim: Callable[[], None] = lambda: None
        # Placements by who computes the prompt: the decode worker (`spare`: a designated one), or another.
        self.placed = Counter({"own": 0, "other": 0, "spare": 0})

    def usable(self, call: ClientCall | None = None) -> bool:
        """True if some pair could serve a request of this call, or a new one, now or once it has room."""
        return some_pair(self._admitted(call))

    def fits(self, needs: Needs, call: ClientCall | None = None, failed: Sequence[FailedPair] = ()) -> bool:
        """True if a request of this call is within the limits of some pair but these, now or once it has
        room."""
        return Fit(needs, failed).some_pair(self._admitted(call))

    def fitting(self, needs: Needs, call: ClientCall | None = None) -> tuple[Fitting, Fitting]:
        """The live workers that a request of this call fits, and all of them."""
        workers = self._admitted(call)
        return Fit(needs).among(workers), Fit(Needs(0, 0)).among(workers)

    def unusable_reason(self) -> str:
        """Says why no pair of workers is `usable`."""
        return unusable_reason(self._directory.workers)

    def pick(
        self,
        tokens: int,
        max_tokens: int,
        cached: Cached = lambda worker: 0,
        call: ClientCall | None = None,
        may_use: MayUse = lambda worker: True,
        tpot_s: float | None = None,
        *,
        needs: Needs | None = None,
        failed: Sequence[FailedPair] = (),
        may_prefill: MayUse = lambda worker: True,
        due: Callable[[], Due | None] = lambda: None,
        precedence: Callable[[], Precedence] = lambda: FIRST,
        behind: Callable[[], int] = lambda: 0,
        returning: bool = False,
        by_order: Callable[[], bool] = lambda: False,
        waits: Callable[[], Waits] = lambda: Waits.NOT,
    ) -> Claim | NoRoom:
        """Claims the best pair with room for `tokens` to prefill, and binds the call to its pool; otherwise
        says which of both has no room.

        `cached`: how many of the tokens a worker has cached; called once for each worker. `may_use`: whether
        the request may use a decode worker with a free slot, `may_prefill`: whether it may use a prefill
        worker. `needs`: what it asks of workers; None: no more than its tokens. `failed`: where attempts of
        it failed. `tpot_s`: its TPOT limit, `due`: when its first token is due,
        `precedence`: over requests of sibling processes,
        `behind`: how many requests wait behind it. `returning`: it has been placed before, and is not refused
        any more. `by_order`: whether prompts that a prefill worker computes after this one do not count as
        queued there. `waits`: what for, if it has `tpot_s`.
        """
        workers = self._admitted(call)
        fit = fit_of(needs or Needs(tokens, tokens + max_tokens), failed, workers)
        if not fit.some_pair(workers):
            return NoRoom.UNFIT if some_pair(workers) else NoRoom.DECODE
        hits = {worker: cached(worker) for worker in workers}
        usable = partial(_both, fit.decodes, may_use)
        context = mean_context(tokens, max_tokens)
        what_for = Waits.NOT if returning else self._waits(waits, hits, tpot_s, context)
        before = precedence()
        first_due = due()
        left_s = None if first_due is None else first_due.left_s
        # Once a worker: it takes longer than all else where many prompts are queued.
        prompt = cache(lambda worker: prompt_at(worker, tokens, hits[worker], left_s))
        least = tokens - max((hit for one, hit in hits.items() if one.alive and one.prefills), default=0)
        starts_soon = partial(
            self._starts_soon, tokens=least, precedence=before, prompt=prompt if by_order() else None
        )
        soon = partial(_both, may_prefill, starts_soon)
        division = self.division.divide(hits)
        uncached: dict[Worker, int] = {}
        # With `refuse_late` it would be refused rather than wait for a cache.
        if not (returning or self.refuse_late):
            uncached = {
                one: tokens - hit
                for one, hit in hits.items()
                if division.computes_itself(one) and fit.decodes(one)
            }
        room = Room(usable, what_for, tpot_s, context, before, uncached, self._ahead)
        within = {one for one in hits if room.within_limits(one)}
        passed_over = {one for one in within if room.passes_over(one)}
        able = within - passed_over
        # Before workers are put in order, which takes longest: those that wait are tried again and again.
        if not any(one not in uncached or soon(one) for one in able):
            return _no_room(NoRoom.PREFILL if able else NoRoom.DECODE, passed_over, soon)
        order = WorkerOrder(
            hits,
            prompt,
            first_due,
            behind(),
            tpot_s,
            context,
            usual_output(max_tokens),
            division.computes_itself,
            fit.suspects,
        )
        keys = {worker: order.decode(worker) for worker in hits}
        choice = division.choose_decode(sorted(hits, key=keys.__getitem__), usable)
        pair = self._pair(choice, keys, able.__contains__, soon, order, fit)
        if isinstance(pair, NoRoom):
            return _no_room(pair, passed_over, soon)
        prefill, decode = pair.prefill, pair.decode
        bind(call, prefill, decode)
        self.placed[pair.computed_by] += 1
        to_compute = tokens - hits[prefill]
        output_cost = usual_output(max_tokens) * output_token_cost(prefill, decode, context)
        claim = Claim(
            prefill,
            decode,
            to_compute,
            tokens + max_tokens,
            seconds=prompt(prefill).own_s,
            context=context,
            tpot_s=tpot_s,
            reason=pair.reason,
            cost=max(1, to_compute) + output_cost,
            left_s=left_s,
            on_decoded=partial(self.division.ended, max_tokens=max_tokens),
        )
        own_s = min((prompt(one).own_s for one in hits if one.exchanges), default=0.0)
        self.division.placed(own_s, decode.costs, context, max_tokens)
        self.on_claim()
        return claim

    def _waits(
        self, waits: Callable[[], Waits], workers: Iterable[Worker], tpot_s: float | None, context: int
    ) -> Waits:
        """The reason for which a request of `context` tokens waits."""
        if tpot_s is None:
            return Waits.NOT
        if self.refuse_late:
            return Waits.FOR_ITSELF
        why = waits()
        return why if why is not Waits.NOT and worth_waiting(workers, tpot_s, context) else Waits.NOT

    def _pair(
        self,
        choice: DecodeChoice,
        keys: Mapping[Worker, DecodeOrder],
        has_room: Callable[[Worker], bool],
        soon: Callable[[Worker], bool],
        order: WorkerOrder,
        fit: Fit,
    ) -> _Pair | NoRoom:
        """The first decode worker with room for which a prefill worker starts the prompt soon. `keys`: those
        of the decode workers in `order`."""
        no_room = NoRoom.DECODE
        for place, decode in enumerate(choice.workers):
            if not has_room(decode):
                continue
            no_room = NoRoom.PREFILL
            why_own = choice.own.get(decode, "")
            order_of = partial(order.prefill, decode)
            able = [one for one in ([decode] if why_own else keys) if fit.pair(one, decode)]
            prefill = self.prefill_for(decode, able, order_of, soon)
            if prefill is None:
                continue
            if prefill.group != decode.group:
                decode = _nearest(prefill, choice.workers[place:], keys, has_room, fit)
            if why_own:
                return _Pair(prefill, decode, "spare" if choice.spare else "own", why_own)
            reason = order.reason(decode, prefill, (one for one in keys if fit.pair(one, decode)))
            return _Pair(prefill, decode, "own" if prefill is decode else "other", reason)
        return no_room

    def check_in_time(
        self, demand: Demand, left_s: float | None, cached: Cached, call: ClientCall, queued: Queued
    ) -> float:
        """Checks as `early_refusal.check_in_time` does; returns the predicted seconds of the prompt on one
        worker. Does nothing, and returns 0, unless requests that would be late are refused."""
        if not self.refuse_late:
            return 0.0
        workers = [worker for worker in self._admitted(call) if worker.alive]
        decodes = self.division.divide(workers).may_decode(workers)
        prefills = {worker: cached(worker) for worker in workers if worker.prefills}
        check_in_time(demand, left_s, prefills, decodes, queued)
        return min(
            (worker.costs.prompt_s(demand.tokens, hits) for worker, hits in prefills.items()), default=0.0
        )

    def longest_first_token_s(self, tokens: int, cached: Cached, call: ClientCall) -> float:
        """Predicted seconds from a prompt's placement, behind as many others as a prefill worker may have
        queued, to its first token; 0 where no worker computes it. `cached`: see `pick`."""
        prefills = [worker for worker in self._admitted(call) if worker.alive and worker.prefills]
        return min(
            (one.costs.prompt_s(tokens, cached(one)) + one.costs.prompt_s(self._ahead) for one in prefills),
            default=0.0,
        )

    def least(self, tokens: int, call: ClientCall) -> tuple[int, float]:
        """The slots of all decode workers that may serve a call, and predicted seconds of its prompt; 0 where
        it may be cached, or step costs are not known."""
        workers = [worker for worker in self._admitted(call) if worker.alive]
        slots = sum(worker.described.load.slots for worker in workers if worker.decodes)
        seconds = (
            0.0 if worker.caches_prefixes else worker.costs.prompt_s(tokens)
            for worker in workers
            if worker.prefills
        )
        return slots, min(seconds, default=0.0)

    def prefill_for(
        self,
        decode: Worker,
        among: Iterable[Worker],
        order: Callable[[Worker], PrefillOrder],
        soon: Callable[[Worker], bool],
    ) -> Worker | None:
        """The best of the workers that may compute a prompt for `decode`, and will start it soon. None where
        there is none, or where that decodes, and it delays requests less to wait for a better one whose queue
        is full now."""
        able = [worker for worker in among if worker.accepts_work]
        best = min(filter(soon, able), key=order, default=None)
        if best is None or not best.exchanges or not (best is decode or best.used_slots):
            return best
        waited_for = (worker for worker in able if worker is best or worker.backlog.overdue_s < STUCK_S)
        return best if best is min(waited_for, key=order) else None

    def pick_prefill(
        self,
        tokens: int,
        call: ClientCall | None = None,
        *,
        needs: Needs | None = None,
        failed: Sequence[FailedPair] = (),
        may_prefill: MayUse = lambda worker: True,
    ) -> PrefillClaim | NoRoom:
        """Claims the least loaded worker that computes prompts, for a prompt of `tokens` without output. The
        rest as for `pick`."""
        fit = Fit(needs or Needs(tokens, tokens))
        prefills = [one for one in self._admitted(call) if one.prefills and one.alive]
        fitting = [one for one in prefills if fit.prefills(one)]
        if not fitting:
            return NoRoom.UNFIT if prefills else NoRoom.PREFILL
        others = [one for one in fitting if (one, None) not in failed]
        able = [one for one in others or fitting if may_prefill(one) and self._starts_soon(one)]
        if not able:
            return NoRoom.PREFILL
        prompts = {worker: prompt_at(worker, tokens) for worker in able}
        prefill = min(able, key=lambda one: (prompts[one].first_token_s, one.prefill_queue_tokens))
        bind(call, prefill)
        claim = PrefillClaim(prefill, tokens, prompts[prefill].own_s)
        self.on_claim()
        return claim

    def _admitted(self, call: ClientCall | None) -> list[Worker]:
        return [worker for worker in self._directory.workers if self.pools.admits(worker, call)]

    def _starts_soon(
        self,
        worker: Worker,
        tokens: int = 0,
        precedence: Precedence = FIRST,
        prompt: Callable[[Worker], PromptAt] | None = None,
    ) -> bool:
        """True if few tokens are queued at a worker, with those of requests in sibling processes that are to
        be placed before, which are taken to have `tokens` each; with `prompt`, only those count that go
        before it. Also where a single long prompt is there that soon ends: the next one must be there by
        then; and where two are that a third one may share steps with."""
        if not worker.accepts_work or worker.prefill_queue_prompts >= worker.limits.max_prefills:
            return False
        before = worker.others.siblings.waiting_before(precedence)
        queued = worker.prefill_queue_tokens + min(before * tokens, self._ahead // 2)
        if queued < self._ahead:
            return True
        if worker.prefill_queue_prompts == 1 and not before and worker.backlog.wait_s < _NEXT_WITHIN_S:
            return True
        if worker.decodes and worker.prefill_queue_prompts == 2 and queued < _WITH_THIRD * self._ahead:
            return True
        return prompt is not None and queued - prompt(worker).wait.tokens_behind < self._ahead


def _no_room(why: NoRoom, passed_over: Iterable[Worker], soon: Callable[[Worker], bool]) -> NoRoom:
    """`why`, or `CACHED` where a worker would do that was passed over for another one's cache."""
    return NoRoom.CACHED if any(why is NoRoom.DECODE or soon(one) for one in passed_over) else why


def _both(first: MayUse, second: MayUse, worker: Worker) -> bool:
    return first(worker) and second(worker)


def _nearest(
    prefill: Worker,
    ordered: Sequence[Worker],
    order: Mapping[Worker, DecodeOrder],
    has_room: Callable[[Worker], bool],
    fit: Fit,
) -> Worker:
    """The first decode worker, or one that is equal to it and of the group of `prefill`."""
    first = ordered[0]
    for decode in itertools.takewhile(lambda one: order[one] == order[first], ordered):
        near = decode.group == prefill.group and fit.pair(prefill, decode)
        if near and has_room(decode):
            return decode
    return first
