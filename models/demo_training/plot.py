"""Draws a run's losses and exact answers over its steps.

python -m models.demo_training.plot models/demo_training/shipped_run.json baton/demo_model/loss.png
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

_LOSSES = {"loss": "weighted loss", "answer_loss": "loss of an answer's token"}


def draw(run: Path, picture: Path) -> None:
    """Draws the picture of `run`, a checkpoint's training.json; its format is its suffix."""
    curve: list[dict[str, float]] = json.loads(run.read_text("utf-8"))["curve"]
    figure, (above, below) = plt.subplots(
        2, 1, sharex=True, figsize=(7, 5.5), height_ratios=(3, 2), layout="constrained"
    )
    for name, label in _LOSSES.items():
        above.plot([point["step"] for point in curve], [point[name] for point in curve], label=label)
    above.set_yscale("log")
    above.set_ylabel("nats a token, means of 50 steps")
    exams = [point for point in curve if "copy" in point]
    for part in sorted(exams[0].keys() - {"step", "seconds", *_LOSSES}):
        shares = [100 * point[part] for point in exams]
        below.plot([point["step"] for point in exams], shares, marker=".", label=part)
    below.set_ylabel("% exact of 64")
    below.set_xlabel("steps")
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(picture, dpi=110)


def main() -> int:
    """Draws the picture and returns 0."""
    parser = argparse.ArgumentParser(description="Draws a run's losses and exact answers over its steps.")
    parser.add_argument("run", type=Path, help="training.json of a checkpoint")
    parser.add_argument("picture", type=Path, help="file to write; its suffix is its format")
    arguments = parser.parse_args()
    draw(arguments.run, arguments.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
