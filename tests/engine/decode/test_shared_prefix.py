"""Mode exact where slots share blocks: together their attention wants more items than the list holds.

Rows that do not fit are held for a step, each of them at some step, and no item is dropped.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.shared_prefix import Shape, SharedPrefix

# 9 items a row, 36 in all; the list holds 4 + 832 / 64 + 1 = 18.
ONE_LAYER = (("num_hidden_layers", 1), ("num_attention_heads", 4), ("num_key_value_heads", 1))
SMALL = Shape(slots=4, shared=8, settings=ONE_LAYER)
# The same where the layer sees a window of 100 tokens: 3 items a row, and all of them fit.
WINDOWED = Shape(
    slots=4,
    shared=8,
    settings=(
        ("architectures", ["MistralForCausalLM"]),
        ("model_type", "mistral"),
        ("sliding_window", 100),
        *ONE_LAYER,
    ),
)
# 64 slots behind 8,192 tokens, the heads of an 8B model: 17 items a row, 1,088 in all; the list holds 89.
FULL = Shape(
    slots=64,
    shared=128,
    fixed=512,
    device="cuda",
    dtype="bfloat16",
    settings=(
        ("hidden_size", 1024),
        ("intermediate_size", 2048),
        ("num_attention_heads", 32),
        ("num_key_value_heads", 8),
        ("head_dim", 128),
        ("num_hidden_layers", 2),
        ("vocab_size", 4096),
    ),
)


def decode_all(engine: SharedPrefix, tokens: int, slots: int) -> list[list[int]]:
    """Every slot's output; no slot falls behind another by more than a turn of all of them."""
    engine.admit_all(tokens)
    graph = hasattr(engine.loop, "step_state")
    for _ in range(2 * slots * (tokens + 2)):
        engine.step()
        if graph:
            assert engine.meeting_places == [0] * len(engine.meeting_places), "a row was left half combined"
        lengths = [len(output) for output in engine.output]
        assert max(lengths) - min(lengths) <= 3, f"a held row does not take its turn: {lengths}"
        if len(engine.ended) == slots:
            return engine.output
    raise AssertionError(f"{slots - len(engine.ended)} slots did not end")


@pytest.mark.parametrize("shape", [SMALL, WINDOWED], ids=["full", "windowed"])
def test_rows_that_do_not_fit_are_held_and_lose_nothing(tmp_path: Path, shape: Shape) -> None:
    wanted = decode_all(SharedPrefix(tmp_path / "model", shape, graph=False), 4, shape.slots)
    engine = SharedPrefix(tmp_path / "model", shape, graph=True)
    assert decode_all(engine, 4, shape.slots) == wanted
    assert (engine.reader.stalled_rows > 0) == (shape is SMALL)


@pytest.mark.gpu
def test_64_slots_behind_8k_shared_tokens_on_a_gpu(tmp_path: Path) -> None:
    """The tokens are those of the same slots one at a time, by the same kernels: in mode exact neighbours
    change nothing."""
    engine = SharedPrefix(tmp_path / "model", FULL, graph=True)
    together = decode_all(engine, 24, FULL.slots)
    assert engine.reader.stalled_rows > 0
    engine = SharedPrefix(tmp_path / "model", FULL, graph=True)
    assert alone(engine, 24) == together


def alone(engine: SharedPrefix, tokens: int) -> list[list[int]]:
    """Every slot's output where only one runs at a time."""
    for number in range(FULL.slots):
        engine.admit(number, tokens)
        for _ in range(4 * tokens):
            if number in engine.ended:
                break
            engine.step()
    assert len(engine.ended) == FULL.slots
    return engine.output
