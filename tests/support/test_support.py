from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.support.checkpoints import ASSISTANT_ID, BEGIN_ID, END_ID, USER_ID, VOCAB_SIZE, make_checkpoint
from tests.support.reference import greedy_matches, load_reference, reference_greedy, reference_logits
from tests.support.text_truth import Ended, Ends, TextTruth


def test_a_wrong_token_is_named_and_the_right_ones_pass(tmp_path: Path) -> None:
    model = load_reference(make_checkpoint(tmp_path, seed=4))
    prompt = [5, 6, 7]
    output = reference_greedy(model, prompt, 12)
    greedy_matches(model, prompt, output)
    wrong = [*output[:7], (output[7] + 1) % VOCAB_SIZE, *output[8:]]
    with pytest.raises(
        AssertionError, match=rf"token 7 of 12 .* got {wrong[7]}, expected {output[7]}; .* by "
    ):
        greedy_matches(model, prompt, wrong)
    lead = lead_of(model, [*prompt, *output[:7]], wrong[7])
    with pytest.raises(AssertionError, match=r"token 7 of 8"):
        greedy_matches(model, prompt, wrong[:8], rounding=0.99 * lead)
    greedy_matches(model, prompt, wrong[:8], rounding=1.01 * lead)


def lead_of(model: Any, token_ids: list[int], token: int) -> float:
    """Returns the difference between the best logit behind the tokens and that of `token`."""
    last = reference_logits(model, token_ids)[-1]
    return float(last.max() - last[token])


def test_the_tokenizer_covers_every_id_and_every_text(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert all(tokenizer.id_to_token(i) is not None for i in range(VOCAB_SIZE))
    text = "The baton, naïvely: 接力棒 🏃\n\t<ok>"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert max(tokenizer.encode("abcdefghijklmnopqrstuvwxyz" * 3).ids) > ASSISTANT_ID


def test_what_ends_a_text_and_where_its_tokens_stand(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    texts = TextTruth(tmp_path)
    ids = [texts.id_of[spelling] for spelling in ("a", "b", "bytes:\\xc3", "bytes:\\xa9", "c", "<|end|>")]
    assert texts.decode(ids) == "abéc"
    assert [texts.data(token) for token in ids[2:]] == [b"\xc3", b"\xa9", b"c", b"<|end|>"]
    assert texts.offsets(ids) == [0, 1, 2, 2, 3, 4]  # both bytes stand where their character does
    assert texts.ended(ids, Ends(5)) == Ended(5, "abéc", "length")
    assert texts.ended(ids[:5], Ends(6)) is None
    assert texts.ended(ids, Ends(9, stop_ids=(END_ID,))) == Ended(6, "abéc", "stop")
    assert texts.ended(ids, Ends(9, stops=("éc", "b", "bé"))) == Ended(2, "a", "stop")
    assert texts.ended(ids, Ends(9, stops=("b", "éc"), min_tokens=2)) == Ended(5, "ab", "stop")
    assert texts.ended(ids, Ends(9, (END_ID,), stops=("bé",), min_tokens=2)) == Ended(6, "abéc", "stop")


def test_the_chat_template_uses_the_special_tokens(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "9"}], add_generation_prompt=True, return_dict=False
    )
    nine = tokenizer.encode("9", add_special_tokens=False)
    assert ids == [BEGIN_ID, USER_ID, *nine, END_ID, ASSISTANT_ID]
