"""The learner's process layout: one frozen plan owns the groups. Made before the model, destroyed last.

Ranks are ordered tensor, context, data, pipeline (fastest first), so that tensor-parallel neighbours share a machine. Experts
are dealt out over the ranks of a stage (tensor * context * data of them): rank r of a stage has part r % expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rlagent.errors import LearnerError
from rlagent.trainer.config import ParallelConfig
from rlagent.trainer.model import cpu
from rlagent.trainer.model.megatron import parallel_state, tensor_parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelPlan:
    """Where this rank stands on each axis, and the groups it speaks to."""

    config: ParallelConfig
    rank: int
    world_size: int
    device: torch.device
    tensor_rank: int
    pipeline_rank: int
    context_rank: int
    data_rank: int
    expert_rank: int
    expert_data_rank: int  # among the ranks that hold the same experts
    tensor_group: Any
    pipeline_group: Any
    context_group: Any
    data_group: Any

    @property
    def is_first_stage(self) -> bool:
        """This rank holds the embedding."""
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """This rank holds the head and computes the loss."""
        return self.pipeline_rank == self.config.pipeline - 1

    @property
    def is_replica_leader(self) -> bool:
        """First of the ranks that hold the same parameters, experts apart: the one that writes or sends them."""
        return self.data_rank == 0 and self.context_rank == 0

    @property
    def is_expert_leader(self) -> bool:
        """First of the ranks that hold the same experts."""
        return self.expert_data_rank == 0

    @property
    def counts(self) -> bool:
        """This rank's statistics are counted: once for each data-parallel replica, where the loss is."""
        return self.is_last_stage and self.tensor_rank == 0 and self.context_rank == 0

    @property
    def row_multiple(self) -> int:
        """A packed stream's length is a multiple of this, so that context and sequence parallelism can cut it."""
        context = 2 * self.config.context if self.config.context > 1 else 1
        return context * (self.config.tensor if self.config.sequence else 1)

    def stage_leader(self, stage: int) -> int:
        """Global rank of the replica leader with tensor rank 0 of a pipeline stage."""
        return stage * (self.world_size // self.config.pipeline)

    def expert_leader(self, stage: int, expert_rank: int) -> int:
        """Global rank of the first rank of a stage that holds the experts of `expert_rank`."""
        return self.stage_leader(stage) + expert_rank


def initialize(
    config: ParallelConfig, *, rank: int, world_size: int, master_port: int, cuda: bool, seed: int
) -> ParallelPlan:
    """Join the process group at 127.0.0.1:master_port and cut it. gloo on the CPU, NCCL on GPUs."""
    if world_size != config.world_size:
        raise LearnerError(
            f"the layout tensor={config.tensor} pipeline={config.pipeline} context={config.context} data={config.data} "
            f"needs {config.world_size} processes, but {world_size} were started"
        )
    device = torch.device("cpu")
    if cuda and not torch.cuda.is_available():
        raise LearnerError("learner.device = 'cuda', but torch finds no GPU here; set it to 'auto' or 'cpu'")
    if cuda:
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"tcp://127.0.0.1:{master_port}", rank=rank, world_size=world_size
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor,
        pipeline_model_parallel_size=config.pipeline,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline if config.virtual_pipeline > 1 else None,
        context_parallel_size=config.context,
        expert_model_parallel_size=config.expert,
        expert_tensor_parallel_size=1,  # experts are dealt out whole: small matrices are not worth a cut
        create_gloo_process_groups=False,
    )
    torch.manual_seed(seed)
    cpu.install_rng()
    if cuda:
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return ParallelPlan(
        config=config,
        rank=rank,
        world_size=world_size,
        device=device,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        context_rank=parallel_state.get_context_parallel_rank(),
        data_rank=parallel_state.get_data_parallel_rank(),
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
        expert_data_rank=parallel_state.get_expert_data_parallel_rank(),
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
        pipeline_group=parallel_state.get_pipeline_model_parallel_group(),
        context_group=parallel_state.get_context_parallel_group(),
        data_group=parallel_state.get_data_parallel_group(),
    )


def destroy() -> None:
    """Leave the groups; the process may initialise another plan afterwards."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
