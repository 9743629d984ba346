"""The flags that run, search and sweep share, and the settings they make."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from loadgen.analysis.slo import parse_goodput
from loadgen.errors import LoadgenError
from loadgen.load.arrivals import Stage
from loadgen.load.distributions import FORMS_HELP, Distribution
from loadgen.settings import (
    GeneratorSettings,
    JudgeSettings,
    LoadSettings,
    PromptSettings,
    Settings,
    TargetSettings,
)

_DISTRIBUTIONS = ("input_len", "output_len", "turns", "think_time", "cancel_after")


def add_target(parser: argparse.ArgumentParser) -> None:
    """Who is asked."""
    group = parser.add_argument_group("target")
    group.add_argument(
        "target", metavar="TARGET", help="grpc://HOST:PORT (Baton) or http(s)://HOST:PORT (OpenAI)"
    )
    group.add_argument("--model", required=True)
    fields = TargetSettings.model_fields
    group.add_argument(
        "--form",
        choices=("ids", "text", "chat"),
        default=fields["form"].default,
        help="what prompts are sent as (default %(default)s)",
    )
    group.add_argument(
        "--timeout",
        type=float,
        default=fields["timeout_s"].default,
        metavar="S",
        help="a request's deadline (default %(default)g)",
    )
    group.add_argument(
        "--connections",
        type=int,
        default=fields["connections"].default,
        help="gRPC connections of a process (default %(default)s)",
    )
    group.add_argument("--temperature", type=float, default=0.0, help="default 0: greedy")
    group.add_argument("--no-ignore-eos", action="store_true", help="let outputs end by themselves")
    group.add_argument("--extra-body", metavar="JSON", default="{}", help="more fields of every HTTP body")


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """What is asked."""
    group = parser.add_argument_group("prompts", description=f"lengths: {FORMS_HELP}")
    fields = PromptSettings.model_fields
    group.add_argument(
        "--dataset", choices=("random", "document", "code", "chat"), default="random", help="default random"
    )
    for flag, name in (("--input-len", "input_len"), ("--output-len", "output_len")):
        group.add_argument(
            flag,
            metavar="TOKENS",
            default=fields[name].default,
            help=f"{fields[name].description} (default %(default)s)",
        )
    group.add_argument(
        "--vocab-size",
        type=int,
        default=fields["vocab_size"].default,
        metavar="N",
        help="ids are drawn below it (default %(default)s)",
    )


def add_load(parser: argparse.ArgumentParser) -> None:
    """How long, how bursty, of which kinds; when is each command's own."""
    group = parser.add_argument_group("load")
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        help="shape of gamma gaps: 1 Poisson (default), less burstier, inf even",
    )
    group.add_argument("--seed", type=int, default=0, help="of all that is drawn (default 0)")


def add_judging(parser: argparse.ArgumentParser) -> None:
    """What is good, and what is not to be believed."""
    group = parser.add_argument_group("judging")
    fields = JudgeSettings.model_fields
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="METRIC:MS",
        help="limits of a good request, such as ttft:300 tpot:30 itl_p99:100",
    )
    group.add_argument(
        "--attainment",
        type=float,
        default=fields["attainment"].default,
        help="share that must be good (default %(default)g)",
    )
    group.add_argument(
        "--max-lag-ms",
        type=float,
        default=fields["max_lag_ms"].default,
        metavar="MS",
        help="INVALID beyond (default %(default)g)",
    )
    group.add_argument(
        "--max-error-share",
        type=float,
        default=fields["max_error_share"].default,
        metavar="SHARE",
        help="INVALID beyond (default %(default)g)",
    )


def add_generator(parser: argparse.ArgumentParser) -> None:
    """The generator, and where its results go."""
    group = parser.add_argument_group("generator and results")
    group.add_argument("--processes", type=int, default=1, help="that send (default 1)")
    group.add_argument(
        "--warmup",
        type=int,
        metavar="N",
        help="requests before the clock starts (default: twice the expected concurrency)",
    )
    group.add_argument("--out", metavar="DIR", help="default: a new folder in loadgen-runs")
    group.add_argument("--json", action="store_true", help="one JSON object on stdout")


def settings_of(arguments: argparse.Namespace, load: Mapping[str, Any]) -> Settings:
    """The settings that flags and `load` ask for; LoadgenError names the first that is wrong."""
    for name in _DISTRIBUTIONS:
        if hasattr(arguments, name):
            Distribution.parse(getattr(arguments, name))
    for stage in load.get("stages", ()):
        Stage.parse(stage)
    try:
        return Settings(
            target=TargetSettings(
                url=arguments.target,
                model=arguments.model,
                form=arguments.form,
                timeout_s=arguments.timeout,
                connections=arguments.connections,
                ignore_eos=not arguments.no_ignore_eos,
                temperature=arguments.temperature,
                extra_body=json.loads(arguments.extra_body),
            ),
            prompts=PromptSettings(
                dataset=arguments.dataset,
                input_len=arguments.input_len,
                output_len=arguments.output_len,
                vocab_size=arguments.vocab_size,
            ),
            load=LoadSettings(burstiness=arguments.burstiness, seed=arguments.seed, **load),
            judge=JudgeSettings(
                goodput=parse_goodput(arguments.goodput),
                attainment=arguments.attainment,
                max_lag_ms=arguments.max_lag_ms,
                max_error_share=arguments.max_error_share,
            ),
            generator=GeneratorSettings(processes=arguments.processes, warmup=arguments.warmup),
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(step) for step in first["loc"])
        raise LoadgenError(f"{place}: {first['msg']}" if place else first["msg"]) from None
    except json.JSONDecodeError:
        raise LoadgenError("--extra-body is no JSON object") from None
