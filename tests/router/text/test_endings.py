"""Ends of an output: stop ids, the end-of-sequence id, stop strings."""

from __future__ import annotations

from baton.v1.types_pb2 import FinishReason
from tests.router.conftest import EOS, SiteMaker, ids_request, tokens_of
from tests.router.fake_model import VOCAB, expected, next_token
from tests.router.http_client import complete, events, http


def stop_after(prompt: list[int], count: int) -> int:
    """A token id that first comes as the output's token number `count - 1`."""
    output = expected(prompt, count)
    assert output[-1] not in output[:-1]
    return output[-1]


async def test_stop_token_ids(site: SiteMaker) -> None:
    async with site() as here, http(here) as client:
        for count in (1, 4):
            stop = stop_after([1, 2, 3], count)
            body = (await complete(client, stop_token_ids=[stop], return_token_ids=True)).json()
            choice = body["choices"][0]
            assert choice["finish_reason"] == "stop"
            assert choice["token_ids"] == expected([1, 2, 3], count)
            assert body["usage"]["completion_tokens"] == count
        await here.quiet()


async def test_the_end_of_sequence_id_ends_unless_ignored(site: SiteMaker) -> None:
    prompt = next([index] for index in range(VOCAB) if next_token([index]) == EOS)
    async with site() as here:
        responses = await here.generate(ids_request(prompt, 5, ignore_eos=False))
        assert tokens_of(responses) == [EOS]
        assert responses[-1].finish_reason == FinishReason.FINISH_REASON_STOP
        assert "".join(response.text for response in responses) == ""
        assert len(tokens_of(await here.generate(ids_request(prompt, 5)))) == 5
        shown = await here.generate(ids_request(prompt, 1, skip_special_tokens=False))
        assert "".join(response.text for response in shown) == "<|end|>"
        hidden = await here.generate(ids_request(prompt, 1))
        assert "".join(response.text for response in hidden) == ""


async def test_stop_strings_end_and_cancel(site: SiteMaker) -> None:
    """The cut is exact, ids go up to the token that completed the match, the slot is freed."""
    async with site() as here, http(here) as client:
        prompt, count = readable_prompt()
        output = expected(prompt, count)
        stop = bytes(output[-2:]).decode()
        here.worker("decode-0").behaviour.step_s = 0.005
        fields = {"prompt": prompt, "max_tokens": 200, "stop": [stop, "zzzz"], "return_token_ids": True}
        body = (await complete(client, **fields)).json()
        choice = body["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert choice["token_ids"] == output
        assert body["usage"]["completion_tokens"] == count
        assert stop not in choice["text"]
        chunks = [chunk async for chunk in events(client, **fields)]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
        await here.quiet()
        assert here.worker("decode-0").decode.cancels == 2


def readable_prompt() -> tuple[list[int], int]:
    """A prompt whose output soon has two plain letters side by side, and where."""
    for first in range(VOCAB):
        output = expected([first, 5], 12)
        for end in range(3, 12):
            if all(97 <= token < 123 for token in output[end - 2 : end]):
                pair = output[end - 2 : end]
                if all(output[i : i + 2] != pair for i in range(end - 2)):
                    return [first, 5], end
    raise AssertionError("no such prompt")
