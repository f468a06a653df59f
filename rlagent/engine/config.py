"""Settings of the engines that `rlagent serve` starts or attaches to."""

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class SglangConfig(BaseModel):
    """SGLang servers that `rlagent serve` starts, for kind = "sglang". Settings of [engine] that SGLang has too hold for it as well."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    python: Path | None = Field(None, description="the Python of the environment that has sglang installed")
    tensor: int = Field(1, ge=1, description="tensor parallelism of each server")
    data: int = Field(1, ge=1, description="must be 1: engine.count starts several servers")
    port: int = Field(0, ge=0, le=65535, description="port of the first server, the others follow; 0 takes free ones")
    args: tuple[str, ...] = Field((), description="more flags of sglang.launch_server, as they are; later ones win")

    @model_validator(mode="after")
    def _one_replica(self) -> Self:
        if self.data > 1:
            raise ValueError(
                f"engine.sglang.data = {self.data}: SGLang takes no tensors and no broadcast for replicas inside one server; "
                f"set engine.count = {self.data}, which starts a server for each"
            )
        return self


class EngineConfig(BaseModel):
    """Which engine, how many, and the embedded engine's limits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["embedded", "sglang", "attach"] = "embedded"
    urls: tuple[str, ...] = Field((), description="running SGLang-compatible servers, for kind = 'attach'")
    count: int = Field(1, ge=1, description="engines to start")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    threads: int = Field(1, ge=1, description="torch threads of each engine on the CPU")
    max_running: int = Field(64, ge=1, description="sequences decoded together; SGLang on a GPU decides by itself")
    max_total_tokens: int = Field(
        65536, ge=256, description="tokens of KV cache, prefix cache included; SGLang on a GPU decides by itself"
    )
    prefill_tokens: int = Field(2048, ge=16, description="prompt tokens computed in one forward (embedded)")
    seed: int = 0
    sglang: SglangConfig = SglangConfig()
    start_timeout_s: float = Field(120.0, gt=0)
    hang_timeout_s: float = Field(
        180.0, gt=0, description="a started engine that answers nothing for so long is ended and started again"
    )
    request_timeout_s: float = Field(600.0, gt=0)
