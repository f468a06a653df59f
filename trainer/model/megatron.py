"""The one place that imports megatron-core.

megatron-core warns on import about optional packages (Transformer Engine, Apex) and torch.jit; those warnings are
silenced here and nowhere else. Without CUDA the CPU shim is put in place right after.
"""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer import MegatronModule, TransformerConfig
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_layer import TransformerLayer

from rlagent.trainer.model import cpu

cpu.install()
if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = (
        None  # megatron-core 0.16 reads the name where Transformer Engine is missing, on GPUs too
    )
# megatron-core 0.16 calls the collectives of sequence parallelism by the names they had before torch 2.13.
for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
    warnings.filterwarnings("ignore", message=f".*{name}. is deprecated", category=FutureWarning)

__all__ = [
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "GPTModel",
    "MegatronModule",
    "OptimizerConfig",
    "PackedSeqParams",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "TransformerLayer",
    "finalize_model_grads",
    "get_forward_backward_func",
    "get_gpt_layer_local_spec",
    "get_gpt_layer_with_transformer_engine_spec",
    "get_megatron_optimizer",
    "parallel_state",
    "tensor_parallel",
]
