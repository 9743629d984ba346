"""Selects the workload for a run's settings."""

from __future__ import annotations

from collections.abc import Iterator

from loadgen.common.settings import Settings
from loadgen.load.prompt_files import FileWorkload, read_prompts
from loadgen.load.traces import Trace, TraceWorkload, read_trace, scaled
from loadgen.load.workload import SyntheticWorkload, Workload


def workload_of(settings: Settings) -> Workload:
    """The workload of a trace, a file, or synthetic prompts. Raises LoadgenError for an invalid file."""
    if (trace := _trace_of(settings)) is not None:
        return TraceWorkload(settings, trace)
    if settings.prompts.file is not None:
        return FileWorkload(settings, read_prompts(settings.prompts.file))
    return SyntheticWorkload(settings)


def recorded_times(settings: Settings) -> Iterator[float] | None:
    """The start times of a trace; None without one."""
    trace = _trace_of(settings)
    return None if trace is None else (entry.at for entry in trace.entries)


def _trace_of(settings: Settings) -> Trace | None:
    trace = settings.load.trace
    return None if trace is None else scaled(read_trace(trace.file, trace.format), trace)
