"""What loadgen says against what the server did: every percentile from the client's record and from the log
of a server that notes when it emitted each token, on the same clock."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.loadgen.fake_server import Behaviour
from tests.loadgen.processes import Serve, loadgen

Floats = NDArray[np.float64]
TO_P99 = (50.0, 90.0, 95.0, 99.0)
BEYOND = (99.9, 100.0)


@dataclass(frozen=True)
class Tolerance:
    """An error may be so many milliseconds, or such a share of the truth, whichever is more."""

    ms: float
    share: float
    beyond_ms: float = 5.0


@dataclass(frozen=True)
class Truth:
    """One run. Errors are client - server, in milliseconds, by metric and percentile."""

    door: str
    rate: float
    requests: int
    valid: bool
    invalid: list[str]
    lag_p99_ms: float
    loop_lag_p99_ms: float
    cpu_wait_p99_ms: float
    cpu_share: float
    output_tokens: float
    errors: dict[str, dict[str, float]]
    truth: dict[str, dict[str, float]]

    def holds(self, tolerance: Tolerance) -> bool:
        """Whether every percentile of every metric is within it."""
        return not self.beyond(tolerance)

    def beyond(self, tolerance: Tolerance) -> list[str]:
        """Those that are not, in words."""
        found = []
        for metric, errors in self.errors.items():
            for percentile, error in errors.items():
                may = max(tolerance.ms, tolerance.share * self.truth[metric][percentile])
                if float(percentile) > TO_P99[-1]:
                    may = max(tolerance.beyond_ms, may)
                if abs(error) > may:
                    found.append(f"{metric} p{percentile}: {error:+.2f} ms (may be {may:.2f})")
        return found

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    serve: Serve, behaviour: Behaviour, door: str, out: Path, *flags: str, beyond: Sequence[float] = BEYOND
) -> Truth:
    """Runs loadgen against such a server and compares."""
    with serve(behaviour) as served:
        url = getattr(served, door)
        done = loadgen("run", url, "--model", "m", *flags, "--json", "--out", str(out), timeout_s=600)
        if done.code == 2:
            raise AssertionError(done.err)
    report = done.json
    emitted = served.emitted()
    start = report["about"]["started_monotonic"]
    lines = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["outcome"] == "OK"]
    seen = [np.array(line["token_times"]) for line in lines]
    told = [np.array(emitted[line["request_id"]]) - start for line in lines]
    due = np.array([line["scheduled"] for line in lines])
    percentiles = (*TO_P99, *beyond)
    errors: dict[str, dict[str, float]] = {}
    truths: dict[str, dict[str, float]] = {}
    for metric, client in _metrics(seen, due).items():
        server = _metrics(told, due)[metric]
        if len(server):
            at = np.percentile(server, percentiles) * 1e3
            off = np.percentile(client, percentiles) * 1e3 - at
            truths[metric] = {f"{q:g}": float(value) for q, value in zip(percentiles, at, strict=True)}
            errors[metric] = {f"{q:g}": float(value) for q, value in zip(percentiles, off, strict=True)}
    return Truth(
        door=door,
        rate=report["rates"]["offered"],
        requests=len(lines),
        valid=report["valid"],
        invalid=[reason["text"] for reason in report["invalid"]],
        lag_p99_ms=report["quantities"]["lag"]["percentiles"]["99"]["value"],
        loop_lag_p99_ms=report["generator"]["loop_lag_p99_ms"],
        cpu_wait_p99_ms=report["generator"]["cpu_wait_p99_ms"],
        cpu_share=max(one["cpu_share"] for one in report["generator"]["processes"]),
        output_tokens=report["rates"]["output_tokens"],
        errors=errors,
        truth=truths,
    )


def _metrics(times: Sequence[Floats], due: Floats) -> dict[str, Floats]:
    first = np.array([one[0] for one in times])
    last = np.array([one[-1] for one in times])
    counts = np.array([len(one) for one in times])
    many = counts > 1
    return {
        "ttft": first - due,
        "tpot": (last - first)[many] / (counts[many] - 1),
        "to the last token": last - due,
        "itl": np.concatenate([np.diff(one) for one in times]),
    }
