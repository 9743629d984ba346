"""LlamaIndex's OpenAI classes: complete, chat, their streams, async."""

import asyncio
import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

url, model, _ = sys.argv[1:]
asked = {
    "model": model,
    "api_base": f"{url}/v1",
    "api_key": "unused",
    "temperature": 0.0,
    "max_tokens": 12,
    "context_window": 4096,
}
messages = [ChatMessage(role="user", content="What is Baton?")]

chat = OpenAILike(is_chat_model=True, **asked)
answer = chat.chat(messages).message.content
assert answer
assert "".join(part.delta or "" for part in chat.stream_chat(messages)) == answer
assert asyncio.run(chat.achat(messages)).message.content == answer
plain = OpenAILike(is_chat_model=False, **asked)
text = plain.complete("What is").text
assert text
assert "".join(part.delta or "" for part in plain.stream_complete("What is")) == text
print("chats, texts")
