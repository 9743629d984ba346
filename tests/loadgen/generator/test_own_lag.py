"""The CPU limit of a container, read from files such as the kernel's."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from loadgen.generator.own_lag import CpuLimit
from tests.loadgen.virtual_time import run_virtual

MOUNT = "40 31 0:37 {root} {at} rw,relatime shared:9 - {system} {system} rw{options}\n"


class Kernel:
    """A /proc/self and the hierarchies of groups that it names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.proc = folder / "proc"
        self.proc.mkdir()
        (self.proc / "mountinfo").write_text("22 1 8:1 / / rw - ext4 /dev/root rw\n")
        (self.proc / "cgroup").write_text("")

    def mount(self, name: str, system: str, options: str = "", root: str = "/") -> None:
        line = MOUNT.format(root=root, at=self.folder / name, system=system, options=options)
        (self.proc / "mountinfo").write_text((self.proc / "mountinfo").read_text() + line)

    def belongs(self, line: str) -> None:
        (self.proc / "cgroup").write_text((self.proc / "cgroup").read_text() + line + "\n")

    def stat(self, place: str, times: int, **throttled: int) -> None:
        (self.folder / place).mkdir(parents=True, exist_ok=True)
        reported = {"nr_periods": 900, "nr_throttled": times, **throttled}
        text = "".join(f"{name} {count}\n" for name, count in reported.items())
        (self.folder / place / "cpu.stat").write_text(text)

    def held_back(self) -> tuple[int, float]:
        return CpuLimit(lambda: 0.0, self.proc).held_back()


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


def test_a_container_of_version_2(kernel: Kernel) -> None:
    kernel.mount("cgroup", "cgroup2")
    kernel.belongs("0::/")
    kernel.stat("cgroup", 3, usage_usec=7, throttled_usec=250_000)
    assert kernel.held_back() == (3, 0.25)


def test_the_groups_above_limit_us_too(kernel: Kernel) -> None:
    """A pod's, say; the root of all groups has no limit and does not count."""
    kernel.mount("cgroup", "cgroup2")
    kernel.belongs("0::/pods/one/container")
    kernel.stat("cgroup/pods/one/container", 3, throttled_usec=250_000)
    kernel.stat("cgroup/pods/one", 1, throttled_usec=500_000)
    kernel.stat("cgroup/pods/two", 9, throttled_usec=900_000)
    (kernel.folder / "cgroup" / "cpu.stat").write_text("usage_usec 12\n")
    assert kernel.held_back() == (4, 0.75)


@pytest.mark.parametrize(
    ("root", "place"), [("/", "cpu/docker/one"), ("/docker/one", "cpu"), ("/other", "cpu")]
)
def test_version_1_wherever_it_is_mounted(kernel: Kernel, root: str, place: str) -> None:
    kernel.mount("memory", "cgroup", ",memory")
    kernel.mount("cpu", "cgroup", ",cpu,cpuacct", root)
    kernel.mount("unified", "cgroup2")
    for line in ("7:memory:/docker/other", "3:cpu,cpuacct:/docker/one", "0::/"):
        kernel.belongs(line)
    kernel.stat(place, 2, throttled_time=1_500_000_000)
    kernel.stat("memory/docker/other", 5, throttled_time=5)
    assert kernel.held_back() == (2, 1.5)


def test_no_limit_no_samples(kernel: Kernel) -> None:
    limit = CpuLimit(lambda: 0.0, kernel.proc)
    asyncio.run(limit.run())
    assert limit.held_back() == (0, 0.0)
    assert limit.samples == []
    assert CpuLimit(lambda: 0.0, kernel.folder / "nowhere").held_back() == (0, 0.0)


def test_samples_are_what_each_tenth_of_a_second_lost(kernel: Kernel) -> None:
    """And never more than it had: four processors that stand still count four times."""
    kernel.mount("cgroup", "cgroup2")
    kernel.belongs("0::/")

    async def throttled() -> list[float]:
        loop = asyncio.get_running_loop()
        kernel.stat("cgroup", 5, throttled_usec=7_000_000)
        limit = CpuLimit(loop.time, kernel.proc)
        watching = asyncio.ensure_future(limit.run())
        await asyncio.sleep(0.05)
        for lost_ms in (0, 60, 400, 0):
            seconds = limit.held_back()[1] + lost_ms / 1e3
            kernel.stat("cgroup", 6, throttled_usec=round(1e6 * seconds))
            await asyncio.sleep(0.1)
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        return limit.samples

    assert run_virtual(throttled()) == pytest.approx([0, 0.06, 0.1, 0])
