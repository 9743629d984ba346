"""`baton status`, once and watched, drawn from statuses made by hand: they fit, and name who is slow."""

from __future__ import annotations

import argparse
import io
import re
from unittest.mock import AsyncMock

import pytest
from rich.console import Console

from baton.v1 import admin_pb2, worker_pb2
from services.cli.common.console import console
from services.cli.common.formatting import bytes_text, duration, short_count
from services.cli.parse import parse
from services.cli.status import command
from services.cli.status.slow_worker import slow_worker
from services.cli.status.watch_view import WatchView, slot_map, sparkline
from tests.cli.status.statuses import decode, prefill, status

WIDTHS = [80, 100, 119, 120, 121, 139, 150, 160, 175, 180, 190, 200, 230]


def lines(width: int, answer: admin_pb2.AdminServiceGetStatusResponse, *, watch: bool) -> list[str]:
    console = Console(width=width, record=True, file=open("/dev/null", "w"), highlight=False)  # noqa: SIM115
    with console.file:
        if watch:
            console.print(WatchView().draw(answer, width))
        else:
            command.show(console, answer)
    return console.export_text().splitlines()


BUSY = status(
    prefill("prefill-0", queued=123456, step_ms=1234.5),
    prefill("prefill-with-quite-a-long-name-1", queued=99999, step_ms=1234.5),
    decode("decode-0", slots=4096, active=4000),
    decode("decode-1", slots=128, active=99),
)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("watch", [False, True], ids=["status", "watch"])
def test_it_fits_and_every_figure_is_whole(width: int, watch: bool) -> None:
    shown = lines(width, BUSY, watch=watch)
    assert max(map(len, shown)) <= width
    text = "\n".join(shown)
    for piece in ("4001/4096", "100/128", "3096/4096", "1234.5", "123k", "12346", "1.0k running"):
        assert piece in text, text
    assert "…" not in re.sub("prefill-wi[a-z-]*…", "", text), text
    rows = [line for line in shown if line.startswith(("prefill-0", "prefill-w", "decode-0", "decode-1"))]
    # A row a worker, none wrapped; `--watch` adds a map of each decoder's slots.
    assert len(rows) == (6 if watch else 4), text


def test_without_a_terminal_each_name_stands_whole_in_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of pods have up to 63 characters, and what reads a pipe looks for them in a line."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    names = [f"{'release-' * 7}{role}-{number}" for role in ("prefill", "decode") for number in range(2)]
    shown = lines(console().width, status(*map(prefill, names[:2]), *map(decode, names[2:])), watch=False)
    for name in names:
        assert [line for line in shown if name in line], name


def test_the_memory_of_kv_blocks_and_their_dtype_are_shown() -> None:
    text = "\n".join(lines(240, BUSY, watch=False))
    assert text.count("4.0 GiB fp8") == 4
    assert "16.0 GiB" in text


@pytest.mark.parametrize("watch", [False, True], ids=["status", "watch"])
def test_memory_of_several_devices_is_shown_by_device(watch: bool) -> None:
    gpus = [(5, 60, 20, 90), (1, 60, 20, 95)]
    answer = status(prefill("prefill-0"), decode("decode-0"), decode("decode-1"))
    for index, weights, kv, used in gpus:
        answer.workers[1].worker.report.device_memory.add(
            index=index, weights_bytes=weights << 30, kv_bytes=kv << 30, used_bytes=used << 30,
            total_bytes=140 << 30,
        )  # fmt: skip
    for rank in range(2):
        answer.workers[2].worker.report.device_memory.add(index=rank, weights_bytes=7 << 20, kv_bytes=3 << 20)
    answer.workers[0].worker.report.device_memory.add(index=0, weights_bytes=7 << 30)
    shown = lines(100, answer, watch=watch)
    told = "decode-0 on GPUs 5, 1: weights 60.0 GiB each; KV 20.0 GiB each; free 50.0 GiB, 45.0 GiB"
    assert told in shown
    assert "decode-1 on devices 0, 1: weights 7.0 MiB each; KV 3.0 MiB each" in shown
    assert not [line for line in shown if "prefill-0 on" in line]


def test_a_mixture_has_its_parameters_and_other_models_no_line() -> None:
    assert "active" not in "\n".join(lines(100, BUSY, watch=False))
    mixture = status(prefill("prefill-0"), decode("decode-0", slots=8, active=1))
    sizes = {"count": 128, "taken": 8, "total_parameters": 30_532_122_624, "active_parameters": 3_353_149_440}
    for worker, imbalance in zip(mixture.workers, (0.0, 1.62), strict=True):
        worker.worker.report.experts.MergeFrom(worker_pb2.ExpertsReport(**sizes, imbalance=imbalance))
    told = "30.5B total, 3.4B active: a token takes 8 of 128 experts; the busiest has 1.6 x the mean"
    assert told in lines(100, mixture, watch=False)


@pytest.mark.parametrize("watch", [False, True], ids=["status", "watch"])
def test_the_slow_worker_is_named(watch: bool) -> None:
    answer = status(prefill("p"), decode("quick-a"), decode("quick-b", step_ms=6), decode("late", step_ms=40))
    text = "\n".join(lines(80, answer, watch=watch))
    assert "slow: late: decode steps take 40.0 ms, 5.5 ms on its peers" in text


def test_equals_are_not_slow() -> None:
    assert slow_worker([prefill("p"), decode("a"), decode("b", step_ms=6.5), decode("c", step_ms=4)]) is None
    assert slow_worker([prefill("p"), decode("a")]) is None


def test_a_long_queue_is_slow() -> None:
    slow = slow_worker([prefill("a", queued=5000), prefill("b", queued=100), prefill("c"), decode("d")])
    assert slow is not None
    assert (slow.name, slow.reason) == ("a", "5000 prompt tokens are queued, 50 on its peers")


def test_a_slow_prefill_is_slow() -> None:
    slow = slow_worker([prefill("a", step_ms=30), prefill("b"), decode("d")])
    assert slow is not None
    assert slow.name == "a"


def test_a_lone_decoder_that_stutters() -> None:
    worker = decode("only")
    worker.worker.report.recent_decode.p99_ms = 50
    slow = slow_worker([prefill("p"), worker])
    assert slow is not None
    assert slow.name == "only"
    assert "50.0 ms" in slow.reason


def test_a_worker_that_is_away_is_no_measure() -> None:
    late = decode("late", step_ms=40)
    late.state = admin_pb2.WORKER_STATE_UNREACHABLE
    assert slow_worker([decode("a"), late]) is None


@pytest.mark.parametrize("watch", [False, True], ids=["status", "watch"])
def test_tokens_a_step_are_shown_of_workers_that_decode(watch: bool) -> None:
    text = "\n".join(lines(180, BUSY, watch=watch))
    assert "tok/step" in text
    assert text.count(" 1.94 ") == 2
    assert "tok/step" not in "\n".join(lines(100, BUSY, watch=watch))


@pytest.mark.parametrize("watch", [False, True], ids=["status", "watch"])
def test_problems_are_shown(watch: bool) -> None:
    silent = admin_pb2.WorkerStatus(state=admin_pb2.WORKER_STATE_UNREACHABLE)
    silent.worker.address = "10.0.0.1:5000"
    silent.worker.error = "10.0.0.1:5000: connection refused"
    broken = decode("decode-0")
    broken.worker.report.integrity_error = "block 3 has 2 references, its owners hold 1"
    broken.failed_links.add(decode="decode-1", reason="no link", failures=3, retry_in_s=4.2)
    text = " ".join(" ".join(lines(80, status(silent, broken, serving=False), watch=watch)).split())
    assert "not serving" in text
    assert "connection refused" in text
    assert "integrity check failed: block 3" in text
    assert "its link to decode-1 failed 3 times in a row, and is used again in 4 s: no link" in text


def test_redis_is_shown() -> None:
    answer = status(decode("d"))
    assert "Redis: none" in "\n".join(lines(100, answer, watch=False))
    store = answer.store
    store.address, store.namespace, store.embedded, store.restarts = "127.0.0.1:7000", "ours", True, 2
    store.registered_workers, store.journal_open = 4, 3
    text = "\n".join(lines(160, answer, watch=False))
    assert (
        "127.0.0.1:7000, embedded, restarted 2 x; namespace ours; workers registered: 4, requests in" in text
    )
    assert "Redis" not in "\n".join(lines(160, answer, watch=True))
    store.unavailable_s = 75
    for watch in (False, True):
        assert "unavailable for 1m 15s, requests continue" in "\n".join(lines(160, answer, watch=watch))
        assert max(map(len, lines(80, answer, watch=watch))) <= 80


def test_without_workers() -> None:
    starting = admin_pb2.WorkerStatus(state=admin_pb2.WORKER_STATE_STARTING)
    starting.worker.address = "10.0.0.1:5000"
    for watch in (False, True):
        text = "\n".join(lines(80, status(starting, serving=False), watch=watch))
        assert "10.0.0.1:5000" in text
        assert "starting" in text


def test_the_slot_map_has_a_cell_a_slot() -> None:
    free, reserved = worker_pb2.SLOT_STATE_FREE, worker_pb2.SLOT_STATE_RESERVED
    cells, each = slot_map([worker_pb2.SLOT_STATE_ACTIVE, free, reserved, free], 60)
    assert (cells.plain, each) == ("█·▒·", 1)


def test_many_slots_share_cells() -> None:
    states = [worker_pb2.SLOT_STATE_FREE] * 4095 + [worker_pb2.SLOT_STATE_ACTIVE]
    cells, each = slot_map(states, 60)
    assert each == 23  # 4096 slots in 3 lines of 60 cells
    assert len(cells.plain) == -(-4096 // 23)
    assert cells.plain.endswith("█")


def test_the_sparkline() -> None:
    assert sparkline([0, 4, 8], 10).plain == " ▄█ 8 max 8"
    assert sparkline([0, 0], 10).plain == "   0 max 0"
    assert sparkline(list(range(100)), 4).plain.endswith("99 max 99")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (7, "7"), (2.34, "2.3"), (999, "999"), (1000, "1.0k"), (99_949, "99.9k"), (123_456, "123k")],
)
def test_short_count(count: float, text: str) -> None:
    assert short_count(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1 << 20, "1.0 MiB"), (5 << 50, "5120.0 TiB")],
)
def test_bytes_text(count: int, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59, "59s"), (192, "3m 12s"), (10_980, "3h 03m"), (200_000, "2d 07h")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize("text", ["0", "61", "nan", "inf"])
def test_a_window_that_no_router_remembers(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        command.seconds(text)


def test_exit_codes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    broken = decode("decode-0")
    broken.worker.report.integrity_error = "block 3 has 2 references, its owners hold 1"
    arguments = parse(["status", "x:1", "--json"])
    for answer, code in (
        (status(decode("d")), 0),
        (status(decode("d"), serving=False), 1),
        (status(broken), 1),
    ):
        monkeypatch.setattr(command, "fetch", AsyncMock(return_value=answer))
        assert command.run(arguments) == code
    assert capsys.readouterr().out.count('"router"') == 3
