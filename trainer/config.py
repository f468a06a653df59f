"""Settings of the learner: algorithm, optimizer, batching, layout, weight sync, checkpoints."""

import difflib
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


# Names only, so that a setting is checked where torch is not imported; the functions stand in advantage.py, loss.py, correction.py.
ESTIMATORS: Final = (
    "grpo", "dr_grpo", "rloo", "opo", "reinforce_pp", "reinforce_pp_baseline", "remax", "gdpo", "turn_level", "gae",
    "preference",
)  # fmt: skip
LOSSES: Final = (
    "ppo", "decoupled_ppo", "cispo", "gspo", "gmpo", "sapo", "topr", "reinforce", "opd", "sft", "dpo",
)  # fmt: skip
CORRECTIONS: Final = ("none", "tis", "mis", "icepop")


def _known(name: str, names: tuple[str, ...]) -> str:
    """The name itself, or an error that says what is known. With a colon in it, it names a function by path."""
    if name in names or ":" in name:
        return name
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise ValueError(f"unknown name; {hint}known: {', '.join(names)}; or give file.py:function")


class OverlongConfig(_Part):
    """DAPO's soft punishment of long rollouts: min(-(L - (max_tokens - buffer)) / buffer * penalty, 0), not below -penalty."""

    max_tokens: int | None = Field(None, ge=1, description="sampled tokens of a rollout, Lmax; none: no punishment")
    buffer: int = Field(256, ge=1, description="the punishment begins so many tokens before max_tokens")
    penalty: float = Field(1.0, ge=0)

    @model_validator(mode="after")
    def _buffer_fits(self) -> "OverlongConfig":
        if self.max_tokens is not None and self.buffer > self.max_tokens:
            raise ValueError(
                f"buffer = {self.buffer} is more than max_tokens = {self.max_tokens}; choose a smaller buffer"
            )
        return self


class AdvantageConfig(_Part):
    """How rewards become per-token advantages. `name` is a registered estimator or file.py:function."""

    name: str = "grpo"
    epsilon: float = Field(1e-6, ge=0)
    ungrouped: Literal["batch_mean", "error"] = "batch_mean"
    gamma: float = Field(1.0, gt=0, le=1, description="discount a token (a turn for turn_level)")
    lam: float = Field(1.0, ge=0, le=1, description="lambda of gae")
    whiten: bool = Field(True, description="gae: advantages to mean 0 and deviation 1 over the step's sampled tokens")
    min_deviation: float = Field(
        0.1, ge=0, description="gae: whitening divides by at least this, in units of reward; 0 whitens whatever is left"
    )
    components: dict[str, float] = Field({}, description="gdpo: weight of each reward component; none: 1 each")
    overlong: OverlongConfig = OverlongConfig()

    @field_validator("name")
    @classmethod
    def _name_is_known(cls, name: str) -> str:
        return _known(name, ESTIMATORS)


class LossConfig(_Part):
    """The policy loss. `name` is a registered loss or file.py:function."""

    name: str = "ppo"
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.28, gt=0)
    dual_clip: float | None = Field(None, gt=1)
    tau_positive: float = Field(1.0, gt=0, description="sapo: temperature of the gate where the advantage is positive")
    tau_negative: float = Field(1.05, gt=0, description="sapo: and where it is not")
    beta: float = Field(0.1, gt=0, description="dpo: strength of the tie to the reference")
    aggregation: Literal[
        "token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "constant_length", "rollout_mean"
    ] = "token_mean"
    constant_length: int = Field(1024, ge=1)
    kl_coef: float = Field(0.0, ge=0, description="weight of KL to the frozen reference; 0 loads no reference")
    kl_estimator: Literal["k1", "k2", "k3", "k3_unbiased"] = "k3"
    kl_in: Literal["loss", "reward"] = Field(
        "loss", description="reward: taken off the rewards of the tokens that follow"
    )
    entropy_coef: float = 0.0

    @field_validator("name")
    @classmethod
    def _name_is_known(cls, name: str) -> str:
        return _known(name, LOSSES)


class CorrectionConfig(_Part):
    """Correction of the engine/learner mismatch, on w = exp(lp_old - lp_roll)."""

    name: str = "none"
    level: Literal["token", "sequence", "geometric"] = "token"
    low: float = Field(0.5, ge=0)
    high: float = Field(2.0, gt=0)
    veto: float | None = Field(None, gt=0, description="a row with a token whose w is below this is left out")

    @model_validator(mode="after")
    def _check(self) -> "CorrectionConfig":
        if self.name not in CORRECTIONS:
            raise ValueError(f"name = {self.name!r} is unknown; known: {', '.join(CORRECTIONS)}")
        if self.low > self.high:
            raise ValueError(
                f"low = {self.low} is above high = {self.high}, so every token is rejected; set low <= high"
            )
        return self


class ReferenceConfig(_Part):
    """The frozen reference policy of the KL term."""

    refresh_every: int = Field(0, ge=0, description="learner steps after which it becomes the policy; 0 never")
    verify: bool = Field(True, description="prove at each step, by a checksum, that it did not move otherwise")


class TeacherConfig(_Part):
    """The engine whose model is the teacher of on-policy distillation (learner.loss.name = "opd")."""

    url: str | None = Field(None, description="of its SGLang-compatible HTTP surface")
    concurrency: int = Field(16, ge=1, description="rows scored at once")
    timeout_s: float = Field(300.0, gt=0, description="of one row")


class CriticConfig(_Part):
    """The value model of gae: the policy's architecture with a scalar head, its own optimizer, trained beside the policy."""

    lr: float = Field(1e-5, gt=0)
    clip: float = Field(0.2, gt=0, description="a value moves at most this far from the old one in a step")
    warmup_steps: int = Field(0, ge=0, description="first steps in which only the critic is trained")


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

    @model_validator(mode="after")
    def _rates_fall(self) -> "OptimizerConfig":
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr = {self.min_lr} is above lr = {self.lr}; set min_lr <= lr")
        return self


class LoraConfig(_Part):
    """Low-rank adapters on a frozen base, in place of training all weights. Published and exported merged."""

    rank: int = Field(0, ge=0, description="of each adapter; 0 trains all weights")
    alpha: float = Field(32.0, gt=0, description="adapters count alpha / rank times")
    targets: tuple[Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
        description="matrices of each layer that get an adapter",
    )


class BatchConfig(_Part):
    """How many groups make a step, and how rows are packed into microbatches."""

    groups: int = Field(16, ge=1, description="groups a step")
    tokens: int = Field(16384, ge=16, description="token budget of one microbatch of one data-parallel rank")
    share_prefixes: bool = Field(
        True,
        description="tokens that rows of a microbatch begin with in common (a group's prompt, a rollout's history before a branch) are "
        "computed once; no logprob changes but by rounding. Without effect under context parallelism",
    )
    updates: int = Field(1, ge=1, description="optimizer updates a step; the batch is split by rollouts")
    refill: int = Field(
        0,
        ge=0,
        description="DAPO's dynamic sampling: groups without variance are dropped and up to so many more asked for",
    )
    max_row_tokens: int | None = Field(
        None, description="longer rows are dropped and counted; default: the model's context"
    )


class ParallelConfig(_Part):
    """The learner's process layout; tensor * pipeline * context * data processes are started."""

    tensor: int = Field(1, ge=1)
    pipeline: int = Field(1, ge=1)
    virtual_pipeline: int = Field(
        1,
        ge=1,
        description="chunks of layers of each pipeline stage, run interleaved: stages wait less for one another",
    )
    context: int = Field(1, ge=1)
    expert: int = Field(1, ge=1, description="parts in which a stage's tensor * context * data ranks hold its experts")
    data: int = Field(1, ge=1)
    sequence: bool = False
    distributed_optimizer: bool = Field(
        False, description="each data-parallel rank keeps and updates its share of AdamW's state only (ZeRO-1)"
    )

    @property
    def world_size(self) -> int:
        """Number of learner processes."""
        return self.tensor * self.pipeline * self.context * self.data

    @model_validator(mode="after")
    def _axes_agree(self) -> "ParallelConfig":
        if self.sequence and self.tensor == 1:
            raise ValueError(
                "sequence parallelism needs parallel.tensor of at least 2; set it, or set parallel.sequence = false"
            )
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ValueError(
                f"parallel.virtual_pipeline = {self.virtual_pipeline} cuts pipeline stages, and parallel.pipeline is 1; set "
                "parallel.pipeline to at least 2, or parallel.virtual_pipeline = 1"
            )
        ranks = self.tensor * self.context * self.data
        if ranks % self.expert:
            raise ValueError(
                f"parallel.expert = {self.expert} does not divide the {ranks} ranks of a stage (tensor * context * data), over "
                "which experts are dealt out; choose a divisor"
            )
        return self


class SyncConfig(_Part):
    """How weights reach the engines."""

    transport: Literal["tensor", "distributed", "disk", "delta"] = "tensor"
    bucket_bytes: int = Field(512 * 1024 * 1024, ge=1024)
    verify_every: int = Field(1, ge=0, description="compare checksums every N publishes; 0 never")
    release_kv_cache: bool = Field(
        False,
        description="engines on the learner's GPUs stop, and lend it their KV cache's memory, while it trains; SGLang needs "
        "--enable-memory-saver, and router.publish_lease_s covers the step",
    )
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
    replay_experts: bool = Field(
        True, description="experts that router.record_experts has recorded are taken as the engine chose them (R3)"
    )
    old_logprobs: Literal["recompute", "rollout"] = Field("recompute", description="the proximal policy's logprobs")
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    correction: CorrectionConfig = CorrectionConfig()
    reference: ReferenceConfig = ReferenceConfig()
    critic: CriticConfig = CriticConfig()
    teacher: TeacherConfig = TeacherConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig = LoraConfig()
    batch: BatchConfig = BatchConfig()

    @model_validator(mode="after")
    def _parts_agree(self) -> "LearnerConfig":
        loss, advantage = self.loss.name, self.advantage.name
        if loss == "decoupled_ppo" and self.correction.name != "none":
            raise ValueError(
                f"learner.correction.name = {self.correction.name!r} beside learner.loss.name = 'decoupled_ppo', which has "
                "the factor exp(lp_old - lp_rollout) already; set learner.correction.name = 'none', or the loss to 'ppo'"
            )
        if (loss == "dpo") != (advantage == "preference"):
            raise ValueError(
                f"learner.loss.name = {loss!r} with learner.advantage.name = {advantage!r}: 'dpo' and 'preference' go "
                "together; set both, or neither"
            )
        if loss == "opd" and self.teacher.url is None:
            raise ValueError(
                "learner.loss.name = 'opd' needs a teacher, and learner.teacher.url is not set; give the URL of its engine"
            )
        if self.lora.rank and self.reference.refresh_every:
            raise ValueError(
                f"learner.reference.refresh_every = {self.reference.refresh_every} with learner.lora.rank = {self.lora.rank}: "
                "the reference of adapters is their base, which never moves; set refresh_every = 0"
            )
        if self.loss.kl_in == "reward" and loss in ("sft", "dpo", "opd"):
            raise ValueError(
                f"learner.loss.kl_in = 'reward' has no meaning for learner.loss.name = {loss!r}; set 'loss'"
            )
        return self

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the policy with a frozen one."""
        return self.loss.kl_coef > 0 or self.loss.name == "dpo"
