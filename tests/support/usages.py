"""What an OpenAI answer says of its tokens."""

from __future__ import annotations


def usage(prompt: int, completion: int, cached: int = 0) -> dict[str, object]:
    """The whole of `usage`."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
