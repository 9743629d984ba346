"""The settings of one run, as JSON for its processes and its folder.

Frozen, and an unknown key is an error. Each default is stated here only.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator

from baton.base.admin_address import DEFAULT_ADDRESS

Form = Literal["ids", "text", "chat"]
Dataset = Literal["random", "document", "code", "chat"]
TraceFormat = Literal["mooncake", "azure", "burstgpt"]

# JSON has no infinity; a metronome's burstiness is one.
Burstiness = Annotated[
    float, BeforeValidator(float), PlainSerializer(lambda v: "inf" if math.isinf(v) else v, when_used="json")
]


class Strict(BaseModel):
    """Base of all settings: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TlsSettings(Strict):
    """TLS of a grpcs:// or https:// target."""

    ca_file: str | None = Field(None, description="the target's authorities, PEM; unset: the system's")
    cert_file: str | None = Field(None, description="own certificate, PEM, where the target wants one")
    key_file: str | None = Field(None, description="its private key, PEM")
    server_name: str | None = Field(
        None, description="the DNS name that the target's certificate has; unset: the target's host"
    )

    @model_validator(mode="after")
    def _pair(self) -> TlsSettings:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file: both or neither")
        return self


class TargetSettings(Strict):
    """The target and how it is called."""

    url: str
    admin: str = Field(
        "",
        description="the router's AdminService, for the leak check and metrics of workers; unset: "
        f"{DEFAULT_ADDRESS} if it belongs to the target",
    )
    # Empty: the served model.
    model: str = ""
    form: Form = Field("ids", description="form of prompts")
    timeout_s: float = Field(300.0, gt=0, description="timeout of a request in seconds")
    connections: int = Field(1, ge=1, le=1024, description="gRPC connections of each process")
    ignore_eos: bool = Field(True, description="outputs have exactly the requested length")
    temperature: float = Field(0.0, ge=0, description="sampling temperature; 0: greedy")
    slo_headers: bool = Field(False, description="send each request's limits as x-slo-…-ms")
    # Added to every HTTP body.
    extra_body: dict[str, Any] = Field(default_factory=dict)
    # Determined by the preflight: the extensions that this server accepts.
    extensions: Literal["all", "no_ids", "none"] = "all"
    tls: TlsSettings = TlsSettings()
    api_key_env: str = Field("OPENAI_API_KEY", description="environment variable with the bearer token")


class RequestClass(Strict):
    """A share of the requests with its own tenant, priority, temperature, limits and lengths."""

    name: str = "default"
    weight: float = Field(1.0, gt=0)
    tenant: str | None = None
    priority: int | None = None
    # None: the target's.
    temperature: float | None = Field(None, ge=0)
    # Limits in milliseconds by metric; empty: the run's.
    goodput: dict[str, float] = Field(default_factory=dict)
    input_len: str | None = None
    output_len: str | None = None


class Words(Strict):
    """Text of known length: every word costs `cost` tokens, a prompt `overhead` more."""

    words: tuple[str, ...]
    cost: int = Field(1, ge=1)
    overhead: int = Field(0, ge=0)


class PromptSettings(Strict):
    """Settings of the prompts that are sent."""

    dataset: Dataset = "random"
    # Own prompts instead: JSONL or ShareGPT.
    file: str | None = None
    input_len: str = Field("64", description="tokens of a prompt, or of a user's message")
    output_len: str = Field("32", description="tokens of an output")
    prefix_len: int = Field(0, ge=0, description="tokens of a shared prefix, as a part of a prompt")
    system_len: int = Field(
        0, ge=0, description="tokens of a system prompt that conversations share, before the first message"
    )
    num_prefixes: int = Field(1, ge=1, description="number of different shared prefixes")
    question_len: int = Field(32, ge=1, description="tokens of a question about a shared document")
    turns: str = Field("1", description="turns of a conversation")
    think_time: str = Field("0", description="seconds before a user's next turn")
    vocab_size: int = Field(256, ge=2, description="token ids of prompts are below it")
    # Measured by the preflight where prompts are text.
    words: Words | None = None


class TraceSettings(Strict):
    """Settings of a recorded load."""

    file: str
    format: TraceFormat
    speed: float = Field(1.0, gt=0, description="2 sends twice as fast as recorded")
    length_scale: float = Field(1.0, gt=0, description="lengths times this")


class LoadSettings(Strict):
    """Settings of when requests are sent, how many, and of which kind."""

    rate: float | None = Field(None, gt=0, description="requests (or conversations) per second")
    # As in `--stages`; instead of a rate.
    stages: tuple[str, ...] = ()
    concurrency: int | None = Field(None, ge=1, description="requests in flight in a closed loop")
    burstiness: Burstiness = Field(
        1.0, gt=0, description="burstiness: 1 Poisson, less: burstier, inf: evenly spaced"
    )
    trace: TraceSettings | None = None
    num_requests: int | None = Field(None, ge=1)
    duration_s: float | None = Field(None, gt=0)
    seed: int = Field(
        0, ge=0, lt=2**64, description="seed of arrivals and prompts; commands draw one if it is unset"
    )
    classes: tuple[RequestClass, ...] = (RequestClass(),)
    cancel_share: float = Field(0.0, ge=0, le=1, description="share of requests that their client cancels")
    cancel_after: str = Field("1", description="seconds until they are cancelled")

    @model_validator(mode="after")
    def _one_kind(self) -> LoadSettings:
        kinds = (self.rate is not None, bool(self.stages), self.concurrency is not None, bool(self.trace))
        if sum(kinds) != 1:
            raise ValueError("exactly one of rate, stages, concurrency and trace is needed")
        if self.num_requests is None and self.duration_s is None and not (self.stages or self.trace):
            raise ValueError("num_requests or duration is needed")
        return self

    @property
    def stationary(self) -> bool:
        """True if the load is constant from start to end."""
        return not self.stages and self.trace is None


class JudgeSettings(Strict):
    """Limits of good requests, and of validity."""

    # Limits in milliseconds by metric.
    goodput: dict[str, float] = Field(default_factory=dict)
    attainment: float = Field(0.9, gt=0, lt=1, description="share of requests that must be good")
    max_lag_ms: float = Field(5.0, gt=0, description="INVALID above: p99 lag of the generator in ms")
    # Latencies are too long by this delay.
    max_read_lag_ms: float = Field(3.0, gt=0, description="INVALID above: p99 delay of reading tokens in ms")
    max_error_share: float = Field(0.05, ge=0, le=1, description="INVALID above: share of failed requests")
    max_mismatch_share: float = Field(
        0.01, ge=0, le=1, description="INVALID above: share of wrong token counts"
    )


class GeneratorSettings(Strict):
    """Settings of the generator itself."""

    processes: int = Field(1, ge=1, le=256, description="number of sending processes")
    # The processor of each process; empty: any.
    cpus: tuple[int, ...] = ()
    warmup: int | None = Field(None, ge=0, description="requests before the clock starts; unset: enough")
    max_in_flight: int = Field(
        20_000,
        ge=1,
        description="most requests in flight of each process; further ones are counted, not sent",
    )
    # Prometheus endpoints to sample once per second.
    metrics_urls: tuple[str, ...] = ()
    drain_s: float | None = Field(None, ge=0, description="how long to wait after the last send")

    @model_validator(mode="after")
    def _one_cpu_each(self) -> GeneratorSettings:
        if self.cpus and len(self.cpus) != self.processes:
            raise ValueError(f"{self.processes} processes on {len(self.cpus)} processors: one each")
        return self


class Settings(Strict):
    """All settings of one run."""

    target: TargetSettings
    load: LoadSettings
    prompts: PromptSettings = PromptSettings()
    judge: JudgeSettings = JudgeSettings()
    generator: GeneratorSettings = GeneratorSettings()

    @property
    def shares_prefixes(self) -> bool:
        """True if prompts share prefixes by design, so that a server has parts of them in its cache."""
        prompts = self.prompts
        shared = prompts.prefix_len or prompts.system_len or prompts.turns != "1"
        return bool(shared) or prompts.dataset != "random" or self.load.trace is not None
