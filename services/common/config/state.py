"""Configuration of the soft state in Redis."""

from __future__ import annotations

from pydantic import Field

from services.common.config.strict_model import StrictModel

# In place of Redis's URL: neither registry nor journal.
NO_STATE = "none"


class StateSettings(StrictModel):
    """What an operator may set of where soft state is kept."""

    redis_url: str | None = Field(
        None, repr=False, description="unset: a server of our own, which needs nothing; none: no state"
    )
    namespace: str | None = Field(
        None,
        pattern="^[A-Za-z0-9_-]{1,64}$",
        description="what shares it is one cluster; unset: this one's alone",
    )


class StateConfig(StrictModel):
    """Where a process finds the cluster's soft state. Its text form shows no secret."""

    redis_url: str = Field(repr=False)
    namespace: str
    cluster_id: str = Field("", description="goes before the names of its workers in the registry")
    embedded: bool = Field(False, description="a server of `baton up`'s own")
    journal_key: str = Field("", repr=False, description="hex; empty: what is written is for nobody else")
