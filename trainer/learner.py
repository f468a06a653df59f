"""One rank of the learner: a Megatron-core policy, its optimizer, and the step that a driver calls on all ranks in
the same order.

A step takes the whole Batch on every rank; each data-parallel rank trains on its share. The objective is sum(weight
* loss) over all tokens of all ranks, so gradients are summed, never averaged: no layout or microbatch split changes
them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlagent.errors import LearnerError
from rlagent.fp8 import Fp8Blocks
from rlagent.trainer import checkpoint, parallel, weights
from rlagent.trainer.batch import split
from rlagent.trainer.config import LearnerConfig, ParallelConfig
from rlagent.trainer.credit import Scores, credited, score_metrics
from rlagent.trainer.critic import Critic, ValueWork
from rlagent.trainer.forward import Stats, Work, forward_backward, score_all, sum_gradients, sum_stats
from rlagent.trainer.lora import Adapters, base_fingerprint
from rlagent.trainer.loss import token_loss
from rlagent.trainer.metrics import reduce
from rlagent.trainer.microbatch import Microbatch, check_batch, make_microbatch
from rlagent.trainer.model.architecture import read_architecture, read_config
from rlagent.trainer.model.build import Policy, build_model, check_layout
from rlagent.trainer.optimizer import DataParallel, PolicyOptimizer, learning_rate
from rlagent.trainer.reference_policy import ReferencePolicy
from rlagent.trainer.routing import replayable, routing_metrics
from rlagent.trainer.shared_prefixes import plan_rows
from rlagent.trainer.snapshot import SnapshotReader, SnapshotWriter
from rlagent.trainer.weight_map import Rule
from rlagent.types import Batch, Float32Array


def use_cuda(config: LearnerConfig) -> bool:
    """Whether this learner runs on GPUs."""
    return config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())


class Learner:
    """One per rank. Every method is called on all ranks, in the same order, with the same arguments."""

    def __init__(
        self,
        config: LearnerConfig,
        parallel_config: ParallelConfig,
        model_dir: Path,
        *,
        rank: int,
        world_size: int,
        master_port: int,
        seed: int,
        total_steps: int,
    ) -> None:
        self.config = config
        self.model_dir = Path(model_dir)
        self.total_steps = total_steps
        self.num_steps = 0
        self.seed = seed
        self.arch = read_architecture(self.model_dir)
        check_layout(self.arch, parallel_config)
        token_loss(config.loss.name)  # one by a path that leads nowhere is said before weights are read
        self.float8 = Fp8Blocks.of(read_config(self.model_dir)) is not None
        if self.float8 and config.old_logprobs == "rollout":
            raise LearnerError(
                f"learner.old_logprobs = 'rollout' with float8 weights in {self.model_dir}: engines sample with the rounded policy, "
                "whose logprobs are not the learner's; set learner.old_logprobs = 'recompute', and learner.correction for the rest"
            )
        cuda = use_cuda(config)
        if not cuda:
            torch.set_num_threads(config.threads)
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.plan = parallel.initialize(
            parallel_config, rank=rank, world_size=world_size, master_port=master_port, cuda=cuda, seed=seed
        )
        self._snapshots = SnapshotWriter(self.plan)
        try:
            self._load()
        except BaseException:
            self.close()
            raise

    def _load(self) -> None:
        """Build the models and the optimizer."""
        self.inverse_frequencies = self.arch.inverse_frequencies().to(self.plan.device)
        policy = self._load_model()
        self.adapters = self._adapt(policy) if self.config.lora.rank else None
        self.reference = None
        if self.config.needs_reference:
            frozen = policy if self.adapters else self._load_model()
            self.reference = ReferencePolicy(self.config.reference, frozen, self.arch, self.plan, self.adapters)
        policy.config.finalize_model_grads_func = sum_gradients
        self.model = DataParallel(policy, distributed=self.plan.config.distributed_optimizer)
        self.optimizer = PolicyOptimizer(self.config.optimizer, self.model, dtype=self.dtype)
        self.critic = (
            Critic(self.config, self._load_model(), self.arch, self.plan)
            if self.config.advantage.name == "gae"
            else None
        )

    def _adapt(self, policy: Policy) -> Adapters:
        """Freeze the policy and put adapters on it."""
        local = weights.local_parameters(policy, self.arch, self.plan)
        self._base = base_fingerprint(self.model_dir)
        return Adapters(policy, local, self.plan, self.config.lora, seed=self.seed)

    def _load_model(self) -> Policy:
        model = build_model(
            self.arch,
            self.plan.config,
            stage=self.plan.pipeline_rank,
            dtype=self.dtype,
            recompute=self.config.recompute == "full",
            te=not self.config.lora.rank,
            cuda=self.plan.device.type == "cuda",
        )
        weights.load_hf(model, self.arch, self.model_dir, self.plan)
        return model

    def _microbatches(self, batch: Batch) -> list[Microbatch]:
        """This rank's share of a batch."""
        # Context parallelism cuts a stream where it likes, prefixes too: there each row is computed whole.
        share = self.config.batch.share_prefixes and self.plan.config.context == 1
        shares = plan_rows(batch, budget=self.config.batch.tokens, ranks=self.plan.config.data, share=share)
        own = [list(rows) for rows in shares[self.plan.data_rank]]
        if self.plan.config.virtual_pipeline > 1:  # the interleaved schedule runs as many at a time as there are stages
            own += [[]] * (-len(own) % self.plan.config.pipeline)
        return [
            make_microbatch(batch, rows, self.plan, self.inverse_frequencies, self.dtype, share=share) for rows in own
        ]

    def _works(self, microbatches: Sequence[Microbatch], *, score_old: bool) -> list[Work]:
        """Score what the loss needs of the policies before the update."""
        old = score_all(self.model, microbatches, self.plan) if score_old else []
        ref = self.reference.logprobs(microbatches) if self.reference is not None else []
        return [
            Work(
                microbatch=microbatch,
                old_logprobs=old[number] if old else None,
                ref_logprobs=ref[number] if ref else None,
            )
            for number, microbatch in enumerate(microbatches)
        ]

    def train_step(self, batch: Batch) -> dict[str, float]:
        """All updates of one step. Metrics are equal on all ranks. Raises LearnerError for a batch or gradient that
        cannot be used.
        """
        started = time.perf_counter()
        batch = self._checked(batch)
        updates = self.config.batch.updates
        batch, of_scores = self._credited(batch)
        parts = split(batch, updates, self.config.loss) if updates > 1 else [batch]
        score_old = len(parts) > 1 and self.config.old_logprobs == "recompute"
        # The first update's own forward pass is by the policy from before it.
        works = [
            self._works(self._microbatches(part), score_old=score_old and number > 0)
            for number, part in enumerate(parts)
        ]
        scored = time.perf_counter()
        rate = learning_rate(self.config.optimizer, self.num_steps, self.total_steps)
        stats: list[Stats] = []
        norms = []
        frozen = self.critic is not None and self.num_steps < self.config.critic.warmup_steps
        value_metrics = self._learn_values(batch, parts, works)
        for update in works:
            self.optimizer.zero_grad()
            stats += forward_backward(self.model, update, self.plan, self.config)
            norms.append(0.0 if frozen else self.optimizer.step(rate))
        stats.append(
            {"computed_tokens": torch.tensor(sum(work.microbatch.num_tokens for work in itertools.chain(*works)))}
        )
        self.num_steps += 1
        if self.reference is not None:
            self.reference.verify()
            self.reference.refresh(self.model.module, self.num_steps)
        totals = sum_stats(stats, self.plan)
        return {
            **of_scores,
            **value_metrics,
            **routing_metrics(batch),
            **reduce(totals, batch.num_sampled),
            "policy/grad_norm": float(np.mean(norms)),
            "policy/lr": rate,
            "learner/updates": float(len(works)),
            "learner/microbatches": float(sum(len(update) for update in works)),
            "learner/tokens": float(batch.num_tokens),
            "learner/computed_tokens": totals["computed_tokens"],
            "learner/score_s": scored - started,
            "learner/update_s": time.perf_counter() - scored,
        }

    def _checked(self, batch: Batch) -> Batch:
        """The batch, with the routing to replay. LearnerError for what cannot be scored. With float8 engines no token was sampled by
        the weights that the learner holds.
        """
        check_batch(batch, self.arch.vocab_size)
        if self.float8:
            batch = replace(batch, version=None)
        return replayable(batch, self.arch, replay=self.config.replay_experts)

    def _credited(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """The batch with the advantages that are made of scores, and the critic's part of it; what the scores say of the policy."""
        loss = self.config.loss
        in_reward = loss.kl_in == "reward" and loss.kl_coef > 0
        if not (in_reward or self.critic is not None or loss.name in ("opd", "dpo")):
            return batch, {}
        microbatches = self._microbatches(batch)

        def scored(scores: list[Tensor]) -> Float32Array:
            return self._whole(batch, microbatches, scores)

        policy = reference = values = None
        if in_reward or loss.name in ("opd", "dpo"):
            policy = scored(score_all(self.model, microbatches, self.plan))
        if in_reward or loss.name == "dpo":
            assert self.reference is not None
            reference = scored(self.reference.logprobs(microbatches))
        if self.critic is not None:
            values = scored(self.critic.values(microbatches))
        scores = Scores(policy=policy, reference=reference, values=values)
        found, returns = credited(batch, scores, self.config.advantage, loss)
        return replace(found, values=values, returns=returns), score_metrics(batch, scores, loss)

    def _learn_values(self, batch: Batch, parts: Sequence[Batch], works: Sequence[Sequence[Work]]) -> dict[str, float]:
        """The critic's updates of a step, one for each of the policy's."""
        if self.critic is None:
            return {}
        rate = learning_rate(self.critic.optimizer.config, self.num_steps, self.total_steps)
        stats: list[Stats] = []
        norms = []
        for part, update in zip(parts, works, strict=True):
            found, norm = self.critic.update([_value_work(part, work.microbatch) for work in update], rate)
            stats += found
            norms.append(norm)
        totals = sum_stats(stats, self.plan)
        return {**self.critic.metrics(totals, batch.num_sampled), "value/grad_norm": float(np.mean(norms))}

    def logprobs(self, batch: Batch) -> Float32Array:
        """The current policy's logprobs [N] of the sampled tokens, 0 elsewhere; the same on all ranks."""
        batch = self._checked(batch)
        microbatches = self._microbatches(batch)
        return self._whole(batch, microbatches, score_all(self.model, microbatches, self.plan))

    def _whole(self, batch: Batch, microbatches: Sequence[Microbatch], scores: Sequence[Tensor]) -> Float32Array:
        """Scores of all ranks' microbatches in their places [N], on all ranks."""
        found = torch.zeros(batch.num_tokens, device=self.plan.device)
        if self.plan.counts:
            for microbatch, values in zip(microbatches, scores, strict=True):
                found[torch.from_numpy(microbatch.origin).to(found.device)] = values[: microbatch.num_scored]
        if self.plan.world_size > 1:
            dist.all_reduce(found)
        answer: Float32Array = found.cpu().numpy()
        return answer

    def export_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor, adapters merged) in a fixed order on rank 0; the others yield nothing, but must be
        iterated to the end too.
        """
        if self.adapters is not None:
            return weights.export(self.model.module, self.arch, self.plan, dtype, self.adapters.published)
        return weights.export(self.model.module, self.arch, self.plan, dtype)

    def save_hf(self, directory: Path) -> None:
        """Write the policy as a directory that transformers loads. It appears whole, in place of an older one."""
        named = self.export_weights()
        if self.plan.rank:
            for _ in named:
                pass
        else:
            weights.write_hf(named, self.model_dir, checkpoint.begin(directory))
            checkpoint.commit(directory)
        dist.barrier()

    def _identity(self) -> dict[str, Any]:
        """What a manifest says of the model, as JSON reads it back."""
        said = {**asdict(self.arch), "dtype": self.config.dtype}
        if self.adapters is not None:
            said |= {"lora": self.config.lora.model_dump(), "base": self._base}
        found: dict[str, Any] = json.loads(json.dumps(said))
        return found

    def _parameters(self) -> dict[Rule, Tensor]:
        """What this rank trains, by what it is."""
        if self.adapters is not None:
            return self.adapters.parameters()
        return weights.local_parameters(self.model.module, self.arch, self.plan)

    def _states(self) -> dict[Rule, dict[str, Tensor]]:
        """Everything a resume needs of the models, by what it is; complete on the ranks that write it."""
        found = _by_rule(self._parameters(), self.optimizer.states())
        if self.critic is not None:
            found |= _by_rule(self.critic.parameters(), self.critic.optimizer.states())
        if self.reference is not None:
            found |= {rule: {"param": tensor.detach()} for rule, tensor in self.reference.parameters().items()}
        return found

    def save(self, directory: Path, extra: dict[str, Any], *, wait: bool = True) -> None:
        """Write weights, optimizer, schedule and RNG with the loop's own `extra` (JSON). It appears whole or not at all.

        Without `wait` the state is copied and written beside the training; `finish_save` gives it its name.
        """
        self._snapshots.begin(
            directory,
            self._states(),
            step=self.num_steps,
            model=self._identity(),
            config_digest=hashlib.sha256(self.config.model_dump_json().encode()).hexdigest(),
            extra=extra,
        )
        if wait:
            self._snapshots.finish()

    def finish_save(self, *, wait: bool) -> Path | None:
        """The checkpoint that became whole now, if one did; `wait` for one that is being written."""
        return self._snapshots.finish(wait=wait)

    def load(self, directory: Path) -> dict[str, Any]:
        """Restore a checkpoint of any layout and answer its `extra`. CheckpointError where it is damaged, or of another model."""
        reader = SnapshotReader(directory, self.arch, self.plan, model=self._identity())
        parameters = self._parameters()
        states = reader.states(parameters)
        self.optimizer.restore({id(parameter): states[rule] for rule, parameter in parameters.items()})
        if self.critic is not None:
            own = self.critic.parameters()
            states = reader.states(own)
            self.critic.optimizer.restore({id(parameter): states[rule] for rule, parameter in own.items()})
        if self.reference is not None:
            self.reference.restore(reader.states(self.reference.parameters()))
        torch.set_rng_state(reader.rng_state())
        self.num_steps = reader.manifest.step
        dist.barrier()
        return dict(reader.manifest.extra)

    def close(self) -> None:
        """Leave the process groups. A save that was not finished is given up."""
        self._snapshots.close()
        parallel.destroy()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _by_rule(
    parameters: Mapping[Rule, Tensor], states: Mapping[int, dict[str, Tensor]]
) -> dict[Rule, dict[str, Tensor]]:
    """The states that this rank was given, by what they are of."""
    return {rule: states[id(parameter)] for rule, parameter in parameters.items() if id(parameter) in states}


def _value_work(batch: Batch, microbatch: Microbatch) -> ValueWork:
    assert batch.values is not None
    assert batch.returns is not None
    device = microbatch.streams.weight.device
    one = np.zeros(1, np.float32)  # of the token that stands for none
    old, returns = (x[microbatch.origin] if len(microbatch.origin) else one for x in (batch.values, batch.returns))
    return ValueWork(
        microbatch=microbatch, old_values=torch.from_numpy(old).to(device), returns=torch.from_numpy(returns).to(device)
    )
