"""Random requests to a decode side whose steps are simulated, compared with a reference made of token lists.

The driver writes the content of every block, as prefill's link or as a step, so that it identifies the
tokens and the tenant that the block stands for. Each write must be to a block without another reference or a
hash; each step must find its own tokens in every block that it reads. Router and prefill may send wrong
hashes.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from baton.base.errors import BatonError, ErrorKind
from baton.engine.decode.slots import SlotPool
from baton.engine.memory.block_pools import BlockPools
from baton.engine.memory.host_blocks import HostBlocks
from baton.engine.memory.kv_cache import KVCache
from baton.engine.prefix_cache.cache import PrefixCache
from baton.engine.shared_memory.step_shape import StepShape
from baton.model_spec.block_hash import BlockHasher
from baton.model_spec.layout import CacheGroup, Layout, Plane
from baton.v1.decode_pb2 import ReserveRequest, TicketBody
from baton.v1.transfer_pb2 import CommitRecord
from baton.v1.types_pb2 import Attempt, Limits, Sampling, WorkerIdentity
from kvtransfer.protocol.addresses import Endpoint
from kvtransfer.protocol.frames import WithdrawReason
from kvtransfer.protocol.ticket import TicketSigner
from kvtransfer.receiver.events import CommitPending, Committed, MetadataReceived, Withdrawn
from services.common.engine.attempt_key import AttemptKey
from services.worker.engine.decode.reserved_slots import ReservedBlockSink
from services.worker.engine.decode.side import DecodeSide
from services.worker.engine.decode.ticket_table import TicketTable
from services.worker.engine.startup.kv_wire_format import WireBlocks
from tests.worker.engine.decode.simulated_decode import (
    BLOCK,
    BLOCK_BYTES,
    VOCAB,
    SimulatedLink,
    SimulatedSteps,
    Slot,
    Text,
)

SLOTS = 6
TENANTS = ("", "a", "b")


@dataclass(eq=False)
class Ticketed:
    """A reservation, until its sequence is admitted or it has ended."""

    key: AttemptKey
    body: TicketBody
    text: Text
    most: int
    true: bool  # whether the hashes of its resident blocks are its own
    unsent: list[tuple[int, int]]


class Driver:
    """Each step is a random event of a worker; `check` compares its state with the reference."""

    def __init__(
        self,
        seed: int,
        *,
        groups: int = 1,
        blocks: int = 60,
        host: int = 40,
        rows_per_slot: int = 1,
        most_tokens: int = 1,
    ) -> None:
        self.draw = random.Random(seed)
        self.now = 0.0
        plane = (Plane("k", "float32", 1, 4),)
        layout = Layout(tuple(CacheGroup((group,), plane, BLOCK) for group in range(groups)))
        assert layout.groups[0].block_bytes == BLOCK_BYTES
        self.pools = BlockPools(layout, [blocks + 1] * groups)
        self.cache = KVCache(layout, blocks + 1, "cpu")
        self._hashers = {
            tenant: BlockHasher(b"s", tenant=tenant, fingerprint=b"m", cache_dtype="x", block_tokens=BLOCK)
            for tenant in TENANTS
        }
        self.prefixes = PrefixCache(self.pools, self._hashers.__getitem__)
        self.loop = SimulatedSteps(self, StepShape(SLOTS, rows_per_slot), most_tokens)
        self.link, self.slots = SimulatedLink(), SlotPool(SLOTS)
        model = SimpleNamespace(
            pools=self.pools, layout=layout, cache=self.cache, fingerprint=b"f", max_context_tokens=120,
            max_logprobs=0, config=SimpleNamespace(vocab_size=VOCAB),
        )  # fmt: skip
        self.host = HostBlocks(self.cache, host * BLOCK_BYTES * groups)
        self._host_blocks = self.host.free
        sink = ReservedBlockSink(TicketTable(clock=lambda: self.now), WireBlocks(self.cache, b"f"))
        self.decode = DecodeSide(
            cast(Any, model), cast(Any, self.loop), self.slots, sink, identity=WorkerIdentity(name="d"),
            signer=TicketSigner(b"s" * 16), emit=lambda event: None, prefix_cache=self.prefixes,
            host=self.host, reserve_output_tokens=4,
            receiver=cast(Any, self.link), endpoints=(Endpoint("grpc", "here:1"),),
        )  # fmt: skip
        self.texts = [[self.draw.randrange(VOCAB) for _ in range(60)] for _ in range(4)]
        self.conversations: list[Text] = []
        self.tickets: list[Ticketed] = []
        self.reports: list[Slot] = []
        self.committing = (AttemptKey(b"", 0), "")
        self.requests = 0
        self.published: set[bytes] = set()
        # The contents that each hash stands for.
        self.meaning: dict[bytes, tuple[bytes, ...]] = {}
        self.did: Counter[str] = Counter()

    # -- events -------------------------------------------------------------------------------------

    def step(self) -> None:
        acts = [self.reserve, self.reserve, self.send, self.send, self.commit, self.commit, self.report]
        acts += [
            self.run,
            self.run,
            self.run,
            self.run,
            self.report,
            self.cancel,
            self.pass_time,
            self.publish,
        ]
        self.draw.choice(acts)()
        self.check()

    def reserve(self) -> None:
        """Reserves for a prompt that shares a prefix with others or continues a sequence; sometimes with
        hashes that are not its own."""
        text = self._prompt()
        names = list(self._hashers[text.tenant].hashes(text.tokens))
        self.learn(text)
        reported, roll = names, self.draw.random()
        if roll < 0.15:
            other = self.draw.choice(self.texts)[: self.draw.randrange(60)]
            reported = list(self._hashers[self.draw.choice(TENANTS)].hashes(other))
        elif roll < 0.25:
            reported = names[: self.draw.randrange(len(names) + 1)] * self.draw.choice((1, 1, 2))
        self.requests += 1
        most = self.draw.choice((2, 3, 8, 40))
        attempt = Attempt(request_id=self.requests.to_bytes(16, "little"), number=1)
        full = len(text.tokens) // BLOCK
        run = next((n for n, name in enumerate(reported[:full]) if name not in self.pools.cached), None)
        expected = min(full, len(reported)) if run is None else run
        ttl_ms = 20_000
        request = ReserveRequest(
            attempt=attempt, token_count=len(text.tokens), max_tokens=most, ttl_ms=ttl_ms,
            block_hashes=reported, tenant=text.tenant,
        )  # fmt: skip
        try:
            reserved = self.decode.issuer.reserve(request)
        except BatonError as error:
            if error.kind is not ErrorKind.OVERLOADED:
                raise
            self.did["refused"] += 1
            return
        body = TicketBody.FromString(reserved.ticket.body)
        groups = len(self.pools.pools)
        assert list(body.resident_counts) == ([expected] * groups if expected else [])
        assert body.resident_hash == (reported[expected - 1] if expected else b"")
        unsent = [(group, n) for group in range(groups) for n in range(expected, body.block_counts[group])]
        assert reserved.kv_bytes == len(unsent) * BLOCK_BYTES
        self.draw.shuffle(unsent)
        true = reported[:expected] == names[:expected]
        self.tickets.append(Ticketed(AttemptKey.of(attempt), body, text, most, true, unsent))
        self.did["held"] += expected

    def _prompt(self) -> Text:
        if self.conversations and self.draw.random() < 0.4:
            earlier = self.draw.choice(self.conversations)
            return Text(earlier.tenant, (earlier.tokens + self._words(5))[: self.draw.choice((70, 70, 9))])
        begin = self.draw.choice(self.texts)[: self.draw.randrange(1, 40)]
        return Text(self.draw.choice(TENANTS), begin + self._words(self.draw.choice((0, 1, 4))))

    def _words(self, count: int) -> list[int]:
        return [self.draw.randrange(VOCAB) for _ in range(count)]

    def send(self) -> None:
        """Some blocks of a ticket arrive."""
        waiting = [one for one in self.tickets if one.unsent]
        if waiting:
            one = self.draw.choice(waiting)
            for _ in range(self.draw.choice((1, 3, 40))):
                if one.unsent:
                    self._arrives(one, *one.unsent.pop())

    def _arrives(self, one: Ticketed, group: int, ordinal: int) -> None:
        counts, held = self.link.expected[one.body.transfer_id]
        assert held[group] <= ordinal < counts[group]
        data = one.text.contents(group, min((ordinal + 1) * BLOCK, len(one.text.tokens)))
        entry = self.decode.tickets.find_transfer(one.body.transfer_id)
        assert entry is not None
        self.owned(group, entry.reservation.blocks[group][ordinal])
        self.decode.sink.scatter(one.body.transfer_id, group, ordinal, 0, memoryview(data))

    def commit(self) -> None:
        """Commits a ticket whose blocks have arrived; refused where its resident blocks are of other
        tokens."""
        whole = [one for one in self.tickets if not one.unsent]
        if not whole:
            return
        one = self.draw.choice(whole)
        self.tickets.remove(one)
        record = CommitRecord(
            attempt=one.body.attempt, token_ids=one.text.tokens, prompt_length=len(one.text.tokens),
            first_token_id=self.draw.randrange(VOCAB), sampling=Sampling(temperature=0, top_p=1),
            limits=Limits(max_tokens=one.most),
        )  # fmt: skip
        entry = self.decode.tickets.find(one.key)
        assert entry is not None
        good = one.true and self.now < entry.deadline
        self.committing = (one.key, one.text.tenant)
        if one.body.transfer_id % 2:  # it went ahead of its blocks
            ahead = CommitRecord()
            ahead.CopyFrom(record)
            ahead.ClearField("first_token_id")
            self.link.events.append(MetadataReceived(one.body.transfer_id, ahead))
            self.decode.handoffs.poll(16)
            self.did["described"] += 1
        if self.draw.random() < 0.5:  # while a device still moves the last bytes
            self.link.events.append(CommitPending(one.body.transfer_id, record))
            self.did["announced"] += 1
        if self.draw.random() < 0.1:
            self.link.forget(one.body.transfer_id)
            self.link.events.append(Withdrawn(one.body.transfer_id, WithdrawReason.FINISHED, ""))
            self.decode.handoffs.poll(16)
            return
        self.link.events.append(Committed(one.body.transfer_id, record))
        refused = len(self.link.refusals)
        self.decode.handoffs.poll(16)
        assert (len(self.link.refusals) == refused) == good
        if not good:
            assert self.link.refusals[-1].kind is ErrorKind.CONFLICT
        self.did["admitted" if good else "late" if one.true else "lied"] += 1

    def run(self) -> None:
        """A turn of the loop."""
        self.decode.reserved.expire()
        self.tickets = [one for one in self.tickets if self.decode.tickets.find(one.key) is not None]
        self.decode.allocation.step()
        self.loop.step()

    def report(self) -> None:
        """The front reports a slot whose last record it has read."""
        if self.reports:
            one = self.reports.pop(self.draw.randrange(len(self.reports)))
            self.learn(one.text)
            self.decode.reserved.slot_ended(*one.key, one.emitted)
            self.conversations = [*self.conversations[-4:], Text(one.text.tenant, one.text.tokens)]

    def cancel(self) -> None:
        """Cancels a ticket or a running sequence."""
        if self.tickets and self.draw.random() < 0.2:
            one = self.tickets.pop(self.draw.randrange(len(self.tickets)))
            self.decode.reserved.cancel(one.key)
        if self.loop.slots and self.draw.random() < 0.2:
            self.decode.reserved.cancel(self.draw.choice(list(self.loop.slots.values())).attempt)

    def pass_time(self) -> None:
        self.now += self.draw.choice((0.1, 0.1, 6.0))

    def publish(self) -> None:
        """Publishes some changes to the index, which knows every cached block once there are no more."""
        limit = self.draw.choice((1, 3, 1000))
        added, removed = self.prefixes.take_changes(limit)
        self.published |= set(added)
        self.published -= set(removed)
        if len(added) + len(removed) < limit:
            assert self.published == self.prefixes.hashes()

    # -- invariants ---------------------------------------------------------------------------------

    def learn(self, text: Text) -> None:
        for place, name in enumerate(self._hashers[text.tenant].hashes(text.tokens)):
            end = (place + 1) * BLOCK
            meant = tuple(text.contents(group, end) for group in range(len(self.pools.pools)))
            assert self.meaning.setdefault(name, meant) == meant, "one hash for two contents"

    def bytes_of(self, group: int, block: int) -> bytes:
        return bytes(self.cache.read_block(group, block, 0, BLOCK_BYTES))

    def owned(self, group: int, block: int) -> None:
        assert self.pools.pools[group].references(block) == 1, "a block that others read is written"
        assert block not in self.pools.pools[group].kept, "a cached block is written"

    def write(self, group: int, block: int, data: bytes) -> None:
        self.owned(group, block)
        self.cache.write_block(group, block, 0, memoryview(data))

    def read(self, slot: Slot) -> None:
        """Checks the blocks that a step attends to."""
        length = len(slot.text.tokens)
        for group, blocks in enumerate(slot.table):
            for place in range(-(-length // BLOCK)):
                wanted = slot.text.contents(group, min((place + 1) * BLOCK, length))
                assert self.bytes_of(group, blocks[place]) == wanted, "another block's contents"

    def check(self) -> None:
        """References, hashes and contents match the reference."""
        owned = self.decode.reserved.owned_blocks()
        self.pools.check_integrity(owned)
        cached, idle = self.pools.cached, 0
        used = [{block for tables in owned for block in tables[g]} for g in range(len(self.pools.pools))]
        for name, blocks in cached.entries.items():
            assert tuple(map(self.bytes_of, range(len(blocks)), blocks)) == self.meaning[name], (
                "a cached block has other contents"
            )
            idle += not any(block in mine for block, mine in zip(blocks, used, strict=True))
        assert cached.idle == idle
        for pool, mine in zip(self.pools.pools, used, strict=True):
            assert pool.free + idle == pool.total - len(mine)

    def run_out(self) -> None:
        """Ends everything: no block has a reference, and none is swapped out."""
        for one in self.tickets:
            self.decode.reserved.cancel(one.key)
        self.tickets.clear()
        for _ in range(2_000):
            if not (self.loop.slots or self.reports):
                break
            self.run()
            self.report()
            self.check()
        assert not self.decode.reserved.owned_blocks()
        assert self.pools.free == self.pools.total
        assert self.slots.free == SLOTS
        assert self.host.free == self._host_blocks
        assert not self.link.expected
