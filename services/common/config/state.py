"""Configuration of the soft state in Redis."""

from __future__ import annotations

from pathlib import Path

from services.common.config.types import StrictModel, fixed, setting

# In place of Redis's URL: neither registry nor journal.
NO_STATE = "none"


class StateConfig(StrictModel):
    """The place of the cluster's soft state. Its repr shows no secret.

    In the configuration of a process, URL and namespace are set.
    """

    redis_url: str | None = setting(
        None,
        "URL of the Redis that has the registry and the journal, such as `redis://10.0.0.5:6379/0`; `none`: "
        "neither; unset: `baton up` starts a server of its own",
        flag=True,
        secret=True,
    )
    redis_url_file: Path | None = setting(
        None, "file with the URL of Redis, for one with a password; read again where Redis refuses it"
    )
    namespace: str | None = setting(
        None,
        "name of the cluster in Redis: processes with one name form one cluster; unset: a random one",
        flag="redis_namespace",
        pattern="^[A-Za-z0-9_-]{1,64}$",
    )
    journal_key_file: Path | None = setting(
        None,
        "file with the key, 64 hex digits, of journal and stored responses, the same for all routers; "
        "unset: a random one for each",
    )
    cluster_id: str = fixed("", "`baton up` makes one at each start; it precedes the names of its workers")
    embedded: bool = fixed(False, "it follows from redis_url, which is unset for the server of `baton up`")
    journal_key: str = fixed("", "the key is in the file that journal_key_file names", repr=False)
