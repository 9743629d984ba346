"""Loaded by schemathesis, in its own environment: what the document cannot say, so that most valid requests
run. A body is changed only where that keeps it valid or invalid."""

import copy
import os

import schemathesis

# A longer name violates the schema, which may be what a case is about.
_MAX_MODEL_CHARS = 1024
# Tokens of an output.
_MANY = 8
# Fields whose random values are mostly without meaning.
_MEANINGLESS = ("response_format", "structured_outputs", "guided_json", "guided_grammar", "guided_regex")


@schemathesis.hook
def before_call(context, case, kwargs):  # noqa: ANN001, ANN201
    """Changes the body; half of the reads are of the response that is stored."""
    if isinstance(case.body, dict):
        case.body = _served(case.body)
    given = str((case.path_parameters or {}).get("response_id", ""))
    if case.method == "GET" and len(given) % 2:
        case.path_parameters["response_id"] = os.environ["STORED_RESPONSE"]


def _served(body):  # noqa: ANN001, ANN202
    changed = copy.deepcopy(body)
    model = changed.get("model")
    if isinstance(model, str) and len(model) <= _MAX_MODEL_CHARS:
        changed["model"] = "fake"
    for name in _MEANINGLESS:
        if isinstance(changed.get(name), dict | str):
            del changed[name]
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if isinstance(changed.get(name), int) and changed[name] > _MANY:
            changed[name] = _MANY
    for message in changed["messages"] if isinstance(changed.get("messages"), list) else ():
        if isinstance(message, dict) and message.get("content", "") in ("", None):
            message["content"] = "a"
    if changed.get("input") in ("", []):
        changed["input"] = "a"
    for item in changed["input"] if isinstance(changed.get("input"), list) else ():
        if isinstance(item, dict) and item.get("type", "message") == "message":
            item.setdefault("role", "user")
            item.setdefault("content", "a")
    return changed
