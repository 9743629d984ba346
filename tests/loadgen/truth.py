"""Reports of loadgen against what the server did: every percentile from the client's record and from the log
of a server that notes when it emitted each token, on the same clock. Both of the requests that its own
figures are of, those in the window.

Between a server's note and the generator is the kernel, which may leave bytes lying, too. Over HTTP the
generator's record has the time when they came, and so which part of an error is its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.loadgen.fake_server import Behaviour
from tests.loadgen.processes import Serve, loadgen_process

Floats = NDArray[np.float64]
TO_P99 = (50.0, 90.0, 95.0, 99.0)
BEYOND = (99.9, 100.0)


@dataclass(frozen=True)
class Tolerance:
    """The error that is allowed: a number of milliseconds, or a share of the truth, whichever is more."""

    ms: float
    share: float
    beyond_ms: float = 5.0


@dataclass(frozen=True)
class Truth:
    """One run. Errors are client - server, in milliseconds, by metric and percentile; `own` are client - what
    came to its machine, where that is known."""

    protocol: str
    rate: float
    requests: int
    valid: bool
    invalid: list[str]
    lag_p99_ms: float
    read_lag_p99_ms: float | None
    loop_lag_p99_ms: float
    cpu_wait_p99_ms: float
    cpu_share: float
    output_tokens: float
    errors: dict[str, dict[str, float]]
    own: dict[str, dict[str, float]]
    truth: dict[str, dict[str, float]]

    def holds(self, tolerance: Tolerance) -> bool:
        """True if every percentile of every metric is within the tolerance."""
        return not self.beyond(tolerance)

    def beyond(self, tolerance: Tolerance) -> list[str]:
        """The percentiles that are beyond the tolerance, in words."""
        return self._beyond(self.errors, tolerance)

    def innocent(self, tolerance: Tolerance) -> bool:
        """True if the report is right about what arrived, whenever that was sent; False if unknown."""
        return bool(self.own) and not self._beyond(self.own, tolerance)

    def _beyond(self, errors_of: dict[str, dict[str, float]], tolerance: Tolerance) -> list[str]:
        found = []
        for metric, errors in errors_of.items():
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
    serve: Serve,
    behaviour: Behaviour,
    protocol: str,
    out: Path,
    *flags: str,
    beyond: Sequence[float] = BEYOND,
) -> Truth:
    """Runs loadgen against such a server and compares."""
    with serve(behaviour) as served:
        url = getattr(served, protocol)
        done = loadgen_process("run", url, "--model", "m", *flags, "--json", "--out", str(out), timeout_s=600)
        if done.code == 2:
            raise AssertionError(done.err)
    report = done.json
    emitted = served.emitted()
    start = report["about"]["started_monotonic"]
    lines = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["outcome"] == "OK"]
    ended_well, window = len(lines), report["window"]
    assert all(line["request_id"] in emitted for line in lines)
    lines = [line for line in lines if window["since"] <= line["scheduled"] <= window["until"]]
    seen = [np.array(line["token_times"]) for line in lines]
    reported = [np.array(emitted[line["request_id"]]) - start for line in lines]
    due = np.array([line["scheduled"] for line in lines])
    percentiles = (*TO_P99, *beyond)
    client, truth = (_at(_metrics(times, due), percentiles) for times in (seen, reported))
    came = _at(_ends(lines, due), percentiles)
    read_lag = report["quantities"]["read_lag"]["percentiles"]
    return Truth(
        protocol=protocol,
        rate=report["throughput"]["offered"],
        requests=ended_well,
        valid=report["valid"],
        invalid=[reason["text"] for reason in report["invalid"]],
        lag_p99_ms=report["quantities"]["lag"]["percentiles"]["99"]["value"],
        read_lag_p99_ms=read_lag["99"]["value"] if read_lag else None,
        loop_lag_p99_ms=report["generator"]["loop_lag_p99_ms"],
        cpu_wait_p99_ms=report["generator"]["cpu_wait_p99_ms"],
        cpu_share=max(one["cpu_share"] for one in report["generator"]["processes"]),
        output_tokens=report["throughput"]["output_tokens"],
        errors=_off(client, truth),
        own=_off(client, came),
        truth=truth,
    )


def _at(metrics: dict[str, Floats], percentiles: Sequence[float]) -> dict[str, dict[str, float]]:
    """Milliseconds at each percentile, of what there is."""
    found = {
        metric: np.percentile(values, percentiles) * 1e3 for metric, values in metrics.items() if len(values)
    }
    return {
        metric: {f"{q:g}": float(value) for q, value in zip(percentiles, values, strict=True)}
        for metric, values in found.items()
    }


def _off(
    client: dict[str, dict[str, float]], truth: dict[str, dict[str, float]]
) -> dict[str, dict[str, float]]:
    return {
        metric: {q: client[metric][q] - at for q, at in values.items()} for metric, values in truth.items()
    }


def _ends(lines: Sequence[dict[str, Any]], due: Floats) -> dict[str, Floats]:
    """Times when first and last tokens had come to the generator's machine; nothing where a record does not
    say."""
    if any(None in (line["first_late"], line["last_late"]) for line in lines):
        return {}
    first = np.array([line["token_times"][0] - line["first_late"] for line in lines])
    last = np.array([line["token_times"][-1] - line["last_late"] for line in lines])
    return {"ttft": first - due, "to the last token": last - due}


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
