"""What becomes of every field that OpenAI or vLLM document for the requests that the router serves.

A field is used; or no token of the answer depends on it, and any value is accepted; or it is refused by name,
because ignoring it would change the answer, except at the values that change nothing. null is the same as
absent. Fields in no table are undocumented: they are ignored and reported (see `ignored_fields`), or refused
with `router.strict_fields`.

Sources: OpenAI's API reference (the parameters of its Python client 3.52), vLLM 0.32's documentation of its
OpenAI-compatible server, and the fields of older vLLM releases that clients still send.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Treatment(Enum):
    """What the router does with a field; the values are the words of the documentation."""

    USED = "used"
    NO_EFFECT = "accepted, no effect"
    REFUSED = "refused"


@dataclass(frozen=True)
class Field:
    """How an endpoint treats a field. `neutral`: the values at which a refused field is accepted."""

    treatment: Treatment
    neutral: tuple[object, ...] = ()

    def refuses(self, value: object) -> bool:
        """Whether this value of the field has the request refused."""
        if self.treatment is not Treatment.REFUSED or value is None:
            return False
        return not any(_same(value, one) for one in self.neutral)


# Field → its treatment.
FieldTable = Mapping[str, Field]

_USED = Field(Treatment.USED)
_NO_EFFECT = Field(Treatment.NO_EFFECT)


def _used(*names: str) -> dict[str, Field]:
    return dict.fromkeys(names, _USED)


def _no_effect(*names: str) -> dict[str, Field]:
    return dict.fromkeys(names, _NO_EFFECT)


def _refused(**neutral: tuple[object, ...]) -> dict[str, Field]:
    return {name: Field(Treatment.REFUSED, values) for name, values in neutral.items()}


# Fields of every endpoint that generates: sampling, what ends the output, labels of the caller.
_GENERATION: FieldTable = {
    **_used(
        *("model", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p", "min_tokens"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "stop"),
        *("stop_token_ids", "ignore_eos", "skip_special_tokens", "structured_outputs", "priority"),
    ),
    **_no_effect(
        *("metadata", "moderation", "prompt_cache_key", "prompt_cache_options"),
        *("prompt_cache_retention", "request_id", "safety_identifier", "service_tier", "session_id"),
        *("stream_interval", "user", "watermarking"),
    ),
    **_refused(
        allowed_token_ids=(),
        bad_words=([],),
        cache_salt=(),
        early_stopping=(False,),
        ec_transfer_params=({},),
        include_stop_str_in_output=(False,),
        kv_transfer_params=({},),
        length_penalty=(1,),
        logits_processors=([],),
        logprob_token_ids=(),
        prompt_embeds=(),
        prompt_logprobs=(),
        repetition_detection=(),
        return_token_offsets=(False,),
        return_tokens_as_token_ids=(False,),
        routed_experts_prompt_start=(0,),
        spaces_between_special_tokens=(True,),
        structural_tag=(),
        thinking_token_budget=(-1,),
        truncate_prompt_tokens=(),
        truncation_side=(),
        use_beam_search=(False,),
        vllm_xargs=({},),
    ),
}
_SAMPLING: FieldTable = {
    **_GENERATION,
    **_used(
        *("max_tokens", "n", "logprobs", "return_token_ids", "response_format", "guided_json"),
        *("guided_regex", "guided_choice", "guided_grammar", "guided_whitespace_pattern"),
    ),
    **_no_effect("guided_decoding_backend"),
}

_COMPLETIONS: FieldTable = {
    **_SAMPLING,
    **_used("prompt", "echo", "best_of", "add_special_tokens"),
    **_refused(suffix=("",)),
}

# How a conversation becomes a prompt.
_CONVERSATION: FieldTable = {
    **_used("messages", "add_generation_prompt", "chat_template_kwargs", "tools", "tool_choice"),
    **_refused(
        chat_template=(),
        continue_final_message=(False,),
        documents=([],),
        media_io_kwargs=({},),
        mm_processor_kwargs=({},),
    ),
}
_CHAT: FieldTable = {
    **_SAMPLING,
    **_CONVERSATION,
    **_used("max_completion_tokens", "top_logprobs", "parallel_tool_calls"),
    # `store` asks that the conversation be kept for the provider's dashboard. Nothing is kept.
    **_no_effect("prediction", "store"),
    **_refused(
        add_special_tokens=(False,),
        audio=(),
        best_of=(1,),
        echo=(False,),
        function_call=("none", "auto"),
        functions=([],),
        include_reasoning=(True,),
        modalities=(["text"],),
        reasoning_effort=("none",),
        return_prompt_text=(False,),
        verbosity=("medium",),
        web_search_options=(),
    ),
}

_RESPONSES: FieldTable = {
    **_GENERATION,
    **_used(
        *("input", "instructions", "max_output_tokens", "include", "text", "top_logprobs"),
        *("chat_template_kwargs", "tools", "tool_choice", "parallel_tool_calls"),
        # Without stored responses the first is refused, and nothing is stored, which the response says.
        *("previous_response_id", "store"),
    ),
    **_refused(
        access_programs=(),
        background=(False,),
        context_management=([],),
        conversation=(),
        enable_response_messages=(False,),
        image=(),
        max_tool_calls=(),
        media_io_kwargs=({},),
        mm_processor_kwargs=({},),
        previous_input_messages=([],),
        prompt=(),
        reasoning=({}, {"effort": None}, {"effort": "none"}),
        truncation=("disabled",),
    ),
}


def _also_refusing(table: FieldTable, *others: FieldTable) -> FieldTable:
    """The table with the fields that only other endpoints have. Those without effect there have none here
    either, the others are refused: a `prompt` in a chat is a mistake."""
    whole = dict(table)
    for name, field in ((name, field) for other in others for name, field in other.items()):
        refused = field if field is _NO_EFFECT else Field(Treatment.REFUSED, field.neutral)
        whole.setdefault(name, refused)
    return whole


COMPLETIONS = _also_refusing(_COMPLETIONS, _CHAT, _RESPONSES)
CHAT = _also_refusing(_CHAT, _COMPLETIONS, _RESPONSES)
RESPONSES = _also_refusing(_RESPONSES, _COMPLETIONS, _CHAT)

TOKENIZE: FieldTable = {
    **_CONVERSATION,
    **_used("model", "prompt", "add_special_tokens", "return_token_strs"),
}
DETOKENIZE: FieldTable = _used("model", "tokens")

# Path → the fields of its body.
TABLES: Mapping[str, FieldTable] = {
    "/v1/completions": COMPLETIONS,
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
}


def _same(value: object, allowed: object) -> bool:
    """Equality in which true is not 1."""
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
