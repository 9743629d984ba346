"""KV in eight bits on a link between two engines: the demo model still finds what stands in its prompt; fewer
bytes travel. Its scores through clusters: tests/e2e/tokens/test_kv_wire.py."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from models.demo_training.conversation import RowMaker
from models.demo_training.evaluate import DEMO_MODEL
from models.demo_training.exam import retrieval
from services.common.config.transfer import KVWire, Transport
from tests.worker.engine.engine_pair import BLOCK, Pair

QUESTIONS, CONTEXT, MOST = 2, 200, 20
ENGINE: dict[str, Any] = {"checkpoint": DEMO_MODEL, "chunk_tokens": 64, "kv_blocks": 2 * CONTEXT // BLOCK}


@pytest.mark.parametrize(("kv_wire", "transport"), [("int8", "grpc"), ("fp8", "ipc")])
def test_answers_are_right_and_bytes_are_fewer(tmp_path: Path, kv_wire: KVWire, transport: Transport) -> None:
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    maker, ask, draw = RowMaker(tokenizer), retrieval(CONTEXT), random.Random(f"wire/{kv_wire}")
    both: dict[str, Any] = {"transport": transport, "kv_wire": kv_wire, **ENGINE}
    blocks = 0
    with contextlib.closing(Pair(tmp_path, source=both, **both)) as pair:
        for _ in range(QUESTIONS):
            turn = ask(draw)
            prompt = list(maker.prompt(turn.question))
            tokens, request = pair.generate(prompt, MOST)
            # A router's limits would end it there.
            answer = tokens[: tokens.index(config["eos_token_id"])]
            assert turn.right(tokenizer.decode(answer)), turn.answer
            blocks += -(-len(prompt) // BLOCK) - request.resident
        sent = pair.source.engine.prefill.sender.counters
        rows = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * BLOCK
        # A byte an element and a scale, in place of four bytes.
        assert pair.block_bytes == rows * config["head_dim"] * 4
        assert sent.bytes_shipped == blocks * rows * (config["head_dim"] + 4)
        assert pair.report().bytes_received == sent.bytes_shipped
        pair.assert_free()
