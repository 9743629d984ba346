"""Draws the number of workers over a step of the load.

python -m tests.scaling.plot        writes docs/images/scaling-step.svg
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.scaling.scenarios import STEP_OVER, chart, former, needed, outcome, rates

TARGET = Path(__file__).parents[2] / "docs" / "images" / "scaling-step.svg"
_WIDTH, _HEIGHT, _LEFT, _TOP, _MOST = 640.0, 220.0, 40.0, 20.0, 14
_FOUND = "font-family='sans-serif' font-size='12'"
Steps = Sequence[tuple[float, int]]


def _line(steps: Steps, color: str, dashes: str = "") -> str:
    points, last = [], None
    for at, number in [*steps, (STEP_OVER, steps[-1][1])]:
        x = _LEFT + at / STEP_OVER * _WIDTH
        if last is not None:
            points.append(f"{x:.1f},{_y(last):.1f}")
        points.append(f"{x:.1f},{_y(number):.1f}")
        last = number
    dashed = f" stroke-dasharray='{dashes}'" if dashes else ""
    return f"<polyline fill='none' stroke='{color}' stroke-width='2'{dashed} points='{' '.join(points)}'/>"


def _y(number: float) -> float:
    return _TOP + _HEIGHT * (1 - number / _MOST)


def _text(x: float, y: float, text: str, color: str = "#666") -> str:
    return f"<text x='{x:.0f}' y='{y:.0f}' fill='{color}' {_FOUND}>{text}</text>"


def drawing() -> str:
    """The drawing, of prefill workers that take 120 s to start."""
    rate = rates("step", "prefill")[0]
    known = [(float(at), needed("prefill", rate(float(at)))) for at in range(0, int(STEP_OVER), 15)]
    lines = [
        _line(known, "#888", "4 3"),
        _line(outcome("step", "prefill", 120.0, chart).run.changes, "#1668b8"),
        _line(outcome("step", "prefill", 120.0, former).run.changes, "#c0392b"),
    ]
    marks = [_text(12, _y(number) + 4, str(number)) for number in range(0, _MOST + 1, 2)]
    marks += [
        _text(_LEFT + at / STEP_OVER * _WIDTH - 8, _TOP + _HEIGHT + 18, f"{at // 60} min")
        for at in range(0, int(STEP_OVER) + 1, 600)
    ]
    names = [
        _text(450, 32, "needed", "#888"),
        _text(450, 48, "chart 0.2.0", "#1668b8"),
        _text(450, 64, "chart 0.1.0", "#c0392b"),
    ]
    size = f"width='{_LEFT + _WIDTH + 20:.0f}' height='{_TOP + _HEIGHT + 30:.0f}'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' {size}>"
    return "\n".join(
        [head, "<rect width='100%' height='100%' fill='white'/>", *marks, *lines, *names, "</svg>", ""]
    )


if __name__ == "__main__":
    TARGET.write_text(drawing(), encoding="utf-8")
