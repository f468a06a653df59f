"""Settings of the data buffer."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class BufferConfig(BaseModel):
    """Durability, staleness and lease rules."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path | None = Field(None, description="the SQLite file; default: buffer.db in the run directory")
    url: str | None = Field(
        None,
        pattern=r"^postgres(ql)?://",
        description="postgresql://user@host/db: the database that several replicas of the router share, instead of the file",
    )
    max_staleness: int = Field(1, ge=0, description="oldest token of a batch lags at most this many publishes")
    abandoned: Literal["use", "drop"] = Field("use", description="tokens of versions that a resume left behind")
    lease_s: float = Field(600.0, gt=0)
    group_deadline_s: float = Field(
        600.0, gt=0, description="a group not complete by then is handed out short, the missing counted"
    )
    ungrouped_size: int = Field(
        8, ge=1, description="this many finished sessions without a group make one unit of a batch"
    )
    min_group_rollouts: int = Field(
        1, ge=1, description="a short group with fewer valid rollouts is dropped and counted"
    )
