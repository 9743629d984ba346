"""Rows of training: whole, the same for a seed, and marked as to whose each token is."""

from __future__ import annotations

import hashlib
import random
import re

import pytest
from tokenizers import Tokenizer

from models.demo_training.batches import BatchPlan, BatchSource, make_batch
from models.demo_training.conversation import Row, RowMaker
from models.demo_training.evaluate import DEMO_MODEL
from models.demo_training.vocabulary import ASSISTANT, END

FILE = DEMO_MODEL / "tokenizer.json"
TOKENIZER: Tokenizer = Tokenizer.from_file(str(FILE))
MAKER = RowMaker(TOKENIZER)
PLAN = BatchPlan(seed=1, steps=20, short_rows=3, short_tokens=400, long_rows=1, long_tokens=1500)


def rows() -> list[Row]:
    draw = random.Random(1)
    short = [MAKER.short(draw, 1025) for _ in range(20)]
    return short + [MAKER.long(draw, 3000, stretch) for stretch in (0.0, 0.3, 1.0)]


def text_of(row: Row) -> str:
    text: str = TOKENIZER.decode(row.ids.tolist(), skip_special_tokens=False)
    return text


def test_a_row_is_what_its_text_encodes_to() -> None:
    """The model meets no token that a served prompt would not have, except for the cut at the end."""
    for row in rows():
        ids = row.ids.tolist()
        assert TOKENIZER.encode(text_of(row), add_special_tokens=False).ids[:-20] == ids[:-20]


def test_answers_are_the_assistants_text_and_its_end() -> None:
    for row in rows():
        if text_of(row).startswith("<|bos|>"):
            texts = [TOKENIZER.id_to_token(number) for number in row.ids[row.answers].tolist()]
            assert ASSISTANT not in texts
            wanted = re.findall(re.escape(ASSISTANT) + r"(.*?" + re.escape(END) + ")", text_of(row), re.S)
            spoken = TOKENIZER.decode(row.ids[row.answers].tolist(), skip_special_tokens=False)
            assert spoken.startswith("".join(wanted))


def test_long_rows_have_lists_as_long_as_they_may() -> None:
    draw = random.Random(2)
    for stretch, most in ((0.0, 31), (1.0, 365)):
        lines = [text_of(MAKER.long(draw, 4097, stretch)).split("<|end|>")[0].count("\n") for _ in range(20)]
        assert most / 2 < max(lines) <= most + 5


def test_same_seed_same_data() -> None:
    digest = hashlib.sha256()
    for rows in make_batch(PLAN, MAKER, 7):
        digest.update(rows.ids.tobytes() + rows.answers.tobytes())
    assert digest.hexdigest() == "83653637f27f7a778e0d5310c252e2a966ea03c92e0f2181c41998fcdcb800a1"


@pytest.mark.parametrize("workers", [1, 2])
def test_batches_come_in_order_from_any_step_with_any_number_of_workers(workers: int) -> None:
    with BatchSource(PLAN, FILE, workers) as source:
        made = list(source.batches(13))
    assert len(made) == 7
    for step, batch in enumerate(made, 13):
        for ours, theirs in zip(make_batch(PLAN, MAKER, step), batch, strict=True):
            assert (ours.ids == theirs.ids).all()
            assert (ours.answers == theirs.answers).all()


def test_a_batch_has_the_planned_shape() -> None:
    batch = make_batch(PLAN, MAKER, 0)
    assert batch.short.ids.shape == batch.short.answers.shape == (3, 401)
    assert batch.long.ids.shape == batch.long.answers.shape == (1, 1501)
    assert PLAN.tokens == 3 * 400 + 1500
