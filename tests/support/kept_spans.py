"""A recorder whose spans a test reads."""

from __future__ import annotations

from collections.abc import Sequence

from services.common.observability.tracing.recorder import SpanRecorder
from services.common.observability.tracing.span import Span


class KeptSpans:
    """An exporter that keeps what it is given; `recorder` is the only user of it."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self.recorder = SpanRecorder(self, interval_s=0.001)

    def export(self, spans: Sequence[Span]) -> str:
        self._spans += spans
        return ""

    def close(self) -> None:
        pass

    def all(self) -> list[Span]:
        """All recorded spans; no more may be recorded afterwards."""
        self.recorder.close(10.0)
        return self._spans

    def named(self) -> dict[str, Span]:
        """The same by name; each name was recorded once."""
        spans = self.all()
        named = {span.name: span for span in spans}
        assert len(named) == len(spans), [span.name for span in spans]
        return named
