"""Settings of the learner: algorithm, optimizer, batching, layout, weight sync, checkpoints."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class AdvantageConfig(_Part):
    """How rewards become per-token advantages. `name` is a registered estimator or file.py:function."""

    name: str = "grpo"
    epsilon: float = Field(1e-6, ge=0)
    ungrouped: Literal["batch_mean", "error"] = "batch_mean"


class LossConfig(_Part):
    """The policy loss. `name` is a registered loss or file.py:function."""

    name: str = "ppo"
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.28, gt=0)
    dual_clip: float | None = Field(None, gt=1)
    aggregation: Literal[
        "token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "constant_length", "rollout_mean"
    ] = "token_mean"
    constant_length: int = Field(1024, ge=1)
    kl_coef: float = Field(0.0, ge=0, description="weight of KL to the frozen reference; 0 loads no reference")
    kl_estimator: Literal["k1", "k2", "k3", "k3_unbiased"] = "k3"
    entropy_coef: float = 0.0


class CorrectionConfig(_Part):
    """Correction of the engine/learner mismatch, on w = exp(lp_old - lp_roll)."""

    name: str = "none"
    level: Literal["token", "sequence", "geometric"] = "token"
    low: float = Field(0.5, ge=0)
    high: float = Field(2.0, gt=0)
    veto: float | None = None


class OptimizerConfig(_Part):
    """AdamW with warm-up and a schedule, counted in learner steps."""

    lr: float = Field(1e-6, gt=0)
    min_lr: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    clip_grad: float = Field(1.0, ge=0, description="global gradient norm; 0 does not clip")
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"


class BatchConfig(_Part):
    """How many groups make a step, and how rows are packed into microbatches."""

    groups: int = Field(16, ge=1, description="groups a step")
    tokens: int = Field(16384, ge=16, description="token budget of one microbatch of one data-parallel rank")
    updates: int = Field(1, ge=1, description="optimizer updates a step; the batch is split by rollouts")
    max_row_tokens: int | None = Field(
        None, description="longer rows are dropped and counted; default: the model's context"
    )


class ParallelConfig(_Part):
    """The learner's process layout; tensor * pipeline * context * data processes are started."""

    tensor: int = Field(1, ge=1)
    pipeline: int = Field(1, ge=1)
    context: int = Field(1, ge=1)
    expert: int = Field(1, ge=1)
    data: int = Field(1, ge=1)
    sequence: bool = False

    @property
    def world_size(self) -> int:
        """Number of learner processes."""
        return self.tensor * self.pipeline * self.context * self.data

    @model_validator(mode="after")
    def _sequence_needs_tensor(self) -> "ParallelConfig":
        if self.sequence and self.tensor == 1:
            raise ValueError(
                "sequence parallelism needs parallel.tensor of at least 2; set it, or set parallel.sequence = false"
            )
        return self


class SyncConfig(_Part):
    """How weights reach the engines."""

    transport: Literal["tensor", "distributed", "disk", "delta"] = "tensor"
    bucket_bytes: int = Field(512 * 1024 * 1024, ge=1024)
    verify_every: int = Field(1, ge=0, description="compare checksums every N publishes; 0 never")
    snapshot_every: int = Field(
        10, ge=1, description="write a full Hugging Face snapshot every N publishes, for recovery"
    )


class CheckpointConfig(_Part):
    """When the loop is saved, and how many saves are kept."""

    every: int = Field(10, ge=1, description="learner steps between saves")
    keep: int = Field(2, ge=1, description="newest saves that are kept")
    asynchronous: bool = Field(
        True, description="write a save beside the following steps; false waits until it is on disk"
    )


class LearnerConfig(_Part):
    """Everything the learner needs besides the model."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int = Field(1, ge=1, description="torch threads of each rank on the CPU")
    recompute: Literal["none", "full"] = "none"
    old_logprobs: Literal["recompute", "rollout"] = Field("recompute", description="the proximal policy's logprobs")
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    correction: CorrectionConfig = CorrectionConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    batch: BatchConfig = BatchConfig()
