"""`loadgen size`: computes how many prefill and decode workers a load needs."""

from __future__ import annotations

import argparse
import dataclasses
import json

from rich.console import Console
from rich.table import Table
from rich.text import Text

from baton.perf_model.profile import Profile, ProfileError, read_profile, shipped
from loadgen.analysis.presets import PRESETS
from loadgen.analysis.slo import parse_goodput
from loadgen.common.errors import LoadgenError
from loadgen.common.formatting import limits, number, percent
from loadgen.reports.console import plain_table
from loadgen.sizing.plan import Load, Plan, plan

DESCRIPTION = (
    "Computes the fewest prefill and decode workers that carry each arrival rate within the limits, from a "
    "profile of measured step times. Calls no server. Exit code 2: the limits cannot be met."
)
_LIMITS = {"ttft", "tpot"}
_LEGEND = (
    "/GPU: req/s a GPU; busy: prefill workers; TTFT, TPOT: not exceeded by {:.1%} of the requests;\n"
    "batch: mean of a decode worker; GB/s: KV sent by each prefill worker; bound: of a decode worker"
)


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this command."""
    parser.add_argument(
        "profile", metavar="PROFILE", help=f"file of measured times (YAML), or one of: {', '.join(shipped())}"
    )
    parser.add_argument(
        "--decode-profile",
        metavar="PROFILE",
        help="profile of decode workers, such as of another number of GPUs (default: PROFILE)",
    )
    parser.add_argument(
        "--rates", type=float, nargs="+", required=True, metavar="R", help="requests per second"
    )
    parser.add_argument("--input-len", type=float, required=True, metavar="N", help="mean prompt tokens")
    parser.add_argument("--output-len", type=float, required=True, metavar="N", help="mean output tokens")
    parser.add_argument(
        "--goodput", nargs="+", default=[], metavar="METRIC:MS", help="limits, ttft:500 tpot:30"
    )
    parser.add_argument("--preset", choices=PRESETS, help="published limits")
    parser.add_argument(
        "--attainment", type=float, metavar="SHARE", help="share of requests within both limits (default 0.9)"
    )
    parser.add_argument(
        "--input-cv",
        type=float,
        default=0.0,
        metavar="X",
        help="standard deviation / mean of prompt tokens (default %(default)g)",
    )
    parser.add_argument(
        "--prefix-hits",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of prompt tokens found in the prefix cache (default %(default)g)",
    )
    parser.add_argument(
        "--spare",
        type=int,
        default=0,
        metavar="N",
        help="workers of each role that may be away (default %(default)s)",
    )
    parser.add_argument(
        "--tokens-per-step",
        type=float,
        metavar="X",
        help="tokens that a decode step gives most sequences, with speculation (default: the profile's)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object to stdout")


def main(arguments: argparse.Namespace) -> int:
    """Prints the table of worker counts; returns the exit code, 0."""
    profile, decoding = _profiles(arguments)
    load = _load(arguments)
    if not all(0 < rate < float("inf") for rate in arguments.rates):
        raise LoadgenError("--rates must be positive")
    if arguments.spare < 0:
        raise LoadgenError("--spare must not be negative")
    plans = [plan(profile, load, rate, arguments.spare, decoding) for rate in arguments.rates]
    if arguments.json:
        rows = [dataclasses.asdict(one) | {"gpus": one.gpus} for one in plans]
        profiles = {"profile": profile.model_dump(), "decode_profile": decoding.model_dump()}
        print(json.dumps({**profiles, "load": dataclasses.asdict(load), "plans": rows}))
        return 0
    console = Console(highlight=False)
    for one, role in ((profile, ""), (decoding, "decode: ")):
        if role == "" or arguments.decode_profile is not None:
            text = f"{role}{one.model} on {_gpus(one)}; {one.source}"
            console.print(Text(text), soft_wrap=True)
    console.print(Text(_words(load)), soft_wrap=True)
    console.print(table(plans))
    console.print(Text(_LEGEND.format(load.share), style="dim"), soft_wrap=True)
    return 0


def _profiles(arguments: argparse.Namespace) -> tuple[Profile, Profile]:
    """The profiles of prefill and of decode workers. Raises LoadgenError where one cannot be read, or where
    KV of the one's tokens is not what the other's take."""
    try:
        profile = read_profile(arguments.profile)
        decoding = profile if arguments.decode_profile is None else read_profile(arguments.decode_profile)
    except ProfileError as error:
        raise LoadgenError(str(error)) from None
    if profile.kv_bytes_per_token != decoding.kv_bytes_per_token:
        raise LoadgenError(
            f"kv_bytes_per_token is {profile.kv_bytes_per_token} in {arguments.profile} and "
            f"{decoding.kv_bytes_per_token} in {arguments.decode_profile}: profiles of one model and one "
            "kv_dtype can be combined"
        )
    if (tokens := arguments.tokens_per_step) is not None:
        if not 1 <= tokens <= 8:
            raise LoadgenError("--tokens-per-step must lie between 1 and 8")
        profile, decoding = (one.model_copy(update={"tokens_a_step": tokens}) for one in (profile, decoding))
    return profile, decoding


def _gpus(profile: Profile) -> str:
    """The GPUs of a worker."""
    return profile.gpu if profile.worker_gpus == 1 else f"{profile.worker_gpus} x {profile.gpu}"


def _load(arguments: argparse.Namespace) -> Load:
    """The load and its limits. Raises LoadgenError where a value makes no sense."""
    preset = PRESETS[arguments.preset] if arguments.preset else None
    goodput = (preset.goodput if preset else {}) | parse_goodput(arguments.goodput)
    if set(goodput) != _LIMITS:
        raise LoadgenError("size needs the limits ttft and tpot, and no others: --goodput ttft:500 tpot:30")
    attainment = arguments.attainment or (preset.attainment if preset else 0.9)
    if not 0 < attainment < 1:
        raise LoadgenError("--attainment must lie between 0 and 1")
    if not (1 <= arguments.input_len < float("inf") and 1 <= arguments.output_len < float("inf")):
        raise LoadgenError("--input-len and --output-len must be at least 1")
    if not 0 <= arguments.prefix_hits < 1:
        raise LoadgenError("--prefix-hits must be at least 0 and below 1")
    if not 0 <= arguments.input_cv < float("inf"):
        raise LoadgenError("--input-cv must not be negative")
    return Load(
        input_tokens=arguments.input_len,
        output_tokens=arguments.output_len,
        ttft_s=goodput["ttft"] / 1e3,
        tpot_s=goodput["tpot"] / 1e3,
        attainment=attainment,
        prefix_hits=arguments.prefix_hits,
        input_variation=arguments.input_cv,
    )


def table(plans: list[Plan]) -> Table:
    """A row for each arrival rate; 80 columns wide at most."""
    shown = plain_table()
    shown.padding = (0, 1, 0, 0)
    for name in ("req/s", "prefill", "decode", "GPUs", "/GPU", "busy", "TTFT ms", "batch", "TPOT ms", "GB/s"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("bound", no_wrap=True)
    for one in plans:
        shown.add_row(
            number(one.rate),
            _workers(one.prefill, one.spare),
            _workers(one.decode, one.spare),
            str(one.gpus),
            number(one.rate / one.gpus),
            f"{one.prefill_busy:.0%}",
            number(one.ttft_s * 1e3),
            number(one.batch),
            number(one.tpot_s * 1e3),
            number(one.kv_gb_s),
            one.bound.value,
        )
    return shown


def _workers(needed: int, spare: int) -> str:
    return f"{needed}+{spare}" if spare else str(needed)


def _words(load: Load) -> str:
    wanted = limits({"ttft": load.ttft_s * 1e3, "tpot": load.tpot_s * 1e3})
    hits = f" ({percent(load.prefix_hits)} of them cached)" if load.prefix_hits else ""
    return (
        f"{load.input_tokens:,.0f} prompt tokens{hits}, {load.output_tokens:,.0f} output tokens; "
        f"{percent(load.attainment)} within {wanted}"
    )
