from __future__ import annotations

from baton.model_spec.layout import FP8, CacheGroup, Layout, key_value_planes


def test_a_fingerprint_keeps_its_bytes() -> None:
    """Workers of earlier releases compare it: they had a rank in it, which is 0 of 1 for whole blocks."""
    groups = (
        CacheGroup((0, 1), key_value_planes("bfloat16", 8, 128), 64),
        CacheGroup((2,), key_value_planes(FP8, 8, 128), 64, 4096),
    )
    assert Layout(groups).fingerprint(b"model").hex() == (
        "f05c4ca8468a231fa9fda41e3050a1293864c962d8c7d7d9b8e68cd8b3adc6bd"
    )
