"""Failures of a `FakeWorker`, as a test chooses them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import grpc

from baton.base.errors import FailureCause
from baton.v1.types_pb2 import DraftCounts


@dataclass
class Behaviour:
    """Faults of a worker, and how many times each will still occur; 0 and None mean never."""

    refuse_reserves: int = 0
    # Refuses what would bring the tokens of its tickets, outputs included, above this.
    capacity_tokens: int | None = None
    # Prefill's stream breaks at this place ("start", "first", "committed") with this status.
    break_prefills: int = 0
    break_at: str = "start"
    break_code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    prefill_s: float = 0.0
    handoff_s: float = 0.0
    reserve_s: float = 0.0
    step_s: float = 0.001
    # The output of requests that are committed from now on, of which a step makes `script_step` tokens;
    # empty: the model's.
    script: tuple[int, ...] = ()
    script_step: int = 1
    # No step before so many sequences run at once.
    steps_from: int = 0
    # Gives a sequence back once it has this many tokens, `moves` times.
    moves: int = 0
    move_at: int = 4
    # Forgets a sequence without a word once it has `move_at` tokens, `forgets` times.
    forgets: int = 0
    # Does not send the last of a sequence's output, so many times, until it is asked for.
    withholds: int = 0
    # Drops `follow_drops` Subscribe streams, and loses what it was about to send: the first stream after so
    # many messages, a later one when it sends again what an Attach asked for.
    follow_drops: int = 0
    drop_after: int = 3
    # Its engine has died: it answers no call, and reports that on its token streams.
    over: bool = False
    # Sends everything from the start again with each message.
    repeat_all: bool = False
    # Leaves out the token with this number.
    skip_number: int | None = None
    # Sends another token when it repeats this number.
    contradict: bool = False
    # Reports CANCELLED for a ticket that a first token released, before prefill reports that token.
    cancelled_first: bool = False
    # Commits so long before prefill reports anything, or fails.
    overtake_s: float = 0.0
    # Handoffs to the decode workers of these names fail, since the links do.
    broken_links: set[str] = field(default_factory=set)
    broken_cause: FailureCause | None = FailureCause.LINK
    # How often it was asked for more than its limits allow, which a router must not do.
    beyond_limits: int = 0
    # Refuses so many prompts, since its queue is full.
    full_prefills: int = 0
    # Cached tokens of each prompt that prefill reports.
    cached_tokens: int = 0
    # Reports no logprobs of the prompt's last token.
    forget_logprobs: bool = False
    draining: bool = False
    # Decode steps and drafts that it reports with each end, and with each output of a prediction's request.
    drafts: DraftCounts | None = None
    # Slots that other routers' requests hold.
    other_router_slots: int = 0
    send_metadata: bool = True
    # Its token stream is open and brings nothing but output.
    silent: bool = False
    # Describe never answers.
    deaf: bool = False
    # The process and PID namespace that it reports; those of the test by default.
    process_id: int = field(default_factory=os.getpid)
    process_space: str = ""
    # So many cancels are not answered in time.
    lose_cancels: int = 0
