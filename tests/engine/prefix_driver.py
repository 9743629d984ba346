"""Random requests before a prefix cache whose copies are fake, and a model of it made of sets and lists.

A block's contents are a string; the model knows which contents each name stands for, whom each request
belongs to, and says after every act which names are on the device, in the store, and published.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Run
from dataclasses import dataclass, field

from baton.engine.memory.block_pools import BlockPools
from baton.engine.memory.blocks import BlockTables, OutOfBlocksError
from baton.engine.memory.cached_blocks import Entry
from baton.engine.prefix_cache.cache import PrefixCache, Stored
from baton.engine.sequence import Limits, SamplingParams, Sequence
from baton.model_spec.block_hash import BlockHasher
from baton.model_spec.layout import CacheGroup, Layout, Plane

BLOCK = 3
TENANTS = ("", "a", "b")
Contents = str


def layout(groups: int) -> Layout:
    planes = (Plane("k", "float32", 1, 4),)
    return Layout(tuple(CacheGroup((group,), planes, BLOCK) for group in range(groups)))


class Memory:
    """Contents of each block of the device, group by group; written by requests and by loads alone."""

    def __init__(self, pools: BlockPools) -> None:
        self.held: list[dict[int, Contents]] = [{} for _ in pools.pools]

    def write(self, blocks: tuple[int, ...], contents: Contents) -> None:
        for group, block in zip(self.held, blocks, strict=True):
            group[block] = contents

    def read(self, blocks: tuple[int, ...]) -> Contents:
        (contents,) = {group[block] for group, block in zip(self.held, blocks, strict=True)}
        return contents


class FakeStore:
    """`BlockStore` of at most `room` strings; those `slow` come only when they were asked for before."""

    def __init__(self, memory: Memory, room: int, draw: random.Random) -> None:
        self._memory = memory
        self._room = room
        self._draw = draw
        self._asked: set[bytes] = set()
        self.slow: set[bytes] = set()
        self.held: dict[bytes, Contents] = {}
        self._lost: list[bytes] = []
        self.stored = Stored()
        self.seconds_each = 0.0

    def __contains__(self, name: bytes) -> bool:
        return name in self.held

    def hashes(self) -> set[bytes]:
        return set(self.held)

    def put(self, entries: list[Entry]) -> None:
        for name, blocks in entries:
            if self._room and name not in self.held:
                while len(self.held) >= self._room:
                    self.lose(next(iter(self.held)))
                self.held[name] = self._memory.read(blocks)
                if self._draw.random() < 0.2:
                    self.slow.add(name)

    def lose(self, name: bytes) -> None:
        """A file that turned out to be spoilt, or one too many."""
        del self.held[name]
        self.slow.discard(name)
        self._asked.discard(name)
        self._lost.append(name)

    def take_lost(self) -> list[bytes]:
        lost, self._lost = self._lost, []
        return lost

    def ready(self, names: Run[bytes]) -> tuple[int, bool]:
        here = 0
        while here < len(names) and names[here] in self.held and names[here] not in self.slow:
            here += 1
        behind = names[here : here + 1]
        self._asked.update(name for name in behind if name in self.held)
        return here, any(name in self._asked for name in behind)

    def load(self, names: Run[bytes], tables: BlockTables) -> list[str]:
        for name, *blocks in zip(names, *tables, strict=True):
            self._memory.write(tuple(blocks), self.held[name])
        return ["host"] * len(names)

    def poll(self) -> bool:
        came, self._asked = self._asked, set()
        self.slow -= came
        return bool(came)

    def close(self) -> None:
        pass


@dataclass(eq=False)
class Running:
    """A request under way: its tenant, its tokens, and the transfers' pins on its blocks."""

    tenant: str
    sequence: Sequence
    pins: list[tuple[int, int]] = field(default_factory=list)
    borrowed_from: BlockTables | None = None
    ended: bool = False


class Driver:
    """One step is one thing that may happen to a worker; `check` compares all of it with the model."""

    def __init__(self, seed: int, *, groups: int = 1, blocks: int = 24, store: int = 10) -> None:
        self.draw = random.Random(seed)
        self.now = 0.0
        self.pools = BlockPools(layout(groups), [blocks + 1] * groups)
        self.memory = Memory(self.pools)
        self.store = FakeStore(self.memory, store, self.draw)
        self._hashers = {
            tenant: BlockHasher(b"s", tenant=tenant, fingerprint=b"m", cache_dtype="x", block_tokens=BLOCK)
            for tenant in TENANTS
        }
        self.cache = PrefixCache(self.pools, self._hashers.__getitem__, self.store, clock=lambda: self.now)
        self.texts = [[self.draw.randrange(50) for _ in range(40)] for _ in range(4)]
        self.waiting: list[Running] = []
        self.running: list[Running] = []
        self.published: set[bytes] = set()
        # What every name that was ever made stands for, and whose it is.
        self.meaning: dict[bytes, Contents] = {}
        self.owner: dict[bytes, str] = {}
        self.requests = 0
        self.did: Counter[str] = Counter()

    def step(self) -> None:
        acts: list[Callable[[], object]] = [
            self.ask,
            self.take_prefix,
            self.take_prefix,
            self.compute,
            self.compute,
            self.compute,
            self.pin,
            self.unpin,
        ]
        acts += [self.end, self.report_output, self.store_works, self.cancel]
        self.draw.choice(acts)()
        self.check()

    def ask(self) -> None:
        """A prompt that begins as others do, of any tenant."""
        if len(self.waiting) + len(self.running) > 12:
            return
        text = self.draw.choice(self.texts)
        tokens = text[: self.draw.randrange(1, 30)] + [
            self.draw.randrange(50) for _ in range(self.draw.choice((0, 1, 4)))
        ]
        tenant = self.draw.choice(TENANTS)
        sequence = Sequence(tuple(tokens), len(tokens), SamplingParams(), Limits(max_tokens=4))
        sequence.prompt_logprobs = self.draw.random() < 0.1
        sequence.hashes = self.cache.hashes_of(sequence.token_ids, tenant)
        self.learn(tenant, tokens, sequence.hashes)
        self.waiting.append(Running(tenant, sequence))
        self.requests += 1

    def learn(self, tenant: str, tokens: Run[int], names: Run[bytes]) -> None:
        for place, name in enumerate(names):
            contents = f"{tenant}:{list(tokens[: (place + 1) * BLOCK])}"
            assert self.meaning.setdefault(name, contents) == contents, "a name stands for two things"
            self.owner[name] = tenant

    def take_prefix(self) -> None:
        """The next prompt is given its blocks; of what it found it must be the owner, and it must be all."""
        if not self.waiting:
            return
        one = self.draw.choice(self.waiting)
        sequence = one.sequence
        wanted = () if sequence.prompt_logprobs else sequence.hashes[: (sequence.length - 1) // BLOCK]
        if self.draw.random() < 0.3 and not self.lend_to(one):
            return
        device, at_hand = self.expected(wanted)
        evicted = self.pools.cached.evicted
        if not self.cache.take_prefix(sequence):
            assert sequence.computed == 0
            self.did["waited"] += 1
            if sequence.borrowed:  # its reservation expires
                self.waiting.remove(one)
                self.give_back(one)
            return
        sequence.prefix_taken = True
        self.waiting.remove(one)
        self.running.append(one)
        found = sequence.cached // BLOCK
        # Making room may push out what the store had, and give it what the device had behind a gap.
        assert device <= found
        assert found == at_hand or self.pools.cached.evicted > evicted
        assert sequence.blocks is not None
        for place in range(found):
            name = sequence.hashes[place]
            assert self.owner[name] == one.tenant, "another tenant's block"
            contents = self.memory.read(tuple(table[place] for table in sequence.blocks))
            assert contents == self.meaning[name], "another block's contents"
        self.did["hits"] += found
        self.did["from the store"] += found - device

    def lend_to(self, one: Running) -> bool:
        """A reservation of the same worker lends it blocks, some more than the prompt needs."""
        try:
            lent = self.pools.allocate(one.sequence.length + self.draw.randrange(9))
        except OutOfBlocksError:
            return False
        counts = self.pools.counts_for(one.sequence.length)
        one.borrowed_from = lent

        def lend(prefix: BlockTables) -> BlockTables:
            mine = one.borrowed_from
            assert mine is not None
            self.pools.release(tuple(own[: len(new)] for new, own in zip(prefix, mine, strict=True)))
            one.borrowed_from = tuple(new + own[len(new) :] for new, own in zip(prefix, mine, strict=True))
            return tuple(own[:count] for own, count in zip(one.borrowed_from, counts, strict=True))

        one.sequence.borrowed, one.sequence.lend = True, lend
        one.sequence.blocks = tuple(own[:count] for own, count in zip(lent, counts, strict=True))
        return True

    def expected(self, wanted: Run[bytes]) -> tuple[int, int]:
        """The number of leading blocks that the device has, and that it has together with the store."""
        device = 0
        while device < len(wanted) and wanted[device] in self.pools.cached:
            device += 1
        both = device
        while both < len(wanted) and wanted[both] in self.store and wanted[both] not in self.store.slow:
            both += 1
        return device, both

    def compute(self) -> None:
        """A chunk of a prompt; its KV is in the blocks before they are named."""
        unfinished = [one for one in self.alive() if one.sequence.computed < one.sequence.length]
        if not unfinished:
            return
        one = self.draw.choice(unfinished)
        sequence = one.sequence
        assert sequence.blocks is not None
        before = sequence.computed
        sequence.computed = min(sequence.length, before + self.draw.choice((1, 2, 3, 7, 40)))
        for place in range(before // BLOCK, -(-sequence.computed // BLOCK)):
            self.write(one, place, sequence.token_ids[: min(sequence.computed, (place + 1) * BLOCK)])
        self.cache.computed(sequence)

    def write(self, one: Running, place: int, tokens: Run[int]) -> None:
        assert one.sequence.blocks is not None
        tables = one.borrowed_from or one.sequence.blocks
        blocks = tuple(table[place] for table in tables)
        for group, block in enumerate(blocks):
            shared = self.pools.pools[group].references(block) - len(
                [p for p in one.pins if p == (group, block)]
            )
            assert shared == 1, "a block that others read is written"
        self.memory.write(blocks, f"{one.tenant}:{list(tokens)}")

    def pin(self) -> None:
        """A transfer will read a full block."""
        full = [one for one in self.alive() if one.sequence.computed >= BLOCK]
        if full:
            one = self.draw.choice(full)
            assert one.sequence.blocks is not None
            group = self.draw.randrange(len(self.pools.pools))
            block = one.sequence.blocks[group][self.draw.randrange(one.sequence.computed // BLOCK)]
            self.pools.pools[group].pin(block)
            one.pins.append((group, block))

    def unpin(self) -> None:
        """A transfer has read one, maybe long after its sequence ended."""
        pinned = [one for one in self.running if one.pins]
        if pinned:
            one = self.draw.choice(pinned)
            group, block = one.pins.pop(self.draw.randrange(len(one.pins)))
            self.pools.pools[group].unpin(block)
            self.forget(one)

    def end(self) -> None:
        """A sequence is done; a reservation's goes on to decode some tokens and leaves them, too."""
        done = [one for one in self.alive() if one.sequence.computed == one.sequence.length]
        if not done:
            return
        one = self.draw.choice(done)
        if one.borrowed_from is not None:
            self.decode(one, one.borrowed_from)
        self.give_back(one)

    def decode(self, one: Running, tables: BlockTables) -> None:
        room = min(map(len, tables)) * BLOCK - one.sequence.length
        output = [self.draw.randrange(50) for _ in range(self.draw.randrange(room + 1))]
        tokens = [*one.sequence.token_ids, *output]
        for place in range(one.sequence.length // BLOCK, -(-len(tokens) // BLOCK)):
            self.write(one, place, tokens[: (place + 1) * BLOCK])
        self.learn(one.tenant, tokens, self._hashers[one.tenant].hashes(tokens))
        self.cache.add(self.cache.hashes_of(tokens, one.tenant), tables)

    def cancel(self) -> None:
        """Between two chunks, or while it waits."""
        if self.waiting and self.draw.random() < 0.3:
            self.waiting.remove(self.draw.choice(self.waiting))
        if self.alive() and self.draw.random() < 0.3:
            self.give_back(self.draw.choice(self.alive()))

    def alive(self) -> list[Running]:
        """The requests that have not ended; a transfer may still read blocks of the others."""
        return [one for one in self.running if not one.ended]

    def give_back(self, one: Running) -> None:
        one.ended = True
        tables = one.borrowed_from or one.sequence.blocks
        assert tables is not None
        self.pools.release(tables)
        self.forget(one)

    def forget(self, one: Running) -> None:
        if one.ended and not one.pins and one in self.running:
            self.running.remove(one)

    def report_output(self) -> bool:
        """Some changes reach the index; True where there are no more, and it knows what there is."""
        limit = self.draw.choice((1, 3, 1000))
        added, removed = self.cache.take_changes(limit)
        assert not set(added) & set(removed)
        self.published |= set(added)
        self.published -= set(removed)
        if whole := len(added) + len(removed) < limit:
            assert self.published == self.cache.hashes()
        return whole

    def store_works(self) -> None:
        """Time passes; the disk reads; now and then a file is spoilt."""
        self.now += 0.1
        self.store.poll()
        if self.store.held and self.draw.random() < 0.1:
            self.store.lose(self.draw.choice(list(self.store.held)))
            self.cache.poll()
            self.did["spoilt"] += 1

    def check(self) -> None:
        """References, tiers and contents are the model's."""
        held = [one.borrowed_from or one.sequence.blocks for one in self.running if not one.ended]
        self.pools.check_integrity([tables for tables in held if tables is not None])
        used = [set[int]() for _ in self.pools.pools]
        for tables in filter(None, held):
            for group, blocks in enumerate(tables):
                used[group].update(blocks)
        for one in self.running:
            for group, block in one.pins:
                used[group].add(block)
        cached = self.pools.cached
        idle = 0
        for name, blocks in cached.entries.items():
            assert self.memory.read(blocks) == self.meaning[name], "a name lies"
            idle += not any(block in used[group] for group, block in enumerate(blocks))
        assert cached.idle == idle
        for group, pool in enumerate(self.pools.pools):
            kept = {blocks[group] for blocks in cached.entries.values()}
            assert pool.free == pool.total - len(kept | used[group]), "a block in two states, or in none"
        for name, contents in self.store.held.items():
            assert contents == self.meaning[name]

    def run_out(self) -> None:
        """Everything ends: nothing is held, and the index knows what there is."""
        self.waiting.clear()
        for one in list(self.running):
            if not one.ended:
                self.give_back(one)
            while one.pins:
                group, block = one.pins.pop()
                self.pools.pools[group].unpin(block)
            self.forget(one)
        self.check()
        assert self.pools.free == self.pools.total
        while not self.report_output():
            pass
