"""Runs of loadgen at fixed rates, and what they tell under any limits.

One run at a rate is judged under every limit, so that the arms' figures at all limits are of the same
requests. The runs of a rate have the same seed in every arm, and no two rates of an arm have the same: what a
prefix cache holds of one run is no prompt of another.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path

from bench.goodput.servers import MODEL, NotServedError, Target
from bench.goodput.workloads import Workload
from loadgen.analysis import run_folder
from loadgen.analysis.run_folder import Run
from loadgen.goodput.curve import probe_of
from loadgen.goodput.probe import Probe

# What a run may take beyond its duration: processes start, warm-up, the last answers.
_BESIDE_S = 400.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a good request in ms, and the share of requests that has to meet them."""

    ttft_ms: float
    tpot_ms: float
    goal: float


def numbers(text: str) -> list[float]:
    """Parses numbers with commas between them. Raises ValueError."""
    return [float(part) for part in text.split(",") if part]


@dataclass(frozen=True, slots=True)
class Load:
    """One run: `rate` requests a second of the whole arm for `seconds`, by so many processes of loadgen."""

    workload: Workload
    rate: float
    seconds: float
    seed: int
    slo: Limits | None = None
    processes: int = 1

    def words(self, target: Target, folder: Path, vocab: int) -> list[str]:
        """The arguments of `loadgen`. With `slo`, requests state these limits."""
        admin = ["--admin", target.admin, "--metrics-url", target.metrics_url] if target.admin else []
        slo = [] if self.slo is None else [
            "--goodput", f"ttft:{self.slo.ttft_ms:g}", f"tpot:{self.slo.tpot_ms:g}", "--slo-headers"
        ]  # fmt: skip
        return [
            "run", target.url, *admin, "--model", MODEL, "--rate", f"{self.rate / self.workload.requests:g}",
            "--duration", f"{self.seconds:g}", "--seed", str(self.seed), "--vocab-size", str(vocab),
            "--processes", str(self.processes), *self.workload.flags, *slo, "--out", str(folder), "--json",
        ]  # fmt: skip


async def measure(load: Load, target: Target, folder: Path, vocab: int) -> Run:
    """Runs loadgen and reads the run. Raises NotServedError where nothing was measured."""
    command = [sys.executable, "-m", "loadgen", *load.words(target, folder, vocab)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
    try:
        async with asyncio.timeout(load.seconds + _BESIDE_S):
            code = await process.wait()
    except TimeoutError:
        raise NotServedError(f"loadgen did not end at {load.rate:g}/s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code == 2:  # 1 and 3: measured, with failures or INVALID
        raise NotServedError(f"loadgen measured nothing at {load.rate:g}/s")
    return run_folder.load(folder)


def judged(run: Run, rate: float, limits: Limits) -> Probe:
    """The probe of a run under these limits."""
    judge = run.settings.judge.model_copy(
        update={"goodput": {"ttft": limits.ttft_ms, "tpot": limits.tpot_ms}, "attainment": limits.goal}
    )
    classes = tuple(one.model_copy(update={"goodput": {}}) for one in run.settings.load.classes)
    load = run.settings.load.model_copy(update={"classes": classes})
    settings = run.settings.model_copy(update={"judge": judge, "load": load})
    return probe_of(Run(run.path, settings, run.records, run.summary, run.about), rate)
