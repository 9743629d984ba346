"""The latency of masks is measured with real mask processes."""

from __future__ import annotations

import json
import sys

import pytest

from bench.cluster import mask_latency


def test_it_measures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--streams", "3", "--steps", "5", "--vocab-size", "400", "--json"]
    monkeypatch.setattr(sys, "argv", ["mask_latency", *arguments])
    mask_latency.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["streams"], found["steps"]) == (3, 5)
    assert 0 < found["first_ms_p50"] <= found["last_ms_p50"] <= found["last_ms_p99"]
