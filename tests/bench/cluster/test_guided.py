"""`bench.cluster guided`: a vocabulary that masks can be made for, and a whole run on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from baton.v1.types_pb2 import Grammar, Limits
from bench.model_folders import write_tokenizer
from services.grammar.matcher import Matchers
from tests.grammar.model import open_grammar


def test_the_vocabulary_has_every_id_once(tmp_path: Path) -> None:
    config = {"vocab_size": 3000, "max_position_embeddings": 9, "eos_token_id": 2999}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_tokenizer(tmp_path, 3000, [2999])
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(3000))
    mask = open_grammar(Matchers.of_model(tmp_path), Grammar(regex="[a-z ]+"), Limits(), ()).mask()
    assert sum(int(word).bit_count() for word in mask) > 2000, "words, with a blank or without"


@pytest.mark.slow
def test_a_run_reports_every_figure() -> None:
    command = [
        sys.executable, "-m", "bench.cluster", "guided", "--shape", "tiny", "--device", "cpu",
        "--dtype", "fp32", "--streams", "4", "--output-len", "32", "--rounds", "1", "--json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (figures,) = map(json.loads, done.stdout.splitlines())
    assert figures["streams"] == 4
    assert all(value > 0 for name, value in figures.items() if name.startswith("tpot"))
