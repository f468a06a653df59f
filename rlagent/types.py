"""The records of rlagent, in the order in which data flows through them.

    agent call -> Call -> Session -> Trajectory -> Rollout -> Group -> (lease) -> Batch -> learner step

Invariant of the whole file: concatenating the pieces along one path reproduces, id for id, what the engine was given
and what it sampled. Nothing here is ever re-tokenised. Arrays are numpy (no torch: `rlagent serve` imports this file);
`[n]` is a length, dtypes are stated, and every record is frozen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

Int16Array = npt.NDArray[np.int16]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

GREEDY: Final = "greedy"
"""In a reward's `calls` no call, but the task's greedy rollout: its reward is the baseline of ReMax."""

OPENED_BY_DRIVER: Final[Mapping[str, object]] = {"opened_by": "rlagent train"}
"""Metadata of the sessions of a run's own rollouts: they end with the driver; those of agents from outside go on without it."""

Origin = Literal["extended", "fresh"]
Delivery = Literal["generating", "committed", "delivered", "orphan"]
SessionState = Literal["open", "sealed", "failed", "expired"]
FinishReason = Literal["stop", "length", "abort"]
ParseStatus = Literal["text", "tool_calls", "malformed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens [start, end) of one choice were sampled by policy `version`.

    >>> VersionSpan(version=3, start=0, end=17)
    VersionSpan(version=3, start=0, end=17)
    """

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The sampling settings that were in effect for a call (not what the client asked for).

    temperature 0 means greedy; top_k -1 and top_p 1.0 mean unrestricted; stop strings are kept in the output ids and
    trimmed from the served text.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 1024
    stop: tuple[str, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One sampled completion: `output_ids` [n] int32 with the engine's `logprobs` [n] f32 and the versions that made them.

    The stop token is the last of output_ids when finish_reason is "stop". `trainable` is false where the logprobs are
    not those of the unmasked policy (grammar, top_p < 1, top_k, temperature 0).

    `experts` [k + n, layers * top_k] int16, of a mixture of experts whose routing is recorded: row i names the experts of the token
    before the i-th of the call's k suffix ids and n output ids, the one that predicts it; -1 where they are not known.
    """

    output_ids: Int32Array
    logprobs: Float32Array
    versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    matched_stop: int | str | None = None
    parse_status: ParseStatus = "text"
    trainable: bool = True
    experts: Int16Array | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParentRef:
    """The choice that a call extends: its prompt is the parent's prompt + that choice's output + the call's own suffix."""

    call_id: str
    choice: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptImage:
    """An image of a prompt: its content's digest, the index of its placeholder among the prompt's ids, and how many tokens
    the model saw in the placeholder's stead.
    """

    digest: str  # sha256 hex of the image's bytes, which the buffer holds once
    position: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One recorded completion call of an agent: a prompt and n sampled choices.

    `prompt_suffix` [k] int32 is what follows the parent's prompt and output; for a fresh call (no parent) it is the
    whole prompt. `prompt_len` counts the whole prompt, so that full ids are rebuilt in O(T) storage.
    `messages` is the JSON of the messages that are new in this call, `served` the JSON of the messages answered (one a choice).
    `images` are those of the suffix; each is one id of it, and `num_fed` counts the whole prompt as the model saw it.

    Example: turn 2 of a chat whose first turn had 20 prompt and 5 sampled ids; its tool result renders to 9 ids:
    parent=ParentRef(call_id="c1", choice=0), origin="extended", prompt_suffix has 9 ids, prompt_len is 34.
    """

    call_id: str
    session_id: str
    index: int  # 0, 1, 2, ... in order of arrival within the session
    dialect: str  # "chat", "completions", "responses", "messages"
    model: str  # the model name the agent asked for
    parent: ParentRef | None
    origin: Origin
    reason: str  # why a call is fresh ("first", "edited", "tools_changed", ...); "" when extended
    prompt_suffix: Int32Array
    prompt_len: int
    choices: tuple[Choice, ...]
    sampling: Sampling
    messages: bytes
    served: bytes
    started_at: float  # unix seconds
    finished_at: float
    delivery: Delivery = "committed"
    body_digest: str = ""
    client: bytes = b"{}"  # JSON: what the client asked for that was overridden or not forwarded
    images: tuple[PromptImage, ...] = ()
    num_fed: int | None = None  # None: no image in the whole prompt, so prompt_len

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the whole prompt as the model saw it."""
        return self.prompt_len if self.num_fed is None else self.num_fed


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A rollout's reward: named finite components that sum to the total, and optional per-call rewards.

    `failed` names the components whose verifier failed, and how ("timeout", "crash", ...): counted by the run, not stored.

    >>> Reward(components={"correct": 1.0, "format": 0.2}).total
    1.2
    """

    components: Mapping[str, float] = field(default_factory=dict)
    calls: Mapping[str, float] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Sum of the components."""
        return float(sum(self.components.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One episode: the calls made under one key. A key names one episode and is never used twice."""

    session_id: str
    key_hash: str  # sha256 hex of the api key; the key itself is not stored
    task_id: str | None = None
    group_id: str | None = None
    group_size: int | None = None
    train: bool = True
    sampling: Mapping[str, float | int] = field(default_factory=dict)  # overrides of the run's sampling
    metadata: Mapping[str, object] = field(default_factory=dict)
    created_at: float = 0.0
    deadline_at: float | None = None  # of the session's group, unix seconds
    expires_at: float | None = None  # of the session itself
    state: SessionState = "open"
    status: str = ""  # "completed", or why it failed: "error", "timeout", "interrupted", ...
    reward: Reward | None = None
    sealed_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One root-to-leaf row of a session's forest. All arrays are [T].

    loss_mask is True exactly on sampled tokens that this row owns: over all rows of a session, each sampled token of a
    delivered call is owned by exactly one row. logprobs, temperature and versions are 0, 1 and -1 where nothing was sampled;
    a sampled token that another row owns keeps its values and has mask False. turn is the index of the call along the
    path (0, 1, ...), for prompt tokens the turn they lead to. `call_ids` [turns] names the call of each turn. `experts`
    [T, layers * top_k] are those that the engine gave to each token, -1 where that is not known: at the last one it never is.
    """

    token_ids: Int32Array
    loss_mask: BoolArray
    logprobs: Float32Array
    temperature: Float32Array
    versions: Int32Array
    turn: Int32Array
    call_ids: tuple[str, ...]
    rollout_id: str
    group_id: str | None
    reward: float
    truncated: bool = False  # the last call ended by length
    experts: Int16Array | None = None  # where they were recorded

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One finished session ready to be trained on: its rows share one reward, so that fan-out never moves a baseline."""

    rollout_id: str
    task_id: str | None
    reward: Reward
    rows: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rollouts of one task that are compared with one another. `num_missing` members never finished validly.

    ungrouped is True for a bundle of sessions that named no group: their baseline is the batch's.
    """

    group_id: str
    rollouts: tuple[Rollout, ...]
    num_missing: int = 0
    ungrouped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Groups handed to a learner step. Not consumed until acknowledged; returned when `expires_at` passes."""

    lease_id: str
    step: int
    groups: tuple[Group, ...]
    expires_at: float  # unix seconds
    redelivered: bool = False  # consumed before, by a step that the restored checkpoint does not hold
    lags: Mapping[int, int] = field(default_factory=dict)  # by version of a token, how many publishes it lags behind


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Packed rows of one learner step, on the CPU. N tokens, B rows; row b is [cu_seqlens[b], cu_seqlens[b+1]).

    loss_mask[i] is True where token i itself was sampled and is trained on: its logprob comes from the hidden state at
    i-1 of the same row. weight is the aggregation weight of each token, folded in once so that microbatches only sum:
    loss = sum(weight * per_token_loss) over the whole step; it is 0 where loss_mask is False.
    """

    token_ids: Int32Array  # [N]
    position_ids: Int32Array  # [N], restarting at 0 in each row
    cu_seqlens: Int32Array  # [B+1]
    loss_mask: BoolArray  # [N]
    rollout_logprobs: Float32Array  # [N]
    temperature: Float32Array  # [N]
    advantages: Float32Array  # [N]
    weight: Float32Array  # [N]
    versions: Int32Array  # [N]
    rollout_index: Int32Array  # [B]
    num_sampled: int  # global count of masked-in tokens
    group_index: Int32Array | None = None  # [B]; of learner.loss.name = "dpo"
    rewards: Float32Array | None = (
        None  # [N], each at the sampled token that earned it; of learner.advantage.name = "gae"
    )
    values: Float32Array | None = None  # [N], the critic's before the step; with returns made by the learner
    returns: Float32Array | None = None  # [N], what the critic is to learn
    teacher_logprobs: Float32Array | None = None  # [N]; of learner.loss.name = "opd"
    version: int | None = None  # the policy version that the learner holds, where it is known
    experts: Int16Array | None = None  # [N, layers * top_k], -1 where unknown; of engines whose routing is recorded

    @property
    def num_tokens(self) -> int:
        """N."""
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.cu_seqlens) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVersion:
    """One published set of weights. Numbers are never reused; `depth` counts publishes of new weights from version 0."""

    version: int
    parent: int | None
    depth: int
    step: int
    published_at: float
    checksum: str = ""
    snapshot: str | None = None  # a Hugging Face directory with these weights, if one was written
