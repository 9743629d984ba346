"""The typed client of Baton's gRPC API; needs neither torch nor Ray nor any part of the server.

    from baton.client import Client, Message

    with Client.connect("localhost:50051") as client:
        for delta in client.generate("Once upon a time", max_tokens=32, temperature=0.8):
            print(delta.text, end="", flush=True)
        answer = client.complete([Message("user", "Hello!")], max_tokens=32, n=2, seed=7)
        for choice in answer.choices:
            print(choice.index, choice.finish_reason, choice.text)
        print(answer.usage.total_tokens)

`AsyncClient` is the same with `await`, `async with` and `async for`. A prompt is a text, token ids or
messages. Closing a stream (or leaving its `with`) cancels its request at the server. With `tls=Tls(...)` the
connection is encrypted. Whatever fails raises `BatonError`, whose `kind`, `retryable` and `tokens_sent` show
how to handle it.

Imported by clients' programs, `services.cli` and `loadgen.targets`; it imports the wire and modules of
`baton`.
"""

from __future__ import annotations

from baton.base.errors import BatonError, ErrorKind, FieldError
from baton.client.asynchronous import AsyncClient, AsyncStream
from baton.client.request import Prompt, Sampling
from baton.client.synchronous import Client, Stream
from baton.client.tls import Tls
from baton.client.types import (
    Choice,
    Completion,
    Delta,
    FinishReason,
    Message,
    TokenLogprob,
    TokenLogprobs,
    Tool,
    ToolCall,
    ToolCallDelta,
    Trace,
    Usage,
)

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "BatonError",
    "Choice",
    "Client",
    "Completion",
    "Delta",
    "ErrorKind",
    "FieldError",
    "FinishReason",
    "Message",
    "Prompt",
    "Sampling",
    "Stream",
    "Tls",
    "TokenLogprob",
    "TokenLogprobs",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "Trace",
    "Usage",
]
