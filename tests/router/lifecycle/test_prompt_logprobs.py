"""Logprobs of a prompt: delivered once, in order and with the first token, whichever attempt reports them."""

from __future__ import annotations

import pytest

from baton.base.errors import ErrorKind
from baton.v1.prefill_pb2 import PromptLogprobs
from tests.router.lifecycle.reported_outputs import (
    a_run,
    an_output_of,
    decoded,
    delivered,
    error_of,
    first_token,
    serialised,
)
from tests.router.lifecycle.scripted_workers import logprobs_message


def test_the_prompts_logprobs_come_in_order_and_once() -> None:
    output, outbox = an_output_of(echo=True)
    output.accept_prompt_logprobs(1, a_run(1, -1))
    output.accept_prompt_logprobs(1, a_run(2, -2, -3))
    output.begin(2)
    output.accept_prompt_logprobs(2, a_run(1, -1, -2))  # reported by the first attempt already
    output.accept_prompt_logprobs(2, a_run(2, -2, -3))
    assert not output.prompt_complete
    output.accept_decoded(decoded(0, [10], attempt=2, logprobs=[logprobs_message(-9)]))
    output.accept_prompt_logprobs(2, a_run(3, -3))
    assert outbox.take() is None, "the tokens wait for all of the prompt"
    output.accept_prompt_logprobs(2, a_run(3, -3, -4))
    assert output.prompt_complete
    delta = delivered(outbox)
    assert delta.prompt_logprobs == serialised(-1, -2, -3, -4)
    assert (delta.token_ids, delta.logprobs) == ([10], serialised(-9)), "the token that waited"
    assert output.error is None


def test_the_last_of_the_prompts_logprobs_delivers_nothing_without_a_token() -> None:
    output, outbox = an_output_of(echo=True)
    output.accept_prompt_logprobs(1, a_run(1, -1, -2, -3, -4))
    assert output.prompt_complete
    assert outbox.take() is None


def test_the_prompts_logprobs_are_delivered_once() -> None:
    output, outbox = an_output_of(echo=True)
    output.accept_prompt_logprobs(1, a_run(1, -1, -2, -3, -4))
    output.accept_prompt_logprobs(1, a_run(3, -3, -4))  # a report that has nothing new
    output.accept_decoded(decoded(0, [10], logprobs=[logprobs_message(-9)]))
    assert delivered(outbox).prompt_logprobs == serialised(-1, -2, -3, -4)


# After one of the prompt's four logprobs: the next run -> what is wrong with it.
PROMPT_FAULTS = [
    (a_run(3, -3), "the prompt's logprobs 1 to 1 never came"),
    (a_run(5, -3), "the prompt's logprobs 1 to 3 never came"),
    (a_run(2, -2, -3, -4, -5), "more than 4 logprobs of the prompt came"),
]


@pytest.mark.parametrize(("run", "message"), PROMPT_FAULTS)
def test_a_broken_report_of_the_prompt_fails_the_request(run: PromptLogprobs, message: str) -> None:
    output, _ = an_output_of(echo=True)
    output.accept_prompt_logprobs(1, a_run(1, -1))
    output.accept_prompt_logprobs(1, run)
    assert error_of(output) == (ErrorKind.INTERNAL, f"attempt 1: {message}")


def test_the_prompts_first_token_has_no_logprobs() -> None:
    output, _ = an_output_of(echo=True)
    output.accept_prompt_logprobs(1, a_run(0, -1))
    assert error_of(output)[0] is ErrorKind.INTERNAL


def test_a_token_of_prefill_before_all_of_the_prompt_is_an_error() -> None:
    output, _ = an_output_of(echo=True)
    output.accept_prompt_logprobs(1, a_run(1, -1, -2, -3))
    output.accept_first_token(1, first_token(0, 10, logprobs=logprobs_message(-1)))
    message = "attempt 1: a token came before all of the prompt's logprobs"
    assert error_of(output) == (ErrorKind.INTERNAL, message)
    assert output.emitted == []
