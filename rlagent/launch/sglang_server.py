"""One SGLang server as a child that dies with its parent. Run as a file by the Python that has sglang; rlagent is not imported.

In the flow: `rlagent.launch.engines` starts it as `PYTHON sglang_server.py PARENT_PID [flags of sglang.launch_server]`.
On a machine without a GPU SGLang still imports three packages that are CUDA-only or absent there; with SGLANG_USE_CPU_ENGINE=1
they get stand-ins: `sgl_kernel` and `triton` (SGLang's own mock modules, which it uses on macOS) and, where it is not installed,
`torchvision` (nothing of it is called for text models; models that see need it, and operators that their files name are declared). The
stand-ins are at module level, so that the children SGLang spawns make them again.
Invariant: only these three roots are stood in for; any other missing package is an ImportError. What is declared raises when called.
"""

import ctypes
import importlib.machinery
import importlib.util
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

STAND_INS: Final = ("triton", "torchvision", "sgl_kernel")
_PR_SET_PDEATHSIG: Final = 1
# Operators that are named while modules are imported: of torchvision's own library, which the index has for CUDA only, and of
# sgl_kernel, in files that Qwen's image processor imports. No model of these tests calls them.
_DECLARED: Final = (
    "torchvision::nms", "torchvision::qnms", "sgl_kernel::fused_sigmoid_mul_cpu", "sgl_kernel::fused_qk_gemma_rmsnorm_cpu",
    "sgl_kernel::fused_qk_gemma_rmsnorm_with_gate_cpu", "sgl_kernel::fused_qkvzba_split_reshape_cat_contiguous_cpu",
)  # fmt: skip


class _StandIns:
    """A finder that answers for the three roots with SGLang's mock modules."""

    def __init__(self, stubs: Any) -> None:
        self._stubs = stubs

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in STAND_INS:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        found: ModuleType = sys.modules.get(spec.name) or self._stubs._MockModule(spec.name)
        return found

    def exec_module(self, module: ModuleType) -> None:
        """A mock has no body."""


def stand_in() -> None:
    """Install the stand-ins. torch and transformers must have seen before that triton, and maybe torchvision, are absent."""
    import torch
    from transformers.utils import import_utils

    has_torchvision = import_utils.is_torchvision_available()
    if has_torchvision:
        for name in _DECLARED:
            torch.library.define(name, "() -> ()")
    root = importlib.util.find_spec("sglang")
    if root is None or root.submodule_search_locations is None:
        raise ImportError(f"{sys.executable} has no sglang; name another engine.sglang.python")
    path = Path(root.submodule_search_locations[0]) / "_platform_stubs.py"
    spec = importlib.util.spec_from_file_location("_sglang_platform_stubs", path)
    assert spec is not None
    assert spec.loader is not None
    stubs: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = stubs
    spec.loader.exec_module(stubs)
    sys.meta_path.append(_StandIns(stubs))
    triton, language = stubs._make_mock("triton"), stubs._make_mock("triton.language")
    triton.__version__, triton.language = "3.0.0", language
    triton.cdiv, triton.next_power_of_2, triton.Config = stubs._cdiv, stubs._next_power_of_2, stubs._Config
    language.constexpr = _Constexpr
    if not has_torchvision:
        stubs._make_mock("torchvision").__version__ = "0.0.0"
    if not torch.cuda.is_available():
        torch.cuda.synchronize = _synchronize  # /weights_checker calls it on every device


class _Constexpr:
    """triton.language.constexpr, for kernels that are defined and never run."""

    def __init__(self, value: object = None) -> None:
        self.value = value


def _synchronize(device: object = None) -> None:
    """A CPU has nothing to wait for."""


def die_with(parent: int) -> None:
    """End this process when its parent ends, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL.value)
    if os.getppid() != parent:  # it went before the request was in place
        os._exit(1)


def main(arguments: Sequence[str]) -> None:
    """Tie this process to its parent and serve."""
    parent, *flags = arguments
    die_with(int(parent))
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(flags))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


spawner = multiprocessing.parent_process()
if (
    spawner is not None and spawner.pid is not None
):  # a child that SGLang spawned: its own request comes after minutes of imports
    die_with(spawner.pid)
if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    stand_in()

if __name__ == "__main__":
    main(sys.argv[1:])
