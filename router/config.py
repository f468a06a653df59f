"""Settings of the router and of the sampling that belongs to the run."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from rlagent.router.families import FamilyName


class SamplingConfig(BaseModel):
    """Sampling of trained sessions. The client's own wishes are recorded, and overridden or refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: float = Field(1.0, ge=0.0, le=10.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(-1, ge=-1)
    max_tokens: int = Field(
        1024, ge=1, description="cap of one call's completion, in tokens; the client may ask for less"
    )
    client: Literal["override", "refuse"] = "override"


class RouterConfig(BaseModel):
    """Where the router listens and what it allows."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535, description="0 takes a free port")
    admin_key: str | None = Field(None, description="needed for any bind that is not loopback")
    open_sessions_by_key: bool | None = Field(
        None, description="a key never seen opens a session; default: only on loopback"
    )
    session_ttl_s: float = Field(3600.0, gt=0)
    publish_lease_s: float = Field(120.0, gt=0)
    max_body_bytes: int = Field(64 * 1024 * 1024, gt=0)
    max_images: int = Field(64, ge=0, description="images in one request, its history included")
    max_image_bytes: int = Field(20 * 1024 * 1024, gt=0, description="of one image, as it is encoded")
    model_name: str = Field("policy", description="the name under which /v1/models lists the policy")
    untrained_models: tuple[str, ...] = Field(
        (), description="model names whose calls are recorded but never trained on"
    )
    family: FamilyName | None = Field(
        None,
        description="how the model writes reasoning and tool calls; default: as the marks in its chat template tell. "
        "text: no tool calls are read",
    )
    reasoning: Literal["all", "template"] = Field(
        "all",
        description="earlier turns' reasoning: kept as sampled, or as the chat template keeps it (a dropped one starts a new row)",
    )
    pause_mode: Literal["abort", "retract", "in_place"] = Field(
        "abort", description="how engines pause for a publish; aborted calls are resumed with the tokens they have"
    )
    record_experts: bool = Field(
        False,
        description="of a mixture of experts: engines tell which experts they gave to each token, for learner.replay_experts; an "
        "attached SGLang server needs --enable-return-routed-experts",
    )
    drain_s: float = Field(30.0, gt=0, description="how long finish and shutdown wait for calls in flight")
