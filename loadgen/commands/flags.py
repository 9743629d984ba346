"""The flags that run, search and sweep share, and the settings built from them.

Parsed arguments have the names of the settings, and are None where a flag is not given, so that the default
is the setting's.
"""

from __future__ import annotations

import argparse
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from loadgen.analysis.presets import PRESETS
from loadgen.analysis.slo import parse_goodput
from loadgen.common.errors import LoadgenError
from loadgen.common.settings import (
    GeneratorSettings,
    JudgeSettings,
    LoadSettings,
    PromptSettings,
    RequestClass,
    Settings,
    TargetSettings,
    TlsSettings,
)
from loadgen.load.arrivals import Stage
from loadgen.load.distributions import FORMS_HELP, Distribution
from loadgen.load.prompt_files import form_of, read_prompts
from loadgen.reports.write import need_pyarrow

_DISTRIBUTIONS = ("input_len", "output_len", "turns", "think_time", "cancel_after")
# Defaults of a conversation.
_CHAT = {"turns": "uniform:2-6", "think_time": "exp:2"}
_SEED_BITS = 32
# The fields of a class in `--class chat weight:3 tenant:acme priority:1 input-len:200 ttft:300 tpot:30`.
_CLASS_FIELDS: dict[str, Callable[[str], Any]] = {
    "weight": float,
    "tenant": str,
    "priority": int,
    "temperature": float,
    "input-len": str,
    "output-len": str,
}


def add_target(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the target."""
    group = parser.add_argument_group("target")
    group.add_argument(
        "url",
        metavar="TARGET",
        help="grpc(s)://HOST:PORT (Baton) or http(s)://HOST:PORT (OpenAI)",
    )
    group.add_argument(
        "--admin", default="", metavar="HOST:PORT", help=TargetSettings.model_fields["admin"].description
    )
    group.add_argument("--model", default="", help="model name (default: the served model)")
    group.add_argument(
        "--form",
        choices=("ids", "text", "chat"),
        default="ids",
        help="form of prompts: token ids, text, or chat messages (default ids)",
    )
    _add(group, TargetSettings, timeout_s="S", connections="N", temperature="T")
    group.add_argument(
        "--no-ignore-eos",
        dest="ignore_eos",
        action="store_false",
        help="let outputs end at the end-of-sequence token",
    )
    group.add_argument(
        "--extra-body", metavar="JSON", default="{}", help="additional fields of every HTTP body"
    )
    group.add_argument(
        "--slo-headers", action="store_true", help="send each request's limits as x-slo-…-ms headers"
    )
    _add(group, TargetSettings, api_key_env="NAME")
    for name, metavar in (
        ("ca_file", "FILE"),
        ("cert_file", "FILE"),
        ("key_file", "FILE"),
        ("server_name", "NAME"),
    ):
        words = TlsSettings.model_fields[name].description
        group.add_argument("--" + name.replace("_", "-"), metavar=metavar, help=words)


def add_shared(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that commands share."""
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
    group.add_argument("--prompts", dest="file", metavar="FILE", help="own prompts: JSONL, or ShareGPT JSON")
    _add(group, PromptSettings, input_len="TOKENS", output_len="TOKENS", prefix_len="TOKENS")
    _add(group, PromptSettings, system_len="TOKENS", num_prefixes="N", question_len="TOKENS")
    _add(group, PromptSettings, turns="N", think_time="S", vocab_size="N")


def _add_load(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the load; times and durations are each command's own."""
    group = parser.add_argument_group("load")
    _add(group, LoadSettings, burstiness="B")
    group.add_argument(
        "--seed", type=int, metavar="K", help="seed of arrivals and prompts (default: drawn for each run)"
    )
    group.add_argument(
        "--class",
        dest="classes",
        nargs="+",
        action="append",
        default=[],
        metavar=("NAME", "KEY:VALUE"),
        help="a share of the requests: weight, tenant, priority, temperature, input-len, output-len, "
        "limits in ms",
    )
    _add(group, LoadSettings, cancel_share="SHARE", cancel_after="S")


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
    _add(group, JudgeSettings, attainment="SHARE", max_lag_ms="MS", max_read_lag_ms="MS")
    _add(group, JudgeSettings, max_error_share="SHARE", max_mismatch_share="SHARE")


def _add_generator(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the generator and its results."""
    group = parser.add_argument_group("generator and results")
    _add(group, GeneratorSettings, processes="N")
    group.add_argument(
        "--cpus", type=_cpus, default=(), metavar="N,N", help="the processor of each process (default: any)"
    )
    group.add_argument(
        "--warmup",
        type=int,
        metavar="N",
        help="requests before the clock starts (default: twice the expected concurrency)",
    )
    _add(group, GeneratorSettings, max_in_flight="N")
    group.add_argument(
        "--drain",
        dest="drain_s",
        type=float,
        metavar="S",
        help="longest wait after the last send (default: timeout)",
    )
    group.add_argument(
        "--metrics-url",
        dest="metrics_urls",
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
    if arguments.seed is None:  # no server has these prompts in its cache
        arguments.seed = secrets.randbits(_SEED_BITS)
    chat = _CHAT if arguments.dataset == "chat" else {}
    try:
        classes = tuple(parse_class(words) for words in arguments.classes) or (RequestClass(),)
        settings = Settings(
            target=_target(arguments),
            prompts=PromptSettings(**chat | _given(arguments, PromptSettings)),
            load=LoadSettings(**_given(arguments, LoadSettings) | {"classes": classes, **load}),
            judge=_judge(arguments),
            generator=GeneratorSettings(**_given(arguments, GeneratorSettings)),
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(step) for step in first["loc"])
        raise LoadgenError(f"{place}: {first['msg']}" if place else first["msg"]) from None
    for stage in settings.load.stages:
        Stage.parse(stage)
    _check_distributions(settings)
    return settings


def parse_class(words: Sequence[str]) -> RequestClass:
    """Parses a class: its name, its fields, and limits. Raises LoadgenError for an invalid word."""
    name, *rest = words
    fields: dict[str, Any] = {"name": name}
    limits: list[str] = []
    for word in rest:
        key, _, value = word.partition(":")
        if key not in _CLASS_FIELDS:
            limits.append(word)
            continue
        try:
            fields[key.replace("-", "_")] = _CLASS_FIELDS[key](value)
        except ValueError:
            raise LoadgenError(f"--class {name}: {word!r} is not a valid {key}") from None
    return RequestClass(**fields, goodput=parse_goodput(limits))


def _target(arguments: argparse.Namespace) -> TargetSettings:
    given = _given(arguments, TargetSettings)
    try:
        given["extra_body"] = json.loads(arguments.extra_body)
    except json.JSONDecodeError:
        raise LoadgenError("--extra-body is not a JSON object") from None
    if arguments.file is not None:
        given["form"] = form_of(read_prompts(arguments.file), arguments.form)
    given["tls"] = TlsSettings(**_given(arguments, TlsSettings))
    return TargetSettings(**given)


def _judge(arguments: argparse.Namespace) -> JudgeSettings:
    given = _given(arguments, JudgeSettings)
    limits = parse_goodput(arguments.goodput)
    if arguments.preset is not None:
        preset = PRESETS[arguments.preset]
        given = {"attainment": preset.attainment} | given
        limits = preset.goodput | limits
    return JudgeSettings(**given | {"goodput": limits})


def _given(arguments: argparse.Namespace, model: type[BaseModel]) -> dict[str, Any]:
    """The settings of `model` that were given as flags."""
    return {name: v for name in model.model_fields if (v := getattr(arguments, name, None)) is not None}


def _cpus(text: str) -> tuple[int, ...]:
    return tuple(int(one) for one in text.split(","))


def _check_distributions(settings: Settings) -> None:
    for part in (settings.prompts, settings.load, *settings.load.classes):
        for name in _DISTRIBUTIONS:
            text = getattr(part, name, None)
            if text is not None:
                Distribution.parse(text)


def _add(group: argparse._ArgumentGroup, model: type[BaseModel], **metavars: str) -> None:
    """Adds the flag of each of these settings, with the type, default and help of the setting."""
    for name, metavar in metavars.items():
        field = model.model_fields[name]
        flag = "--" + name.removesuffix("_s").replace("_", "-")
        default = f"default {field.default}"
        words = f"{field.description} ({default})" if field.description else default
        group.add_argument(flag, dest=name, type=type(field.default), metavar=metavar, help=words)
