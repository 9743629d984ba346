"""The division of a model's parts among the devices of a worker. Torch-free: engine and kvtransfer share
it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Split:
    """Rank `rank` of `count`: the device of a worker that has this part of everything that is divided."""

    rank: int
    count: int

    def of(self, size: int) -> range:
        """The part of `size` consecutive items that this rank has. Where they do not divide evenly the last
        parts are shorter."""
        each = -(-size // self.count)
        return range(min(size, self.rank * each), min(size, (self.rank + 1) * each))

    def heads(self, heads: int) -> range:
        """The part of all heads that this rank has; ValueError where they cannot be split evenly."""
        if not 0 <= self.rank < self.count or heads % self.count:
            raise ValueError(f"rank {self.rank} of {self.count} cannot have an equal part of {heads} heads")
        return self.of(heads)

    @property
    def is_first(self) -> bool:
        """True for the first of the ranks, which adds what must be added once."""
        return self.rank == 0


WHOLE = Split(0, 1)
"""A model that one device has."""


def splits(count: int) -> tuple[Split, ...]:
    """All ranks of `count`, in order."""
    return tuple(Split(rank, count) for rank in range(count))
