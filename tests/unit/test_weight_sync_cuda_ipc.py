"""What needs no GPU of the CUDA path: the handle's GPU by UUID, what is refused, and that refusals say what to do."""

import pickle
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from rlagent.engine.config import EngineConfig, SglangConfig
from rlagent.engine.unpickle import own_device
from rlagent.errors import ConfigError, WeightSyncError
from rlagent.launch.engine_command import engine_command
from rlagent.trainer.weight_sync.cuda_ipc import DEVICE_ARGUMENT, explain, name_device, refuse_expandable_segments
from rlagent.trainer.weight_sync.engine_api import EngineApi, EngineFacts, refuse_replicas
from rlagent.types import PolicyVersion


def test_a_handle_names_its_gpu_by_uuid_and_the_engine_finds_its_own_index() -> None:
    names = rebuild_cuda_tensor.__code__.co_varnames
    assert names[DEVICE_ARGUMENT] == "storage_device"
    arguments = tuple(f"argument {index}" if index != DEVICE_ARGUMENT else 1 for index in range(13))
    rebuild, named = name_device((rebuild_cuda_tensor, arguments), lambda device: f"uuid {device}")
    assert rebuild is rebuild_cuda_tensor
    assert named[DEVICE_ARGUMENT] == "uuid 1"
    assert named[:DEVICE_ARGUMENT] + named[DEVICE_ARGUMENT + 1 :] == arguments[:DEVICE_ARGUMENT] + arguments[7:]
    assert own_device("uuid 1", ["uuid 3", "uuid 1"]) == 1
    assert own_device(2, []) == 2
    with pytest.raises(pickle.UnpicklingError, match="no GPU here has the UUID uuid 1"):
        own_device("uuid 1", ["uuid 3"])


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_refused(name: str) -> None:
    refuse_expandable_segments({name: "max_split_size_mb:64,expandable_segments:False"})
    with pytest.raises(WeightSyncError, match=f"{name} = .*sync.transport = 'distributed'"):
        refuse_expandable_segments({name: "max_split_size_mb:64, expandable_segments: True"})


def test_what_an_engine_says_of_a_handle_is_explained() -> None:
    """torch's own words for a handle of another version; SGLang's for a GPU that it does not see."""
    future = explain(
        WeightSyncError("engine http://e refused: received sharable handle from a future version of torch")
    )
    assert f"different versions of torch (here {torch.__version__})" in str(future)
    assert "does not see the learner's GPU" in str(explain(WeightSyncError("Invalid device_uuid=GPU-1")))
    other = WeightSyncError("out of memory")
    assert explain(other) is other


def test_replicas_inside_a_server_are_refused_by_config_and_by_a_push() -> None:
    with pytest.raises(ValueError, match=r"engine.sglang.data = 2: .* set engine.count = 2"):
        SglangConfig(data=2)
    api = EngineApi("http://attached")
    api.__dict__["facts"] = EngineFacts(sglang=True, on_gpu=False, tensor=1, data=2)
    with pytest.raises(
        WeightSyncError, match=r"http://attached has 2 data-parallel replicas .* sync.transport = 'disk'"
    ):
        refuse_replicas(api)
    api.close()


def test_flags_of_sglang_pass_through_behind_ours(tmp_path: Path) -> None:
    """Later ones win, in SGLang's argparse too; each tensor rank is bound to a core of its own."""
    python = tmp_path / "python"
    python.touch()
    sglang = SglangConfig(python=python, tensor=2, args=("--dtype", "float16", "--enable-metrics"))
    config = EngineConfig(kind="sglang", device="cpu", sglang=sglang)
    weights = PolicyVersion(version=3, parent=None, depth=0, step=0, published_at=0.0, snapshot="/model")
    command = engine_command(config, weights, number=0, port=7)
    assert command.argv[-3:] == ("--dtype", "float16", "--enable-metrics")
    assert command.argv.index("--dtype") < len(command.argv) - 3
    assert ("--tp-size", "2") in zip(command.argv, command.argv[1:], strict=False)
    assert command.environ["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 1


@pytest.mark.parametrize("args", [("--tp-size", "2"), ("--tp=2",), ("--tensor-parallel-size=4", "--tp-size=2")])
def test_tensor_ranks_given_as_a_flag_are_bound_too(tmp_path: Path, args: tuple[str, ...]) -> None:
    (tmp_path / "python").touch()
    sglang = SglangConfig(python=tmp_path / "python", args=args)
    weights = PolicyVersion(version=3, parent=None, depth=0, step=0, published_at=0.0, snapshot="/model")
    command = engine_command(EngineConfig(kind="sglang", device="cpu", sglang=sglang), weights, number=0, port=7)
    assert command.environ["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 1
    wrong = sglang.model_copy(update={"args": ("--tp-size", "two")})
    with pytest.raises(ConfigError, match="'two' tensor-parallel ranks"):
        engine_command(EngineConfig(kind="sglang", device="cpu", sglang=wrong), weights, number=0, port=7)
