"""Block hashes: chained, of whole blocks only, and none is that of other tokens or another seed."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.model_spec.block_hash import HASH_BYTES, BlockHasher

ONE = {"tenant": "a", "fingerprint": b"m", "cache_dtype": "float32"}


def hasher(secret: bytes = b"s", size: int = 4, **fields: object) -> BlockHasher:
    return BlockHasher(secret, block_tokens=size, **{**ONE, **fields})  # type: ignore[arg-type]


def test_only_full_blocks_have_hashes_and_a_hash_covers_all_before_it() -> None:
    hashes = hasher().hashes(range(11))
    assert [len(one) for one in hashes] == [HASH_BYTES] * 2
    assert hasher().hashes(range(12))[:2] == hashes
    changed = hasher().hashes([9, *range(1, 12)])
    assert not set(changed) & set(hasher().hashes(range(12)))
    assert hasher().hashes(range(3)) == ()


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.lists(st.integers(0, 2**32 - 1), max_size=40))
def test_two_sequences_share_the_hashes_of_their_common_blocks_alone(
    one: list[int], other: list[int]
) -> None:
    common = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    common = min(len(one), len(other)) if common is None else common
    mine, theirs = hasher().hashes(one), hasher().hashes(other)
    assert mine[: common // 4] == theirs[: common // 4]
    assert not set(mine[common // 4 :]) & set(theirs[common // 4 :])


def test_seeds_that_differ_in_anything_share_no_hash() -> None:
    fields: list[dict[str, object]] = [
        {},
        {"secret": b"t"},
        {"tenant": "b"},
        {"tenant": ""},
        {"fingerprint": b"n"},
        {"fingerprint": b"", "cache_dtype": "mfloat32"},  # what moved to another field is another seed
        {"cache_dtype": "float16"},
        {"tenant": "am", "fingerprint": b""},
    ]
    hashes = [set(hasher(**one).hashes(range(8))) for one in fields]  # type: ignore[arg-type]
    assert all(not mine & others for mine, others in combinations(hashes, 2))


def test_names_outlive_processes() -> None:
    """A disk's files bear them: a change of the construction has to be meant."""
    assert hasher().hashes(range(8))[-1].hex() == "6fe0972eafa0fa8f1f15ca046c319457"


def test_a_continued_chain_is_the_whole_one() -> None:
    whole = hasher().hashes(range(20))
    for known in range(len(whole) + 1):
        assert hasher().hashes(range(20), whole[:known]) == whole
        assert (*whole[:known], *hasher().more_hashes(range(4 * known, 20), whole[:known])) == whole


def test_hashes_of_one_version_are_found_by_the_next() -> None:
    """Hashes name files on disk and entries in Redis: a change of them is a new format."""
    assert hasher().hashes(range(4))[0].hex() == "6542c3bcd6cfc5c66e87c1a551313caf"


def test_a_block_has_a_token_at_least() -> None:
    with pytest.raises(ValueError, match=r"^a block holds at least one token$"):
        hasher(size=0)
    assert len(hasher(size=1).hashes([7])) == 1
