"""A pattern that devices write into each other's memory and read there, before a worker relies on it: where a
host's PCI settings are wrong, peer access is granted and stores go astray."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from baton.base.errors import BatonError, ErrorKind
from baton.engine.parallel.exchange import RankDevice
from baton.engine.parallel.exchange_layout import PatternArguments
from baton.engine.parallel.exchange_source import Constants

# 1 MB.
_WORDS = 1 << 17
_BLOCKS, _THREADS = 64, 256


def check_peers(devices: Sequence[RankDevice], constants: Constants, words: int = _WORDS) -> None:
    """Has each device write `words` of 8 bytes into the memory of each other one, and both read them.

    Raises BatonError (INTERNAL) that names two devices where one finds something else. Devices are numbered
    by rank; all must be idle.
    """
    memory = [device.allocate(words * 8) for device in devices]
    wrong = [device.allocate(8) for device in devices]
    for rank, peer in itertools.permutations(range(len(devices)), 2):
        seed = (rank << 8 | peer) + 1
        _launch(devices[rank], constants, "write_pattern", memory[peer], wrong[rank], seed, words)
        for reader in (peer, rank):
            _launch(devices[reader], constants, "check_pattern", memory[peer], wrong[reader], seed, words)
            found = int(wrong[reader].view(torch.int64))
            if found:
                raise BatonError(
                    ErrorKind.INTERNAL,
                    f"device {rank} wrote {words} words into the memory of device {peer},"
                    f" and device {reader} reads {found} of them otherwise:"
                    " peer access between them does not work (IOMMU, or PCI access control)",
                )


def _launch(
    device: RankDevice,
    constants: Constants,
    kernel: str,
    memory: Tensor,
    wrong: Tensor,
    seed: int,
    count: int,
) -> None:
    arguments = PatternArguments(words=memory.data_ptr(), wrong=wrong.data_ptr(), seed=seed, count=count)
    device.launch(constants, kernel, _BLOCKS, _THREADS, (arguments,))
    device.synchronize()
