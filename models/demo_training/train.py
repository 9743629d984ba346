"""Trains the demo model: one GPU, or a CPU for the smoke test.

    python -m models.demo_training.train --out DIR                     all at once
    python -m models.demo_training.train --state DIR --seconds 480     a first half: keeps its state
    python -m models.demo_training.train --state DIR --out DIR         goes on from there to the end
    python -m models.demo_training.train --recipe smoke --out DIR      on a CPU: the loss falls

Progress goes to stderr. --out becomes a checkpoint like baton/demo_model, with the loss curve beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer

from models.demo_training import state
from models.demo_training.batches import Batch, BatchSource
from models.demo_training.conversation import RowMaker
from models.demo_training.recipe import RECIPES, Recipe
from models.demo_training.trainer import Trainer

TOKENIZER = Path(__file__).parents[2] / "baton" / "demo_model"
REPORT_STEPS, EXAM_STEPS, EXAM_QUESTIONS = 50, 500, 64
_WATCHED = ("retrieve-1000", "retrieve-3000", "copy", "arithmetic")


def train(trainer: Trainer, data: Iterator[Batch], maker: RowMaker, seconds: float) -> bool:
    """Steps until the plan's end (True), or at a report until `seconds` are over (False)."""
    plan, progress = trainer.recipe.plan, trainer.progress
    before, began = progress.seconds, time.monotonic()
    progress.devices.append(_device_name(trainer.device))
    for batch in data:
        trainer.step(batch)
        if progress.steps % REPORT_STEPS and progress.steps < plan.steps:
            continue
        loss, answer_loss = trainer.take_losses()
        progress.seconds = before + time.monotonic() - began
        point = {
            "step": progress.steps,
            "seconds": progress.seconds,
            "loss": loss,
            "answer_loss": answer_loss,
        }
        if progress.steps % EXAM_STEPS == 0:
            point |= {part: trainer.exactness(maker, part, EXAM_QUESTIONS) for part in _WATCHED}
        progress.curve.append(point)
        _say(point)
        if progress.seconds - before > seconds:
            break
    return progress.steps >= plan.steps


def run(recipe: Recipe, arguments: argparse.Namespace) -> bool:
    """Trains as the command line says; returns True if the plan is done. ValueError if the state is of
    another recipe.

    ValueError where the state is of another recipe.
    """
    tokenizer_file = TOKENIZER / "tokenizer.json"
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    with BatchSource(recipe.plan, tokenizer_file, arguments.workers) as source:
        trainer = Trainer(recipe, device, compiled=device.type == "cuda")
        if arguments.state and (arguments.state / "state.json").is_file():
            trainer.progress = state.restore(
                arguments.state, trainer.network, trainer.optimizer, recipe.settings
            )
        maker = RowMaker(Tokenizer.from_file(str(tokenizer_file)))
        done = train(trainer, source.batches(trainer.progress.steps), maker, arguments.seconds)
    if arguments.state:
        state.save(arguments.state, trainer.network, trainer.optimizer, trainer.progress)
    if arguments.out and done:
        state.export(arguments.out, trainer.network, maker.special_ids, trainer.progress)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(TOKENIZER / name, arguments.out / name)
    _say({"done": done, "steps": trainer.progress.steps, "seconds": trainer.progress.seconds})
    return done


def main() -> int:
    """Trains and returns 0, whether the run is done or was stopped at its time."""
    parser = argparse.ArgumentParser(description="Trains Baton's demo model.")
    parser.add_argument("--recipe", choices=RECIPES, default="full")
    parser.add_argument("--state", type=Path, help="folder to go on from, and to keep the state in")
    parser.add_argument("--out", type=Path, help="folder for the checkpoint")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="seconds after which to stop, in this call"
    )
    parser.add_argument("--device", help="default: cuda if there is one")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="make data")
    arguments = parser.parse_args()
    if not (arguments.state or arguments.out):
        parser.error("--state or --out: else nothing is kept")
    run(RECIPES[arguments.recipe], arguments)
    return 0


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _say(fields: dict[str, float]) -> None:
    print(json.dumps({name: round(value, 4) for name, value in fields.items()}), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
