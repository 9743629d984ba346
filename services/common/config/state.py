"""Configuration of the soft state in Redis."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from services.common.config.types import StrictModel

# In place of Redis's URL: neither registry nor journal.
NO_STATE = "none"


class StateSettings(StrictModel):
    """The operator's settings of the soft state in Redis."""

    redis_url: str | None = Field(None, repr=False, description="unset: an embedded server; none: no state")
    namespace: str | None = Field(
        None,
        pattern="^[A-Za-z0-9_-]{1,64}$",
        description="processes with one namespace form one cluster; unset: a random one",
    )


class StateConfig(StrictModel):
    """Where a process finds the cluster's soft state. Its repr shows no secret."""

    redis_url: str = Field(repr=False)
    redis_url_file: Path | None = Field(
        None, description="file with the URL, read again where the server refuses the credentials"
    )
    namespace: str
    cluster_id: str = Field("", description="precedes the names of its workers in the registry")
    embedded: bool = Field(False, description="the server is the embedded one of `baton up`")
    journal_key: str = Field(
        "", repr=False, description="hex; empty: a random one, so that no other router can read the journal"
    )
