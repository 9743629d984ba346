"""JSON schemas of the HTTP API's answers."""

from __future__ import annotations

from collections.abc import Mapping

from services.router.formats.openai.body_schemas import REFERENCES, Schema

_STRING: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_IDS: Schema = {"type": "array", "items": _COUNT}
_FINISH: Schema = {"enum": ["stop", "length", None]}
_CHAT_FINISH: Schema = {"enum": ["stop", "length", "tool_calls", None]}
_NULLABLE: Schema = {"type": ["string", "null"]}


def _object(required: Mapping[str, Schema], **optional: Schema) -> Schema:
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


def _is(value: str) -> Schema:
    return {"const": value}


def _is_bool(*, value: bool) -> Schema:
    return {"const": value}


def _reference(name: str) -> Schema:
    return {"$ref": REFERENCES + name}


def _many(name: str) -> Schema:
    return {"type": "array", "items": _reference(name)}


def _or_null(name: str) -> Schema:
    return {"anyOf": [_reference(name), {"type": "null"}]}


def _completion(kind: str, choice: str, usage: Schema, *, whole: bool) -> Schema:
    required = {
        "id": _STRING,
        "object": _is(kind),
        "created": _COUNT,
        "model": _STRING,
        "system_fingerprint": {"type": "null"},
        "choices": _many(choice),
    }
    return _object({**required, "usage": usage}) if whole else _object(required, usage=usage)


# By name, for `components/schemas`.
ANSWERS: Mapping[str, Schema] = {
    "Error": _object(
        {"error": _object({"message": _STRING, "type": _STRING, "param": _NULLABLE, "code": _NULLABLE})}
    ),
    "State": _object({"status": _STRING}, reason=_STRING),
    "Version": _object({"version": _STRING}),
    "Model": _object(
        {
            "id": _STRING,
            "object": _is("model"),
            "created": _COUNT,
            "owned_by": _STRING,
            "root": _STRING,
            "parent": {"type": "null"},
            "max_model_len": _COUNT,
            "vocab_size": _COUNT,
        }
    ),
    "ModelList": _object({"object": _is("list"), "data": _many("Model")}),
    "Tokens": _object(
        {
            "count": _COUNT,
            "max_model_len": _COUNT,
            "tokens": _IDS,
            "token_strs": {"type": ["array", "null"], "items": _STRING},
        }
    ),
    "Text": _object({"prompt": _STRING}),
    "Usage": _object(
        {
            "prompt_tokens": _COUNT,
            "completion_tokens": _COUNT,
            "total_tokens": _COUNT,
            "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
        },
        completion_tokens_details=_object(
            {},
            # Of a chat whose output may begin with reasoning.
            reasoning_tokens=_COUNT,
            # Of a request with a prediction.
            accepted_prediction_tokens=_COUNT,
            rejected_prediction_tokens=_COUNT,
        ),
    ),
    "Completion": _completion("text_completion", "CompletionChoice", _or_null("Usage"), whole=False),
    "CompletionChoice": _object(
        {
            "index": _COUNT,
            "text": _STRING,
            "logprobs": {"type": ["object", "null"]},
            "finish_reason": _FINISH,
        },
        token_ids=_IDS,
    ),
    "ChatCompletion": _completion("chat.completion", "ChatChoice", _reference("Usage"), whole=True),
    "ChatChoice": _object(
        {
            "index": _COUNT,
            "message": _object(
                {"role": _is("assistant"), "content": _NULLABLE, "refusal": {"type": "null"}},
                reasoning_content=_STRING,
                tool_calls=_many("ToolCall"),
            ),
            "logprobs": {"type": ["object", "null"]},
            "finish_reason": _CHAT_FINISH,
        },
        token_ids=_IDS,
    ),
    "ToolCall": _object(
        {
            "id": _STRING,
            "type": _is("function"),
            "function": _object({"name": _STRING, "arguments": _STRING}),
        }
    ),
    "ToolCallDelta": _object(
        {"index": _COUNT, "function": _object({"arguments": _STRING}, name=_STRING)},
        id=_STRING,
        type=_is("function"),
    ),
    "ChatCompletionChunk": _completion(
        "chat.completion.chunk", "ChatChunkChoice", _or_null("Usage"), whole=False
    ),
    "ChatChunkChoice": _object(
        {
            "index": _COUNT,
            "delta": _object(
                {},
                role=_is("assistant"),
                content=_STRING,
                reasoning_content=_STRING,
                tool_calls=_many("ToolCallDelta"),
            ),
            "logprobs": {"type": ["object", "null"]},
            "finish_reason": _CHAT_FINISH,
        },
        token_ids=_IDS,
    ),
    "Response": _object(
        {
            "id": _STRING,
            "object": _is("response"),
            "created_at": _COUNT,
            "completed_at": {"type": ["integer", "null"]},
            "status": {"enum": ["in_progress", "completed", "incomplete", "failed"]},
            "background": _is_bool(value=False),
            "error": {"anyOf": [_object({"code": _STRING, "message": _STRING}), {"type": "null"}]},
            "incomplete_details": {"anyOf": [_object({"reason": _STRING}), {"type": "null"}]},
            "instructions": _NULLABLE,
            "max_output_tokens": {"type": ["integer", "null"]},
            "max_tool_calls": {"type": "null"},
            "model": _STRING,
            "output": {
                "type": "array",
                "items": {
                    "anyOf": [
                        _reference("ResponseMessage"),
                        _reference("ResponseFunctionCall"),
                        _reference("ResponseReasoning"),
                    ]
                },
            },
            "parallel_tool_calls": {"type": "boolean"},
            "previous_response_id": _NULLABLE,
            "reasoning": {"type": "object"},
            "service_tier": _STRING,
            "store": {"type": "boolean"},
            "temperature": {"type": "number"},
            "text": {"type": "object"},
            "tool_choice": {"type": ["string", "object"]},
            "tools": {"type": "array", "items": {"type": "object"}},
            "top_logprobs": _COUNT,
            "top_p": {"type": "number"},
            "truncation": _is("disabled"),
            "usage": _or_null("ResponseUsage"),
            "user": {"type": "null"},
            "metadata": {"type": "object"},
        }
    ),
    "DeletedResponse": _object({"id": _STRING, "object": _is("response"), "deleted": _is_bool(value=True)}),
    "ResponseItems": _object(
        {
            "object": _is("list"),
            "data": _many("ResponseItem"),
            "first_id": _NULLABLE,
            "last_id": _NULLABLE,
            "has_more": {"type": "boolean"},
        }
    ),
    "ResponseItem": {
        **_object(
            {
                "id": _STRING,
                "type": {"enum": ["message", "function_call", "function_call_output", "reasoning"]},
            }
        ),
        "additionalProperties": True,
    },
    "ResponseMessage": _object(
        {
            "id": _STRING,
            "type": _is("message"),
            "status": {"enum": ["in_progress", "completed", "incomplete"]},
            "role": _is("assistant"),
            "content": _many("ResponseText"),
        }
    ),
    "ResponseFunctionCall": _object(
        {
            "id": _STRING,
            "type": _is("function_call"),
            "status": {"enum": ["in_progress", "completed", "incomplete"]},
            "call_id": _STRING,
            "name": _STRING,
            "arguments": _STRING,
        }
    ),
    "ResponseReasoning": _object(
        {
            "id": _STRING,
            "type": _is("reasoning"),
            "status": {"enum": ["in_progress", "completed", "incomplete"]},
            "summary": {"type": "array", "maxItems": 0},
            "content": {
                "type": "array",
                "items": _object({"type": _is("reasoning_text"), "text": _STRING}),
            },
        }
    ),
    "ResponseText": _object(
        {
            "type": _is("output_text"),
            "text": _STRING,
            "annotations": {"type": "array", "maxItems": 0},
            "logprobs": {"type": "array", "items": {"type": "object"}},
        }
    ),
    "ResponseUsage": _object(
        {
            "input_tokens": _COUNT,
            "input_tokens_details": _object({"cached_tokens": _COUNT, "cache_write_tokens": _COUNT}),
            "output_tokens": _COUNT,
            "output_tokens_details": _object({"reasoning_tokens": _COUNT}),
            "total_tokens": _COUNT,
        }
    ),
    "ResponseEvent": {
        **_object({"type": _STRING, "sequence_number": _COUNT}),
        "additionalProperties": True,
    },
}
