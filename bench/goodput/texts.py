"""Text that repeats itself under load: prompts that are chains (`bench.markov_text`), and the model that
continues them.

Answers of such a model repeat themselves as often as their prompts do, so that drafts by lookup are right at
a known rate. A part of the requests may ask for text that does not: at a temperature of 2 the model's next
token is the successor of the one before in one of six cases, and any of the cycle in most others.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bench.goodput.arms import Workload
from bench.markov_text import chain, chance_of, cycle_of
from bench.model_folders import write_word_tokenizer
from bench.shapes import SHAPES

REPEATS, NEW = "repeats", "new"
"""The classes of requests, where there are two."""
_NEW_TEMPERATURE = 2.0
# Prompts beside those that arrive on average: of the warm-up, and of a run that has more arrivals than most.
_MORE, _MORE_SHARE = 500, 0.25
# A checkpoint of 16 GB on a slow disk.
_WRITTEN_S = 600.0


@dataclass(frozen=True, slots=True)
class RepeatingText:
    """`chance`: that a token is followed by its successor. `new_share`: of requests that ask for text which
    does not repeat itself. `ids`: of the cycle."""

    chance: float
    new_share: float
    ids: int

    @classmethod
    def of(cls, arguments: argparse.Namespace, workloads: Iterable[Workload]) -> RepeatingText | None:
        """Reads what `add_text_options` added; None without --text. Raises ValueError, also for a workload
        whose prompts are not of one length."""
        if not arguments.text:
            return None
        for workload in workloads:
            _ = workload.prompt_tokens
        if not 0 <= arguments.new_share < 1:
            raise ValueError(f"--new-share is a share below 1, not {arguments.new_share:g}")
        hidden = SHAPES[arguments.shape].config["hidden_size"]
        return cls(chance_of(arguments.text), arguments.new_share, cycle_of(hidden))

    def write_prompts(self, path: Path, length: int, arrivals: float, seed: int) -> list[str]:
        """Writes prompts of `length` tokens for that many arrivals on average, each another text, and returns
        the words of `loadgen run` for them."""
        with path.open("w") as file:
            for number in range(math.ceil(arrivals * (1 + _MORE_SHARE)) + _MORE):
                tokens = chain(self.chance, length, seed=(seed << 32) + number, ids=self.ids)
                file.write(json.dumps({"prompt": tokens}) + "\n")
        words = ["--prompts", str(path), "--temperature", "1"]
        if self.new_share:
            shares = {REPEATS: 1 - self.new_share, NEW: self.new_share}
            temperatures = {REPEATS: 1.0, NEW: _NEW_TEMPERATURE}
            for name, share in shares.items():
                words += ["--class", name, f"weight:{share:g}", f"temperature:{temperatures[name]:g}"]
        return words

    def write_model(self, folder: Path, shape: str, dtype: str, device: str) -> Path:
        """Writes a checkpoint that draws such text at temperature 1, with a tokenizer, by a process of its
        own, which leaves no memory on the GPU. Raises subprocess.SubprocessError."""
        command = [
            sys.executable, "-m", "bench.markov_text", str(folder), "--shape", shape, "--dtype", dtype,
            "--text", f"markov:{self.chance:g}", "--device", device,
        ]  # fmt: skip
        subprocess.run(command, check=True, timeout=_WRITTEN_S)
        write_word_tokenizer(folder)
        return folder


def model_of(text: RepeatingText | None, arguments: argparse.Namespace, folder: Path) -> Path | None:
    """Writes the model of a text for all arms into `folder`; None where there is no text."""
    if text is None:
        return None
    return text.write_model(folder / "model", arguments.shape, arguments.dtype, arguments.device)


def add_text_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options --text and --new-share."""
    parser.add_argument(
        "--text", default="", metavar="markov:P", help="prompts and answers that repeat themselves"
    )
    parser.add_argument(
        "--new-share", default=0.0, type=float, help="with --text: share of requests for text that does not"
    )
