"""The table of request fields: all that OpenAI, vLLM or Baton document for the endpoints of the router.

A field is used; or no token of the answer depends on it, and any value is accepted; or it is refused by name,
because ignoring it would change the answer, except at the values that change nothing. null is the same as
absent. Fields that are not here are undocumented.

Bounds are at least as wide as OpenAI's and vLLM's: what either of them takes is taken. Where workers compute
with less, a number beyond theirs is used as the nearest one of theirs.

Sources: OpenAI's API reference (the parameters of its Python client 3.52), vLLM 0.32's documentation of its
OpenAI-compatible server, and the fields of older vLLM releases that clients still send.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from baton.request_fields.field import Bounds, Endpoint, Kind, RequestField, Stage, Wire

OPENAI, VLLM, LLAMA_CPP, BATON = "OpenAI", "vLLM", "llama.cpp", "Baton"
_COMPLETIONS, _CHAT, _RESPONSES = Endpoint.COMPLETIONS, Endpoint.CHAT, Endpoint.RESPONSES
_TOKENIZE, _DETOKENIZE = Endpoint.TOKENIZE, Endpoint.DETOKENIZE
_GENERATING = Endpoint.GENERATING
_CHOICES = _COMPLETIONS | _CHAT
_CONVERSATION = _CHAT | _TOKENIZE
_TEMPLATE = _CONVERSATION | _RESPONSES

U32 = 2**32 - 1
I64 = 2**63 - 1
_TOKENS = Bounds(0, I64, used=(0, U32))
_OUTPUTS = Bounds(1, 128)
_LOGPROBS = Bounds(0, 20)
# Tokens of a request's `prediction`.
MAX_PREDICTION_TOKENS = 16_384

# Each acts on what the one before it has left.
_SAMPLING = (
    RequestField(
        "logit_bias", OPENAI, "Added to the logits of these tokens, before all else.",
        Kind.BIASES, _GENERATING, bounds=Bounds(-math.inf, math.inf, used=(-100, 100)), most_items=300,
        wire=Wire("repeated LogitBias", 19, 9),
    ),
    RequestField(
        "repetition_penalty", VLLM,
        "Divides the positive and multiplies the negative logits of tokens in prompt or output.",
        Kind.FLOAT, _GENERATING, bounds=Bounds(0, math.inf, above=True, used=(1e-6, 1e6)), default=1,
        wire=Wire("optional float", 16, 6), stage=Stage.PENALTY,
    ),
    RequestField(
        "presence_penalty", OPENAI, "Subtracted from the logits of tokens that the output has.",
        Kind.FLOAT, _GENERATING, bounds=Bounds(-2, 2), default=0,
        wire=Wire("optional float", 17, 7), stage=Stage.PENALTY,
    ),
    RequestField(
        "frequency_penalty", OPENAI,
        "Subtracted from a token's logit for each time that the output has the token.",
        Kind.FLOAT, _GENERATING, bounds=Bounds(-2, 2), default=0,
        wire=Wire("optional float", 18, 8), stage=Stage.PENALTY,
    ),
    RequestField(
        "top_n_sigma", LLAMA_CPP,
        "Keeps tokens whose logit is at most this many standard deviations of the row's logits below the "
        "largest; 0 and less keep all.",
        Kind.FLOAT, _GENERATING, bounds=Bounds(-1, math.inf, used=(0, 1e6)), default=0,
        wire=Wire("optional float", 28, 11), stage=Stage.FILTER,
    ),
    RequestField(
        "temperature", OPENAI, "Divides the logits; 0 takes the likeliest token.",
        Kind.FLOAT, _GENERATING, bounds=Bounds(0, math.inf, used=(0, 1e6)), default=1, off=0,
        wire=Wire("optional float", 5, 1),
    ),
    RequestField(
        "top_k", VLLM, "Keeps this many of the likeliest tokens; 0 and -1 keep all.",
        Kind.INTEGER, _GENERATING, bounds=Bounds(-1, I64, used=(0, 2**30)), default=0,
        wire=Wire("optional uint32", 6, 2), stage=Stage.FILTER,
    ),
    RequestField(
        "top_p", OPENAI,
        "Keeps the fewest likeliest tokens, of those that top_k left, whose probabilities reach this sum.",
        # No more than the likeliest token has this least probability.
        Kind.FLOAT, _GENERATING, bounds=Bounds(0, 1, used=(2.0**-40, 1)), default=1,
        wire=Wire("optional float", 7, 3), stage=Stage.FILTER,
    ),
    RequestField(
        "min_p", VLLM, "Keeps tokens of at least this share of the likeliest token's probability.",
        Kind.FLOAT, _GENERATING, bounds=Bounds(0, 1), default=0,
        wire=Wire("optional float", 15, 5), stage=Stage.FILTER,
    ),
    RequestField(
        "seed", OPENAI,
        "Decides every draw together with the token's position; chosen by the router where unset. Output "
        "number i of n draws with seed + i.",
        Kind.INTEGER, _GENERATING, bounds=Bounds(-I64 - 1, 2**64 - 1), wire=Wire("optional fixed64", 8, 4),
    ),
    RequestField(
        "logprobs", OPENAI,
        "Reports this many of the likeliest tokens at each position, beside the drawn one; in a chat true, "
        "and top_logprobs is the number.",
        Kind.LOGPROBS, _CHOICES, bounds=_LOGPROBS, wire=Wire("optional uint32", 14, 10),
    ),
)  # fmt: skip

_OUTPUT = (
    RequestField(
        "model", OPENAI, "Name of the served model.",
        Kind.TEXT, _GENERATING | _TOKENIZE | _DETOKENIZE, most_chars=1024, wire=Wire("string", 1),
    ),
    RequestField(
        "max_tokens", OPENAI, "Most tokens of an output; where unset 16, in a chat the rest of the context.",
        Kind.INTEGER, _CHOICES, bounds=_TOKENS, wire=Wire("optional uint32", 9),
    ),
    RequestField(
        "max_completion_tokens", OPENAI, "Another name of max_tokens.",
        Kind.INTEGER, _CHAT, bounds=_TOKENS,
    ),
    RequestField(
        "max_output_tokens", OPENAI, "Most tokens of the output; where unset the rest of the context.",
        Kind.INTEGER, _RESPONSES, bounds=_TOKENS,
    ),
    RequestField(
        "min_tokens", VLLM, "Tokens of an output before which no stop id and no stop string ends it.",
        Kind.INTEGER, _GENERATING, bounds=_TOKENS, default=0, wire=Wire("optional uint32", 20),
    ),
    RequestField(
        "stop", OPENAI, "Strings that end an output, without being part of it.",
        Kind.STOP, _GENERATING, most_items=16, most_chars=1024, wire=Wire("repeated string", 11),
    ),
    RequestField(
        "stop_token_ids", VLLM, "Tokens that end an output; the model's own count among the 8.",
        Kind.TOKEN_IDS, _GENERATING, most_items=8, wire=Wire("repeated uint32", 10),
    ),
    RequestField(
        "ignore_eos", VLLM, "Continues past the model's end-of-sequence tokens.",
        Kind.FLAG, _GENERATING, default=False, wire=Wire("bool", 12),
    ),
    RequestField(
        "skip_special_tokens", VLLM, "Leaves special tokens out of the text.",
        Kind.FLAG, _GENERATING, default=True, wire=Wire("optional bool", 13),
    ),
    RequestField(
        "n", OPENAI, "Number of outputs for each prompt.",
        Kind.INTEGER, _CHOICES, bounds=_OUTPUTS, default=1, wire=Wire("optional uint32", 22),
    ),
    RequestField(
        "best_of", OPENAI, "Outputs are not ranked: the same number as n.",
        Kind.INTEGER, _COMPLETIONS, refused=_CHAT, neutral=(1,), bounds=_OUTPUTS,
    ),
    RequestField(
        "top_logprobs", OPENAI,
        "Reports this many of the likeliest tokens at each position, beside the drawn one.",
        Kind.INTEGER, _CHAT | _RESPONSES, bounds=_LOGPROBS,
    ),
    RequestField(
        "echo", OPENAI, "Begins the text with the prompt, and logprobs with those of its tokens.",
        Kind.FLAG, _COMPLETIONS, refused=_CHAT, neutral=(False,), default=False, wire=Wire("bool", 21),
    ),
    RequestField(
        "return_token_ids", VLLM, "Adds its token ids to each choice.",
        Kind.FLAG, _CHOICES, default=False,
    ),
    RequestField(
        "stream", OPENAI, "Sends tokens as server-sent events while they are generated.",
        Kind.FLAG, _GENERATING, default=False,
    ),
    RequestField(
        "stream_options", OPENAI, "Options of a stream, such as usage at its end.",
        Kind.OTHER, _GENERATING,
    ),
    RequestField(
        "include", OPENAI, "`message.output_text.logprobs` asks for logprobs.", Kind.OTHER, _RESPONSES,
    ),
    RequestField(
        "priority", VLLM, "Requests with lower ones are placed first; below 0 counts as 0.",
        Kind.INTEGER, _GENERATING, bounds=Bounds(-I64 - 1, I64, used=(-(2**31), 2**31 - 1)), default=0,
        wire=Wire("optional int32", 26),
    ),
    RequestField(
        "ttft_slo_ms", BATON,
        "Objective for the time to the first token in milliseconds; over HTTP a header.",
        Kind.FLOAT, wire=Wire("optional double", 24),
    ),
    RequestField(
        "tpot_slo_ms", BATON,
        "Objective for the mean time per output token after the first, in milliseconds; over HTTP a header.",
        Kind.FLOAT, wire=Wire("optional double", 25),
    ),
    RequestField(
        "max_draft_tokens", BATON,
        "Most draft tokens that a decode step verifies for an output, 0 for none; where unset as many as the "
        "worker does.",
        Kind.INTEGER, _GENERATING, bounds=Bounds(0, 7), wire=Wire("optional uint32", 29),
    ),
    RequestField(
        # The Responses API of OpenAI does not have it.
        "prediction", OPENAI,
        f"Text that the output is expected to contain, at most {MAX_PREDICTION_TOKENS:,} tokens; drafts are "
        "taken from it.",
        Kind.OTHER, _CHOICES, no_effect=_RESPONSES, wire=Wire("optional string", 30),
    ),
)  # fmt: skip

_GRAMMARS = (
    RequestField(
        "response_format", OPENAI, "JSON, or the JSON schema, that the output must match.",
        Kind.OBJECT, _CHOICES,
    ),
    RequestField(
        "text", OPENAI, "`format`: as response_format; `verbosity`: medium alone.", Kind.OTHER, _RESPONSES,
    ),
    RequestField(
        "structured_outputs", VLLM,
        "Grammar that the output must match: one of json, json_object, regex, choice, grammar.",
        Kind.OBJECT, _GENERATING,
    ),
    RequestField("guided_json", VLLM, "The JSON schema that the output must match.", Kind.OTHER, _CHOICES),
    RequestField("guided_regex", VLLM, "The regular expression that it must match.", Kind.TEXT, _CHOICES),
    RequestField("guided_choice", VLLM, "The texts of which it must be one.", Kind.TEXTS, _CHOICES),
    RequestField("guided_grammar", VLLM, "The grammar that it must match.", Kind.TEXT, _CHOICES),
    RequestField(
        "guided_whitespace_pattern", VLLM, "A regular expression of the white space between JSON tokens.",
        Kind.TEXT, _CHOICES,
    ),
)  # fmt: skip

_PROMPT = (
    RequestField(
        "prompt", OPENAI, "A text, token ids, or a list of either.", Kind.OTHER, _COMPLETIONS | _TOKENIZE,
    ),
    RequestField("messages", OPENAI, "The conversation.", Kind.OTHER, _CONVERSATION),
    RequestField("input", OPENAI, "A text, or the items of the conversation.", Kind.OTHER, _RESPONSES),
    RequestField("instructions", OPENAI, "A system message before the input.", Kind.TEXT, _RESPONSES),
    RequestField(
        "previous_response_id", OPENAI, "The stored response that this one continues.", Kind.TEXT, _RESPONSES,
    ),
    RequestField(
        # In a chat it asks that the conversation be kept for the provider's dashboard. Nothing is kept.
        "store", OPENAI, "Stores the response, on a router that stores responses.",
        Kind.FLAG, _RESPONSES, no_effect=_CHOICES, default=True,
    ),
    RequestField(
        "tools", OPENAI, "Tools that the model may call.", Kind.OTHER, _TEMPLATE, most_items=128,
    ),
    RequestField(
        "tool_choice", OPENAI, "Requires or forbids tool calls: none, auto, required, or one of the tools.",
        Kind.OTHER, _TEMPLATE,
    ),
    RequestField(
        "parallel_tool_calls", OPENAI, "Allows several calls where one is required.",
        Kind.FLAG, _CHAT | _RESPONSES, default=True,
    ),
    RequestField(
        "add_generation_prompt", VLLM,
        "Ends the prompt with the beginning of an assistant's message.",
        Kind.FLAG, _CONVERSATION, default=True,
    ),
    RequestField(
        "chat_template_kwargs", VLLM, "Further variables of the model's chat template.",
        Kind.OBJECT, _TEMPLATE, most_items=128,
    ),
    RequestField(
        "add_special_tokens", VLLM, "Adds the tokenizer's special tokens, such as BOS, to a text.",
        Kind.FLAG, _COMPLETIONS | _TOKENIZE, refused=_CHAT, neutral=(False,), default=True,
        wire=Wire("optional bool", 27),
    ),
    RequestField(
        "return_token_strs", VLLM, "Lists the tokens' texts too.", Kind.FLAG, _TOKENIZE,
        default=False,
    ),
    RequestField("tokens", VLLM, "The token ids whose text is asked for.", Kind.OTHER, _DETOKENIZE),
)  # fmt: skip


def _no_effect(source: str, *names: str) -> tuple[RequestField, ...]:
    return tuple(RequestField(name, source, no_effect=_GENERATING) for name in names)


def _refused(
    source: str, at: Endpoint = _GENERATING, **neutral: tuple[object, ...]
) -> tuple[RequestField, ...]:
    return tuple(RequestField(name, source, refused=at, neutral=values) for name, values in neutral.items())


_UNUSED = (
    *_no_effect(
        OPENAI, "metadata", "moderation", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "safety_identifier", "service_tier", "user",
    ),
    *_no_effect(
        VLLM, "guided_decoding_backend", "request_id", "session_id", "stream_interval", "watermarking",
    ),
    *_refused(
        OPENAI, access_programs=(), audio=(), background=(False,), context_management=([],), conversation=(),
        function_call=("none", "auto"), functions=([],), image=(), max_tool_calls=(), modalities=(["text"],),
        reasoning=({}, {"effort": None}, {"effort": "none"}), reasoning_effort=("none",), suffix=("",),
        truncation=("disabled",), verbosity=("medium",), web_search_options=(),
    ),
    *_refused(
        VLLM, allowed_token_ids=(), bad_words=([],), cache_salt=(), early_stopping=(False,),
        ec_transfer_params=({},), enable_response_messages=(False,), include_reasoning=(True,),
        include_stop_str_in_output=(False,), kv_transfer_params=({},), length_penalty=(1,),
        logits_processors=([],), logprob_token_ids=(), previous_input_messages=([],), prompt_embeds=(),
        prompt_logprobs=(), repetition_detection=(), return_prompt_text=(False,),
        return_token_offsets=(False,), return_tokens_as_token_ids=(False,), routed_experts_prompt_start=(0,),
        spaces_between_special_tokens=(True,), structural_tag=(), thinking_token_budget=(-1,),
        truncate_prompt_tokens=(), truncation_side=(), use_beam_search=(False,), vllm_xargs=({},),
    ),
    *_refused(
        VLLM, _GENERATING | _TOKENIZE, chat_template=(), continue_final_message=(False,), documents=([],),
        media_io_kwargs=({},), mm_processor_kwargs=({},),
    ),
)  # fmt: skip

FIELDS: tuple[RequestField, ...] = (*_SAMPLING, *_OUTPUT, *_GRAMMARS, *_PROMPT, *_UNUSED)
# Name → row.
BY_NAME: Mapping[str, RequestField] = {field.name: field for field in FIELDS}
# Field → the most items of its list or object.
MOST_ITEMS: Mapping[str, int] = {
    field.name: field.most_items for field in FIELDS if field.most_items is not None
}
# Fields that every API has under the same names, as numbers and flags that may be unset.
VALUES: tuple[RequestField, ...] = tuple(field for field in FIELDS if field.is_value)
# Fields that workers are given, in the order of `Sampling`; of these the numbers that can be off.
SAMPLING: tuple[RequestField, ...] = tuple(
    sorted(
        (field for field in FIELDS if field.wire is not None and field.wire.sampling is not None),
        key=lambda field: field.wire.sampling if field.wire is not None and field.wire.sampling else 0,
    )
)
SAMPLING_NUMBERS: tuple[RequestField, ...] = tuple(
    field for field in SAMPLING if field.is_value and field.default is not None
)
