"""The parts of the tree that each command reads, and the settings that it must be given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from services.common.config.settings_tree.listing import Setting, settings_of

# Secrets that a file of their own can hold, by the setting that names the file.
SECRET_FILES = {
    "cluster_secret": "cluster_secret_file",
    "prefix_secret": "prefix_secret_file",
    "state.redis_url": "state.redis_url_file",
}


@dataclass(frozen=True, slots=True)
class View:
    """The part of the tree that one command reads.

    `keys`: settings and whole sections by path; empty: the whole tree, as for a command that reads a little
    of the file of any other. `required`: those that it cannot do without; a secret's file stands for the
    secret. `defaults`: its own, by path. `secrets`: those that are read from the files that hold them.
    """

    command: str
    keys: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    defaults: Mapping[str, object] = field(default_factory=dict)
    secrets: tuple[str, ...] = tuple(SECRET_FILES)

    @property
    def settings(self) -> Iterator[Setting]:
        """The settings that it reads, fixed ones too."""
        return (one for one in settings_of() if self.reads(one.path))

    def reads(self, path: str) -> bool:
        """Returns True where a setting is part of the view."""
        return not self.keys or any(path == key or path.startswith(f"{key}.") for key in self.keys)


_PROCESS = (
    "model",
    "served_model_name",
    "cluster_secret_file",
    "prefix_secret_file",
    "state.redis_url",
    "state.redis_url_file",
    "state.namespace",
    "require_tls",
    "drain_s",
    "start_timeout_s",
    "log_level",
    "tracing",
    "model_source",
)
_WORKERS = (*_PROCESS, "tls.internal", "engine", "transfer", "worker")
_LOADING = {"start_timeout_s": 1800.0}
_JOINING = ("cluster_secret", "state.namespace", "state.redis_url")

UP = View(
    "baton up",
    (
        *("model", "served_model_name", "prefill", "decode", "both", "engine", "engine_of_role", "transfer"),
        *("router", "auth", "supervision", "state.redis_url", "state.namespace", "tracing", "prefix_secret"),
        *("cluster_secret", "cluster_secret_file", "worker_metrics_port", "start_timeout_s", "drain_s"),
        *("log_level", "router_restarts"),
    ),
)
ROUTER = View(
    "baton router",
    (*_PROCESS, "state.journal_key_file", "tls", "auth", "router"),
    ("model", *_JOINING),
    _LOADING,
)
WORKER = View("baton worker", (*_WORKERS, "cluster_secret", "prefix_secret"), ("model",), _LOADING)
WORKER_WITH_FILE = View(WORKER.command, WORKER.keys, ("model", *_JOINING), _LOADING)
WORKER_GROUP = View(
    "baton worker group", (*_WORKERS, "worker_metrics_port"), WORKER_WITH_FILE.required, _LOADING
)
SUPERVISE = View(
    "baton ray supervise",
    (*WORKER_GROUP.keys, "engine_of_role", "prefill", "decode", "supervision"),
    WORKER_GROUP.required,
    {**_LOADING, "prefill": 1, "decode": 1},
    secrets=(),
)
KEYS = View("baton keys", required=_JOINING, secrets=("cluster_secret", "state.redis_url"))
KERNELS = View("baton model compile", ("model", "engine"), ("model",), secrets=())
FETCH_MODEL = View("baton model fetch", (), ("model", "model_source"), _LOADING, secrets=())
