"""Draws charts as SVG without a library or script.

Colours are classes of the page's style, so that charts follow its light and dark theme.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from loadgen.common.formatting import number
from loadgen.reports.scales import Scale

WIDTH, HEIGHT = 560, 290
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 14, 42, 44
# The legend: a letter's width, the space of an entry beside its letters, the height of a line.
_LETTER, _LEGEND_GAP, _LEGEND_LINE = 7.0, 24, 16
Points = Sequence[tuple[float, float]]


@dataclass
class Chart:
    """Draws axes first, then marks in call order; `render` returns the SVG."""

    title: str
    x: Scale
    y: Scale
    x_label: str
    y_label: str
    height: int = HEIGHT
    _marks: list[str] = field(default_factory=list)
    _legend: list[tuple[str, str]] = field(default_factory=list)

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Converts a point to its position in pixels."""
        return (
            _LEFT + self.x.place(x) * (WIDTH - _LEFT - _RIGHT),
            self.height - _BOTTOM - self.y.place(y) * (self.height - _TOP - _BOTTOM),
        )

    def line(self, points: Points, style: str, label: str = "", *, steps: bool = False) -> None:
        """Draws a line through all points; with `steps` each value extends to the next."""
        if not points:
            return
        places = [self.at(x, y) for x, y in points]
        path = f"M{places[0][0]:.1f},{places[0][1]:.1f}"
        for x, y in places[1:]:
            path += f"H{x:.1f}V{y:.1f}" if steps else f"L{x:.1f},{y:.1f}"
        self._marks.append(f'<path class="line {style}" d="{path}"/>')
        self._name(style, label)

    def dots(
        self, points: Points, style: str, label: str = "", *, radius: float = 2.0, titles: Sequence[str] = ()
    ) -> None:
        """Draws one dot per point; a title is shown on hover."""
        for place, (x, y) in enumerate(points):
            left, top = self.at(x, y)
            title = f"<title>{escape(titles[place])}</title>" if titles else ""
            self._marks.append(
                f'<circle class="dot {style}" cx="{left:.1f}" cy="{top:.1f}" r="{radius:g}">{title}</circle>'
            )
        if points:
            self._name(style, label)

    def whiskers(self, ranges: Sequence[tuple[float, float, float]], style: str) -> None:
        """Draws vertical lines (x, low, high)."""
        for x, low, high in ranges:
            left, bottom = self.at(x, low)
            _, top = self.at(x, high)
            self._marks.append(
                f'<path class="whisker {style}" d="M{left:.1f},{bottom:.1f}V{top:.1f}'
                f'M{left - 4:.1f},{bottom:.1f}h8M{left - 4:.1f},{top:.1f}h8"/>'
            )

    def bar(self, since: float, until: float, low: float, high: float, style: str, title: str = "") -> None:
        """Draws a filled rectangle, in values."""
        left, top = self.at(since, high)
        right, bottom = self.at(until, low)
        words = f"<title>{escape(title)}</title>" if title else ""
        self._marks.append(_rect(f"bar {style}", left, top, right - left, bottom - top, words))

    def shade(self, since: float, until: float, label: str = "") -> None:
        """Draws a background band of full height."""
        left, _ = self.at(since, self.y.low)
        right, _ = self.at(until, self.y.low)
        self._marks.append(_rect("shade", left, _TOP, right - left, self.height - _TOP - _BOTTOM))
        self._name("shade", label)

    def upright(self, x: float, style: str, label: str, *, at_bottom: bool = False) -> None:
        """Draws a labelled dashed vertical line."""
        left, _ = self.at(x, self.y.low)
        self._marks.append(f'<path class="mark {style}" d="M{left:.1f},{_TOP}V{self.height - _BOTTOM}"/>')
        near_end = left > WIDTH * 0.7
        anchor, shift = ("end", -4) if near_end else ("start", 4)
        height = self.height - _BOTTOM - 6 if at_bottom else _TOP + 11
        self._marks.append(_text("note", left + shift, height, label, anchor))

    def level(self, y: float, style: str, label: str) -> None:
        """Draws a labelled dashed horizontal line."""
        left, top = self.at(self.x.low, y)
        self._marks.append(f'<path class="mark {style}" d="M{left:.1f},{top:.1f}H{WIDTH - _RIGHT}"/>')
        below = top < _TOP + 16
        self._marks.append(_text("note", WIDTH - _RIGHT - 3, top + (13 if below else -4), label, "end"))

    def name(self, style: str, label: str) -> None:
        """Adds an entry to the legend."""
        self._name(style, label)

    def render(self) -> str:
        """Returns the chart as SVG text."""
        # Further lines of the legend stand above the picture, and push the title up.
        more = _LEGEND_LINE * max(0, len(self._legend_lines()) - 1)
        return (
            f'<svg viewBox="0 {-more} {WIDTH} {self.height + more}" role="img" '
            f'aria-label="{escape(self.title)}">'
            f'<text x="0" y="{14 - more}"><tspan class="title">{escape(self.title)}</tspan>'
            f'<tspan dx="8">{escape(self.y_label)}</tspan></text>'
            f"{self._axes()}{''.join(self._marks)}{self._names()}</svg>"
        )

    def _axes(self) -> str:
        parts: list[str] = []
        bottom = self.height - _BOTTOM
        for tick in self.y.ticks(5):
            left, top = self.at(self.x.low, tick)
            parts.append(f'<path class="grid" d="M{left:.1f},{top:.1f}H{WIDTH - _RIGHT}"/>')
            parts.append(_text("tick", _LEFT - 6, top + 4, _short(tick), "end"))
        for tick in self.x.ticks(7):
            left, _ = self.at(tick, self.y.low)
            parts.append(f'<path class="grid" d="M{left:.1f},{_TOP}V{bottom}"/>')
            parts.append(_text("tick", left, bottom + 16, _short(tick), "middle"))
        parts.append(f'<path class="axis" d="M{_LEFT},{_TOP}V{bottom}H{WIDTH - _RIGHT}"/>')
        parts.append(_text("label", (_LEFT + WIDTH - _RIGHT) / 2, self.height - 8, self.x_label, "middle"))
        return "".join(parts)

    def _names(self) -> str:
        """The legend, right-aligned below the title."""
        parts: list[str] = []
        for above, line in enumerate(reversed(self._legend_lines())):
            right, y = float(WIDTH - _RIGHT), _TOP - 8 - above * _LEGEND_LINE
            for style, label in reversed(line):
                right -= _LETTER * len(label)
                parts.append(_text("note", right, y, label, "start"))
                parts.append(_rect(f"bar {style}", right - 14, y - 9, 10, 10))
                right -= _LEGEND_GAP
        return "".join(parts)

    def _legend_lines(self) -> list[list[tuple[str, str]]]:
        """The entries of the legend, as many a line as fit."""
        lines: list[list[tuple[str, str]]] = [[]]
        left = room = float(WIDTH - _RIGHT)
        for style, label in self._legend:
            width = _LETTER * len(label) + _LEGEND_GAP
            if lines[-1] and width > left:
                lines.append([])
                left = room
            lines[-1].append((style, label))
            left -= width
        return lines

    def _name(self, style: str, label: str) -> None:
        if label:
            self._legend.append((style, label))


def _text(style: str, x: float, y: float, words: str, anchor: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _rect(style: str, x: float, y: float, width: float, height: float, inside: str = "") -> str:
    size = f'width="{max(0.5, width):.1f}" height="{max(0.0, height):.1f}"'
    return f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" {size}>{inside}</rect>'


def _short(value: float) -> str:
    """A tick label: 1500 is 1.5k, 0.30000000000000004 is 0.3."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):g}{letter}"
    return number(value, 3).rstrip("0").rstrip(".") if value != int(value) else f"{value:.0f}"
