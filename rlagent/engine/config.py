"""Settings of the engines that `rlagent serve` starts or attaches to."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class EngineConfig(BaseModel):
    """Which engine, how many, and the embedded engine's limits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["embedded", "attach"] = "embedded"
    urls: tuple[str, ...] = Field((), description="running SGLang-compatible servers, for kind = 'attach'")
    count: int = Field(1, ge=1, description="embedded engines to start")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    threads: int = Field(1, ge=1, description="torch threads of each engine on the CPU")
    max_running: int = Field(64, ge=1, description="sequences decoded together")
    max_total_tokens: int = Field(65536, ge=256, description="tokens of KV cache, prefix cache included")
    prefill_tokens: int = Field(2048, ge=16, description="prompt tokens computed in one forward")
    seed: int = 0
    start_timeout_s: float = Field(120.0, gt=0)
    request_timeout_s: float = Field(600.0, gt=0)
