"""The lookahead table: how outputs of a tenant's earlier requests went on, for its next ones.

Each place of an output that has ended is entered with the 7 tokens behind it, by its last 7, 5 and 3 tokens
(`lookahead_cells`). Another sequence of the tenant with the same last tokens gets them as drafts. What is
learned lies in one array of fixed size on the device, which dies with the worker.

Tenants are kept apart by the keys: each has a seed of its own, a digest of its name and the model with a
secret that is drawn when the table is made. So no request's latency tells what another tenant was answered.

A table of continuations as TACO-LLM's TurboLookaheadCache is one; the plain twin of the kernels in
`kernels/gpu/speculation/lookahead.py`.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass

import numpy as np
import torch

from baton.device.streams.upload import UploadBuffer
from baton.engine.speculation.history import History
from baton.engine.speculation.lookahead_cells import (
    BUCKET_BYTES,
    CELL_WORDS,
    KEY_LENGTHS,
    NO_TOKEN,
    STAMPS,
    WAYS,
    Tokens,
    Words,
    buckets_of,
    continuations,
    fill,
    find,
    ids_of,
    keys_of,
)

_NO_SEED = 0


@dataclass(frozen=True, slots=True)
class Output:
    """Tokens of a slot's sequence that the table learns: from `first` to before `end`. `stamp`: when."""

    slot: int
    first: int
    end: int
    stamp: int


class LookaheadTable:
    """Outputs of earlier requests. `cells` [buckets, WAYS, CELL_WORDS] int64 on the device; `seeds` [slots]
    int64: of each slot's tenant, 0 where the table is neither asked nor filled; `counts` [2] int64: cells in
    use, and contents replaced."""

    def __init__(
        self,
        slots: int,
        size_bytes: int,
        vocab_size: int,
        device: torch.device,
        *,
        model: bytes = b"",
        secret: bytes | None = None,
        alone: bool = False,
        stamp: int = 0,
    ) -> None:
        """`size_bytes`: of the cells, at most. `model`: identifies it. `secret`: None: one is drawn. `alone`:
        drafts come from nowhere else. `stamp`: of the output before the first. Raises ValueError for less
        than a bucket, or more ids than cells have bits for."""
        buckets = size_bytes // BUCKET_BYTES
        if buckets < 1:
            raise ValueError(f"a lookahead table has at least {BUCKET_BYTES} bytes, not {size_bytes}")
        if vocab_size > NO_TOKEN:
            raise ValueError(f"a lookahead table holds ids below {NO_TOKEN}, of {vocab_size}")
        self.cells = torch.zeros(buckets, WAYS, CELL_WORDS, dtype=torch.int64, device=device)
        self.seeds = torch.zeros(slots, dtype=torch.int64, device=device)
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)
        self.host_counts = torch.zeros(2, dtype=torch.int64, pin_memory=device.type == "cuda")
        """`counts` as of the last output, in host memory."""
        self.alone = alone
        self._model = model
        self._secret = secrets.token_bytes(32) if secret is None else secret
        self._upload = UploadBuffer(8, device)
        self._seed = np.frombuffer(self._upload.bytes, dtype=np.int64)
        self._first: list[int | None] = [None] * slots
        self._stamp = stamp

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that the cells take."""
        return self.cells.numel() * self.cells.element_size()

    @property
    def used(self) -> int:
        """Number of cells in use."""
        return int(self.host_counts[0])

    @property
    def replaced(self) -> int:
        """Number of times that a cell's content was replaced by another."""
        return int(self.host_counts[1])

    def seed_of(self, tenant: str) -> int:
        """A tenant's seed, not 0: 64 bits with their sign."""
        digest = hmac.digest(self._secret, self._model + b"\0" + tenant.encode(), "sha256")
        return int.from_bytes(digest[:8], "little", signed=True) | 1

    def begin(self, slot: int, tenant: str | None, first: int) -> None:
        """Sets the tenant of a slot's new sequence, and the first token to learn of it. Without a tenant its
        drafts do not come from the table, and it is not learned. Every stream sees that once this returns."""
        self._seed[0] = _NO_SEED if tenant is None else self.seed_of(tenant)
        self._upload.put(self.seeds[slot : slot + 1], torch.int64)
        self._first[slot] = None if tenant is None else first

    def take_output(self, slot: int, end: int) -> Output | None:
        """Takes the output to learn of a slot's sequence, `end` tokens long. None where there is nothing to
        learn, or it has been taken."""
        first, self._first[slot] = self._first[slot], None
        if first is None or end - first < 2:
            return None
        self._stamp = (self._stamp + 1) % STAMPS
        return Output(slot, first, end, self._stamp)

    def learn(self, history: History, output: Output) -> None:
        """Fills the table with an output from the slot's history."""
        text = history.text(output.slot)
        # The ring's first token is the sequence's `before`-th.
        before = int(history.end[output.slot]) - len(text)
        text = text[: output.end - before]
        ends = np.arange(max(output.first - before, 0), len(text) - 1)
        there = np.array(KEY_LENGTHS) <= ends[:, None] + 1
        if there.any():
            keys = keys_of(self._seed_at(output.slot), text, ends)[there]
            words = np.repeat(continuations(text, ends), there.sum(1), axis=0)
            self._fill(keys, words, output.stamp)

    def _fill(self, keys: Words, words: Words, stamp: int) -> None:
        """Fills in one after the other. What is of different buckets goes together."""
        places, inverse = np.unique(buckets_of(keys, len(self.cells)), return_inverse=True)
        cells = self._cells_of(places)
        order = np.argsort(inverse, kind="stable")
        begins = np.searchsorted(inverse[order], np.arange(len(places)))
        turn = np.arange(len(keys)) - begins[inverse[order]]
        for number in range(int(turn.max()) + 1):
            now = order[turn == number]
            mine = cells[inverse[now]]
            added, replaced = fill(mine, keys[now], words[now], stamp)
            cells[inverse[now]] = mine
            self.counts += torch.tensor([added, replaced], device=self.counts.device)
        self.cells[torch.from_numpy(places)] = torch.from_numpy(cells.view(np.int64)).to(self.cells.device)
        self.host_counts.copy_(self.counts)

    def look_up(self, slot: int, text: Tokens) -> tuple[int, Tokens]:
        """Returns what followed the longest of the keys of a text's last tokens, and that key's length, 0
        where none is found."""
        seed, end = self._seed_at(slot), np.array([len(text) - 1])
        if seed == _NO_SEED or not len(text):
            return 0, text[:0]
        keys = keys_of(seed, text, end)[0]
        cells = self._cells_of(buckets_of(keys, len(self.cells)))
        for number in reversed(range(len(keys))):
            if KEY_LENGTHS[number] > len(text):
                continue
            way = int(find(cells[number : number + 1], keys[number : number + 1])[0])
            if way < WAYS:
                return KEY_LENGTHS[number], ids_of(cells[number, way, 1:])
        return 0, text[:0]

    def _cells_of(self, buckets: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Words:
        """Copies of buckets' cells: [n, WAYS, CELL_WORDS]."""
        cells: Words = self.cells[torch.from_numpy(buckets)].cpu().numpy().view(np.uint64)
        return cells

    def _seed_at(self, slot: int) -> int:
        return int(self.seeds[slot]) % (1 << 64)
