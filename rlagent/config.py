"""The one frozen tree of settings: TOML file, then `--set a.b=c`, validated when built.

Each part stands beside its owner; this file only composes them and turns validation failures into messages that name
the field, the value and the fix. Paths in a TOML file are relative to that file; paths from the command line to the
current directory. `run.dir` is always relative to the current directory.
"""

import difflib
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, get_args

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rlagent.alarm_rules import DEFAULT_ALARMS, AlarmRule
from rlagent.buffer.config import BufferConfig
from rlagent.engine.config import EngineConfig
from rlagent.errors import ConfigError
from rlagent.finite import not_finite
from rlagent.router.config import RouterConfig, SamplingConfig
from rlagent.trainer.config import CheckpointConfig, LearnerConfig, ParallelConfig, SyncConfig

# The data buffer's file in a run's directory, where buffer.path names no other.
BUFFER_NAME: Final = "buffer.db"


class RunConfig(BaseModel):
    """What a run is called, how long it is, and where it leaves its files."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dir: Path = Path("runs/default")
    steps: int = Field(100, ge=1, description="learner steps")
    seed: int = Field(0, ge=0)


class ModelConfig(BaseModel):
    """The model that is trained: a Hugging Face directory."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path | None = None


class TaskDrawConfig(BaseModel):
    """How tasks are drawn for training. Evaluation takes them in order."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    by: Literal["uniform", "curriculum", "prioritised"] = Field(
        "uniform",
        description="uniform: each once an epoch; curriculum: the easiest first; prioritised: by p (1 - p), p a task's running success",
    )
    difficulty: str = Field("difficulty", description="curriculum: the number in each task that orders them")
    start: float = Field(
        0.2, gt=0, le=1, description="curriculum: share of the tasks, the easiest, that is drawn from at first"
    )
    steps: int = Field(100, ge=1, description="curriculum: learner steps until all tasks are drawn from")
    success: float = Field(1.0, description="prioritised: a rollout succeeded when its total reward reaches this")
    memory: float = Field(
        0.9, gt=0, le=1, description="prioritised: what a task's earlier rollouts count when it is trained on again"
    )
    uniform_share: float = Field(0.1, gt=0, le=1, description="prioritised: share of the draws that ignores success")


class RolloutConfig(BaseModel):
    """The rollout function, its tasks, and how many run at once."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    function: str | None = Field(None, description="file.py:function; none: agents come from outside")
    tasks: Path | None = Field(None, description="JSON lines, one task a line")
    group_size: int = Field(8, ge=1, description="rollouts of one task")
    workers: int = Field(1, ge=1, description="worker processes; a plain `def` function runs once a process at a time")
    concurrency: int = Field(64, ge=1, description="rollouts running at once, over all workers")
    timeout_s: float = Field(300.0, gt=0, description="one rollout's wall clock")
    draw: TaskDrawConfig = TaskDrawConfig()


class EvalConfig(BaseModel):
    """Evaluation on held-out tasks through the same rollout function, never trained on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tasks: Path | None = None
    every: int = Field(
        10, ge=1, description="learner steps between evaluations; also before the first and after the last"
    )
    num_tasks: int | None = Field(None, ge=1, description="the first N tasks of the file; default all")
    temperature: float = Field(0.0, ge=0.0, description="0 is greedy")
    success_threshold: float = Field(1.0, description="a rollout succeeded when its total reward reaches this")


class TrackConfig(BaseModel):
    """Where metrics go besides metrics.jsonl, which is always written."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensorboard: bool = Field(False, description="event files in the run directory; extra `tensorboard`")
    wandb_project: str | None = Field(None, description="Weights & Biases project; extra `wandb`")
    wandb_mode: Literal["online", "offline"] = "online"


class Config(BaseModel):
    """Everything a run is determined by."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    rollout: RolloutConfig = RolloutConfig()
    eval: EvalConfig = EvalConfig()
    sampling: SamplingConfig = SamplingConfig()
    router: RouterConfig = RouterConfig()
    engine: EngineConfig = EngineConfig()
    buffer: BufferConfig = BufferConfig()
    learner: LearnerConfig = LearnerConfig()
    parallel: ParallelConfig = ParallelConfig()
    sync: SyncConfig = SyncConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    track: TrackConfig = TrackConfig()
    alarms: tuple[AlarmRule, ...] = DEFAULT_ALARMS

    @model_validator(mode="after")
    def _trained_sampling_is_exact(self) -> "Config":
        if self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature = 0 cannot be trained on; set it above 0 (evaluation has eval.temperature)"
            )
        if self.rollout.function is not None and self.rollout.tasks is None:
            raise ValueError("rollout.function is set but rollout.tasks is not; name a tasks file (JSON lines)")
        return self

    @property
    def model_dir(self) -> Path:
        """The model directory; ConfigError when none is set."""
        if self.model.path is None:
            raise ConfigError("model.path is not set; give --model DIR, or [model] path = 'DIR' in the TOML file")
        return self.model.path

    @property
    def buffer_path(self) -> Path:
        """The SQLite file of the data buffer."""
        return self.buffer.path if self.buffer.path is not None else self.run.dir / BUFFER_NAME


# Settings that are paths, resolved against the TOML file that names them.
_PATH_FIELDS = (
    ("model", "path"), ("rollout", "tasks"), ("eval", "tasks"), ("buffer", "path"), ("engine.sglang", "python"),
)  # fmt: skip
# Settings that may name a function by its file: the same holds for that file.
_FUNCTION_FIELDS = (("rollout", "function"), ("learner.advantage", "name"), ("learner.loss", "name"))


def load_config(
    path: Path | None, settings: Iterable[str] = (), overrides: Mapping[str, object] | None = None
) -> Config:
    """Build the tree from a TOML file, `a.b=c` settings and overrides given by their dotted name (None is left out).

    Raises ConfigError naming the field, the value and the fix.
    """
    tree = {} if path is None else _read_toml(path)
    for setting in settings:
        name, value = _split_setting(setting)
        _put(tree, name, value)
    for name, override in (overrides or {}).items():
        if override is not None:
            _put(tree, name, str(override) if isinstance(override, Path) else override)
    return build_config(tree)


def build_config(tree: Mapping[str, Any]) -> Config:
    """Validate a plain tree. Raises ConfigError."""
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(item) for item in _causes(error.errors()))) from None
    for name, value in not_finite(config.model_dump()):
        raise ConfigError(f"{name} = {value}: no setting is without bound; give a finite number")
    return config


def dump_config(config: Config) -> str:
    """The resolved tree as TOML; loading it again gives the same Config when paths are absolute."""
    return tomli_w.dumps(_without_none(config.model_dump(mode="json")))


def absolute_paths(config: Config) -> Config:
    """The same settings with every path made absolute, so that they mean the same from anywhere."""
    tree = config.model_dump()
    for part, name in (*_PATH_FIELDS, ("run", "dir")):
        section = _section(tree, part)
        if section.get(name) is not None:
            section[name] = Path(section[name]).absolute()
    _place_functions(tree, Path.cwd())
    return build_config(tree)


def _section(tree: dict[str, Any], part: str) -> dict[str, Any]:
    """The table `a.b` of a tree; an empty one where the tree has none."""
    for name in part.split("."):
        found = tree.get(name)
        tree = found if isinstance(found, dict) else {}
    return tree


def _place_functions(tree: dict[str, Any], base: Path) -> None:
    """Make the files absolute that functions are named by."""
    for part, name in _FUNCTION_FIELDS:
        section = _section(tree, part)
        spec = section.get(name)
        if isinstance(spec, str) and spec.rpartition(":")[0].endswith(".py"):
            section[name] = str(base / spec)


def _read_toml(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A file's tree; `extends = "base.toml"` at its top puts it over that of another file. `above`: those that extend it."""
    if path.absolute() in above:
        raise ConfigError(
            f"config file {str(path)!r} extends itself, by way of {', '.join(map(str, above))}; break the circle"
        )
    tree = _read_file(path)
    base = tree.pop("extends", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise ConfigError(f"{str(path)!r}: extends = {base!r} is not a path; name one TOML file")
    return _over(_read_toml(path.parent / base, (*above, path.absolute())), tree)


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _over(merged[key], value) if both else value
    return merged


def _read_file(path: Path) -> dict[str, Any]:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {str(path)!r} cannot be read ({error.strerror}); check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {str(path)!r} is not valid TOML: {error}") from error
    base = path.absolute().parent
    for part, name in _PATH_FIELDS:
        section = _section(tree, part)
        if isinstance(section.get(name), str):
            section[name] = str(base / section[name])
    _place_functions(tree, base)
    return tree


def _split_setting(setting: str) -> tuple[str, Any]:
    name, equals, text = setting.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"--set {setting!r} is not of the form a.b=c, e.g. --set learner.optimizer.lr=1e-4")
    try:
        return name.strip(), tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return name.strip(), text  # a bare word is a string: --set engine.device=cpu


def _put(tree: dict[str, Any], name: str, value: object) -> None:
    *parents, last = name.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{name!r}: {parent!r} is a value, not a section")
    tree[last] = value


def _causes(items: Sequence[Any]) -> Iterator[Any]:
    """Without what only follows: a list that is too short because its items were refused."""
    places = [tuple(item["loc"]) for item in items]
    for item, place in zip(items, places, strict=True):
        if not any(len(other) > len(place) and other[: len(place)] == place for other in places):
            yield item


def _explain(item: Any) -> str:
    field = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        known = _known_keys(item["loc"])
        close = difflib.get_close_matches(str(item["loc"][-1]), known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"
        return f"{field}: unknown setting (value {item['input']!r}); {hint}"
    if not field:
        return str(item["msg"]).removeprefix("Value error, ")
    return f"{field} = {item['input']!r}: {str(item['msg']).removeprefix('Value error, ')}"


def _known_keys(loc: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = Config
    for part in loc[:-1]:
        if isinstance(part, int):  # a place in a list of tables; the model is that of its items
            continue
        annotation = model.model_fields[str(part)].annotation
        candidates = [annotation, *get_args(annotation)]
        model = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return sorted(model.model_fields)


def _without_none(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value)
        if isinstance(value, dict)
        else [_without_none(item) if isinstance(item, dict) else item for item in value]
        if isinstance(value, list)
        else value
        for key, value in tree.items()
        if value is not None
    }
