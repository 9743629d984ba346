"""Generates a small random checkpoint with a byte-level tokenizer, for tests and demos.

Llama architecture, 3.3 million float32 weights, 4096 tokens of context. Its output is noise in which letters
are more likely than other bytes, so that it is readable. Deterministic and torch-free.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

# Part of the folder's name: increase it with any change of the files.
REVISION = 2
SEED = 20_260_101

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 256, 688, 4, 4, 2, 64, 4096
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
BOS, EOS, END = 256, 257, 261
VOCAB = 256 + len(SPECIAL_TOKENS)

# In order of probability; other bytes are hardly ever sampled.
LIKELY_BYTES = b" etaoinshrdlucmfwypvbgk,."
# A hidden channel that no layer writes, so that lm_head's weight for it acts as a bias of each token.
CONSTANT_CHANNEL, CONSTANT = 0, 8.0
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

Weights = dict[str, npt.NDArray[np.float32]]


def cache_folder() -> Path:
    """Returns the folder of cached checkpoints: `$XDG_CACHE_HOME/baton`, else `~/.cache/baton`."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "baton"


def random_checkpoint(parent: Path | None = None) -> Path:
    """The checkpoint's folder under `parent` (by default the user's cache), generated if it does not exist.

    It is created atomically, so that several processes may call this concurrently.
    """
    parent = parent or cache_folder()
    folder = parent / f"random-llama-{REVISION}"
    if folder.is_dir():
        return folder
    parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=parent))
    try:
        _write(draft)
        draft.chmod(0o755)
        draft.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process has created it
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _write(folder: Path) -> None:
    from safetensors.numpy import save_file

    for name, content in (
        ("config.json", _config()),
        ("generation_config.json", {"bos_token_id": BOS, "eos_token_id": [EOS, END], "do_sample": True}),
        ("tokenizer_config.json", _tokenizer_config()),
        ("tokenizer.json", _tokenizer()),
    ):
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    save_file(_weights(), folder / "model.safetensors", metadata={"format": "pt"})


def _config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        "bos_token_id": BOS,
        "eos_token_id": [EOS, END],
    }


def _tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _tokenizer() -> dict[str, object]:
    """A tokenizer whose token ids are byte values, followed by special tokens; no merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS]
    )
    content: dict[str, object] = json.loads(tokenizer.to_str())
    return content


def _byte_characters() -> list[str]:
    """The character of each byte in a byte-level vocabulary (GPT-2): printable Latin-1 characters represent
    themselves, other bytes the code points from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + hidden.index(byte)) for byte in range(256)]


def _weights() -> Weights:
    random = np.random.default_rng(SEED)

    def matrix(rows: int, columns: int) -> npt.NDArray[np.float32]:
        """Random weights scaled so that a normalised input row gives an output row of about unit variance."""
        return np.asarray(random.standard_normal((rows, columns)) / np.sqrt(columns), np.float32)

    ones = np.ones(HIDDEN, np.float32)
    weights = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN) * np.sqrt(np.float32(HIDDEN)),
        "model.norm.weight": ones,
        "lm_head.weight": matrix(VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        weights[prefix + "input_layernorm.weight"] = ones
        weights[prefix + "post_attention_layernorm.weight"] = ones
        for name, rows, columns in _MATRICES:
            weights[prefix + name] = matrix(rows, columns)
            if name in _WRITERS:
                weights[prefix + name][CONSTANT_CHANNEL] = 0
    weights["model.embed_tokens.weight"][:, CONSTANT_CHANNEL] = CONSTANT
    _prefer_likely_bytes(weights["lm_head.weight"])
    return weights


_MATRICES = (
    ("self_attn.q_proj.weight", HEADS * HEAD_DIM, HIDDEN),
    ("self_attn.k_proj.weight", KV_HEADS * HEAD_DIM, HIDDEN),
    ("self_attn.v_proj.weight", KV_HEADS * HEAD_DIM, HIDDEN),
    ("self_attn.o_proj.weight", HIDDEN, HEADS * HEAD_DIM),
    ("mlp.gate_proj.weight", INTERMEDIATE, HIDDEN),
    ("mlp.up_proj.weight", INTERMEDIATE, HIDDEN),
    ("mlp.down_proj.weight", HIDDEN, INTERMEDIATE),
)


# The matrices whose output is added to the hidden state.
_WRITERS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def _prefer_likely_bytes(head: npt.NDArray[np.float32]) -> None:
    """Raises the logits of likely bytes above all others, in order of likelihood."""
    head[:, CONSTANT_CHANNEL] = -2.0
    for rank, byte in enumerate(LIKELY_BYTES):
        head[byte] *= 1.5
        head[byte, CONSTANT_CHANNEL] = 1.0 - 0.02 * rank
