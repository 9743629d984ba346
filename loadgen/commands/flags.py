"""The flags that run, search and sweep share, and the settings built from them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from loadgen.analysis.presets import PRESETS
from loadgen.analysis.slo import parse_goodput
from loadgen.commands.classes import parse_class
from loadgen.common.errors import LoadgenError
from loadgen.common.settings import (
    GeneratorSettings,
    JudgeSettings,
    LoadSettings,
    PromptSettings,
    RequestClass,
    Settings,
    TargetSettings,
)
from loadgen.load.arrivals import Stage
from loadgen.load.distributions import FORMS_HELP, Distribution
from loadgen.load.prompt_files import form_of, read_prompts
from loadgen.reports.parquet import need_pyarrow

_DISTRIBUTIONS = ("input_len", "output_len", "turns", "think_time", "cancel_after")
# Defaults of a conversation.
_CHAT_TURNS, _CHAT_THINK = "uniform:2-6", "exp:2"


def add_target(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the target."""
    group = parser.add_argument_group("target")
    group.add_argument(
        "target", metavar="TARGET", help="grpc://HOST:PORT (Baton) or http(s)://HOST:PORT (OpenAI)"
    )
    group.add_argument(
        "--admin", default="", metavar="HOST:PORT", help=TargetSettings.model_fields["admin"].description
    )
    group.add_argument("--model", default="", help="model name (default: the served model)")
    group.add_argument(
        "--form",
        choices=("ids", "text", "chat"),
        help="form of prompts: token ids, text, or chat messages (default ids)",
    )
    _add(group, TargetSettings, "timeout_s", "--timeout", float, "S")
    _add(group, TargetSettings, "connections", "--connections", int, "N")
    _add(group, TargetSettings, "temperature", "--temperature", float, "T")
    group.add_argument(
        "--no-ignore-eos", action="store_true", help="let outputs end at the end-of-sequence token"
    )
    group.add_argument(
        "--extra-body", metavar="JSON", default="{}", help="additional fields of every HTTP body"
    )
    group.add_argument(
        "--slo-headers", action="store_true", help="send each request's limits as x-slo-…-ms headers"
    )
    _add(group, TargetSettings, "api_key_env", "--api-key-env", str, "NAME")


def add_shared(parser: argparse.ArgumentParser) -> None:
    """Adds the shared flags."""
    _add_load(parser)
    _add_prompts(parser)
    _add_judging(parser)
    _add_generator(parser)


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the prompts."""
    group = parser.add_argument_group("prompts", description=f"lengths and times: {FORMS_HELP}")
    group.add_argument(
        "--dataset",
        choices=("random", "document", "code", "chat"),
        default="random",
        help="synthetic prompts (default random)",
    )
    group.add_argument("--prompts", metavar="FILE", help="own prompts: JSONL, or ShareGPT JSON")
    _add(group, PromptSettings, "input_len", "--input-len", str, "TOKENS")
    _add(group, PromptSettings, "output_len", "--output-len", str, "TOKENS")
    _add(group, PromptSettings, "prefix_len", "--prefix-len", int, "TOKENS")
    _add(group, PromptSettings, "num_prefixes", "--num-prefixes", int, "N")
    _add(group, PromptSettings, "question_len", "--question-len", int, "TOKENS")
    group.add_argument("--turns", metavar="N", help="turns of a conversation (default 1)")
    group.add_argument("--think-time", metavar="S", help="seconds before a user's next turn (default 0)")
    _add(group, PromptSettings, "vocab_size", "--vocab-size", int, "N")


def _add_load(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the load; times and durations are each command's own."""
    group = parser.add_argument_group("load")
    _add(group, LoadSettings, "burstiness", "--burstiness", float, "B")
    _add(group, LoadSettings, "seed", "--seed", int, "K")
    group.add_argument(
        "--class",
        dest="classes",
        nargs="+",
        action="append",
        default=[],
        metavar=("NAME", "KEY:VALUE"),
        help="a share of the requests: weight, tenant, priority, input-len, output-len, limits in ms",
    )
    _add(group, LoadSettings, "cancel_share", "--cancel-share", float, "SHARE")
    _add(group, LoadSettings, "cancel_after", "--cancel-after", str, "S")


def _add_judging(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of limits and validity."""
    group = parser.add_argument_group("limits and validity")
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="METRIC:MS",
        help="limits of a good request, such as ttft:300 tpot:30 itl_p99:100",
    )
    group.add_argument(
        "--preset",
        choices=sorted(PRESETS),
        metavar="NAME",
        help=f"published limits: {', '.join(sorted(PRESETS))}",
    )
    group.add_argument(
        "--attainment", type=float, metavar="SHARE", help="share of requests that must be good (default 0.9)"
    )
    _add(group, JudgeSettings, "max_lag_ms", "--max-lag-ms", float, "MS")
    _add(group, JudgeSettings, "max_read_lag_ms", "--max-read-lag-ms", float, "MS")
    _add(group, JudgeSettings, "max_error_share", "--max-error-share", float, "SHARE")
    _add(group, JudgeSettings, "max_mismatch_share", "--max-mismatch-share", float, "SHARE")


def _add_generator(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the generator and its results."""
    group = parser.add_argument_group("generator and results")
    _add(group, GeneratorSettings, "processes", "--processes", int, "N")
    group.add_argument(
        "--cpus", type=_cpus, default=(), metavar="N,N", help="the processor of each process (default: any)"
    )
    group.add_argument(
        "--warmup",
        type=int,
        metavar="N",
        help="requests before the clock starts (default: twice the expected concurrency)",
    )
    _add(group, GeneratorSettings, "max_in_flight", "--max-in-flight", int, "N")
    group.add_argument(
        "--drain", type=float, metavar="S", help="longest wait after the last send (default: timeout)"
    )
    group.add_argument(
        "--metrics-url",
        action="append",
        default=[],
        metavar="URL",
        help="a Prometheus endpoint to sample during the run",
    )
    group.add_argument("--out", metavar="DIR", help="output folder (default: a new one in loadgen-runs)")
    group.add_argument("--parquet", action="store_true", help="also write the raw record as parquet")
    group.add_argument("--json", action="store_true", help="print one JSON object to stdout")


def settings_of(arguments: argparse.Namespace, load: Mapping[str, Any]) -> Settings:
    """Builds the settings from flags and `load`. Raises LoadgenError for the first invalid one."""
    if arguments.parquet:
        need_pyarrow()
    for stage in load.get("stages", ()):
        Stage.parse(stage)
    try:
        settings = Settings(
            target=_target(arguments),
            prompts=_prompts(arguments),
            load=LoadSettings(
                burstiness=arguments.burstiness,
                seed=arguments.seed,
                classes=tuple(parse_class(words) for words in arguments.classes) or (RequestClass(),),
                cancel_share=arguments.cancel_share,
                cancel_after=arguments.cancel_after,
                **load,
            ),
            judge=_judge(arguments),
            generator=GeneratorSettings(
                processes=arguments.processes,
                cpus=arguments.cpus,
                warmup=arguments.warmup,
                max_in_flight=arguments.max_in_flight,
                drain_s=arguments.drain,
                metrics_urls=tuple(arguments.metrics_url),
            ),
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(step) for step in first["loc"])
        raise LoadgenError(f"{place}: {first['msg']}" if place else first["msg"]) from None
    _check_distributions(settings)
    return settings


def _target(arguments: argparse.Namespace) -> TargetSettings:
    try:
        extra = json.loads(arguments.extra_body)
    except json.JSONDecodeError:
        raise LoadgenError("--extra-body is not a JSON object") from None
    form = arguments.form
    if arguments.prompts is not None:
        form = form_of(read_prompts(arguments.prompts), form or "ids")
    return TargetSettings(
        url=arguments.target,
        admin=arguments.admin,
        model=arguments.model,
        form=form or "ids",
        timeout_s=arguments.timeout,
        connections=arguments.connections,
        ignore_eos=not arguments.no_ignore_eos,
        temperature=arguments.temperature,
        extra_body=extra,
        slo_headers=arguments.slo_headers,
        api_key_env=arguments.api_key_env,
    )


def _prompts(arguments: argparse.Namespace) -> PromptSettings:
    chat = arguments.dataset == "chat"
    return PromptSettings(
        dataset=arguments.dataset,
        file=arguments.prompts,
        input_len=arguments.input_len,
        output_len=arguments.output_len,
        prefix_len=arguments.prefix_len,
        num_prefixes=arguments.num_prefixes,
        question_len=arguments.question_len,
        turns=arguments.turns or (_CHAT_TURNS if chat else "1"),
        think_time=arguments.think_time or (_CHAT_THINK if chat else "0"),
        vocab_size=arguments.vocab_size,
    )


def _judge(arguments: argparse.Namespace) -> JudgeSettings:
    limits = parse_goodput(arguments.goodput)
    attainment = arguments.attainment
    if arguments.preset is not None:
        preset = PRESETS[arguments.preset]
        limits = preset.goodput | limits
        attainment = attainment or preset.attainment
    return JudgeSettings(
        goodput=limits,
        attainment=0.9 if attainment is None else attainment,
        max_lag_ms=arguments.max_lag_ms,
        max_read_lag_ms=arguments.max_read_lag_ms,
        max_error_share=arguments.max_error_share,
        max_mismatch_share=arguments.max_mismatch_share,
    )


def _cpus(text: str) -> tuple[int, ...]:
    return tuple(int(one) for one in text.split(","))


def _check_distributions(settings: Settings) -> None:
    for part in (settings.prompts, settings.load, *settings.load.classes):
        for name in _DISTRIBUTIONS:
            text = getattr(part, name, None)
            if text is not None:
                Distribution.parse(text)


def _add(
    group: argparse._ArgumentGroup, model: type[BaseModel], name: str, flag: str, kind: type, metavar: str
) -> None:
    """Adds a flag whose default and help are those of the setting."""
    field = model.model_fields[name]
    words = (
        f"{field.description} (default {field.default})" if field.description else f"default {field.default}"
    )
    group.add_argument(flag, type=kind, metavar=metavar, default=field.default, help=words)
