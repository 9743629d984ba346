"""From records to numbers.

TTFT  first token - scheduled send, so that a generator which lags, or a full server, cannot hide
TPOT  (last token - first token) / (tokens - 1), of requests with two tokens or more
ITL   every gap between tokens, of all requests together; tokens of one message are 0 apart
A failed request counts as failed and has no part in these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from rich import box
from rich.table import Table

from loadgen.client import Record

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles in milliseconds; None where nothing was measured."""

    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        if not seconds:
            return cls(None, None, None)
        return cls(*(float(value) for value in np.percentile(np.asarray(seconds) * 1e3, PERCENTILES)))


@dataclass(frozen=True, slots=True)
class Report:
    """One run. `achieved_rate` is of requests sent, not of requests answered; the lag is of the generator."""

    requests: int
    failed: dict[str, int]
    requested_rate: float
    achieved_rate: float | None
    send_lag_ms: Spread
    output_tokens: int
    tokens_per_s: float | None
    ttft_ms: Spread
    tpot_ms: Spread
    itl_ms: Spread

    @classmethod
    def of(cls, records: Sequence[Record], requested_rate: float) -> Report:
        good = [record for record in records if not record.error]
        tokens = sum(len(record.token_times) for record in good)
        sending = max(record.sent for record in records) - min(record.sent for record in records)
        lasting = max(record.ended for record in records) - min(record.scheduled for record in records)
        return cls(
            requests=len(records),
            failed=dict(Counter(record.error for record in records if record.error)),
            requested_rate=requested_rate,
            achieved_rate=(len(records) - 1) / sending if sending > 0 else None,
            send_lag_ms=Spread.of([record.sent - record.scheduled for record in records]),
            output_tokens=tokens,
            tokens_per_s=tokens / lasting if lasting > 0 else None,
            ttft_ms=Spread.of([record.token_times[0] - record.scheduled for record in good]),
            tpot_ms=Spread.of([_tpot(record) for record in good if len(record.token_times) > 1]),
            itl_ms=Spread.of([gap for record in good for gap in np.diff(record.token_times).tolist()]),
        )

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    def table(self) -> Table:
        """Percentiles of every time, a row each."""
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        table.add_column("ms")
        for percentile in PERCENTILES:
            table.add_column(f"p{percentile}", justify="right")
        rows = {"TTFT": self.ttft_ms, "TPOT": self.tpot_ms, "ITL": self.itl_ms, "send lag": self.send_lag_ms}
        for name, spread in rows.items():
            table.add_row(name, *(_number(value) for value in (spread.p50, spread.p90, spread.p99)))
        return table

    def headline(self) -> str:
        """What was asked, what was sent, and what failed, in one line."""
        failed = ", ".join(f"{count} {kind}" for kind, count in self.failed.items()) or "none"
        return (
            f"{self.requests} requests, failed: {failed}; sent at {_number(self.achieved_rate)}/s"
            f" (asked {self.requested_rate:g}/s); {_number(self.tokens_per_s)} output tokens/s"
        )


def _tpot(record: Record) -> float:
    return (record.token_times[-1] - record.token_times[0]) / (len(record.token_times) - 1)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
