"""A mixture of experts in place of a layer's feed-forward (Qwen3-MoE). Called by model.py, layer by layer.

Softmax over all experts, the best top_k of each token, their gates scaled to sum to 1 where the config says so: transformers'
Qwen3MoeTopKRouter, in its order of operations. Which experts each token was given goes back to the caller, to be recorded.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from rlagent.engine.architecture import Experts


@dataclass(slots=True)
class ExpertLayer:
    """One layer's weights: router [experts, hidden], gate_up [experts, 2 intermediate, hidden], down [experts, hidden, intermediate]."""

    config: Experts
    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden] -> what is added to the residual [T, hidden], and the experts of each token [T, top_k] int64."""
        chances = torch.softmax(F.linear(x, self.router), -1, dtype=torch.float32)
        gates, chosen = chances.topk(self.config.top_k, -1)
        if self.config.normalized:
            gates /= gates.sum(-1, keepdim=True)
        gates = gates.to(x.dtype)
        order = chosen.flatten().argsort(stable=True)
        tokens = order // self.config.top_k
        counts = torch.bincount(chosen.flatten(), minlength=self.config.count).tolist()
        out = torch.zeros_like(x)
        start = 0
        for expert, count in enumerate(counts):
            if not count:
                continue
            own = tokens[start : start + count]
            gate, up = F.linear(x[own], self.gate_up[expert]).chunk(2, -1)
            found = F.linear(F.silu(gate).mul_(up), self.down[expert])
            weight = gates.flatten()[order[start : start + count]].unsqueeze(1)
            out.index_add_(0, own, found * weight)
            start += count
        return out, chosen

    def parameters_by_name(self, prefix: str) -> dict[str, torch.Tensor]:
        """Views of the weights under their Hugging Face names, in checkpoint order."""
        named = {f"{prefix}.gate.weight": self.router}
        for expert in range(self.config.count):
            gate, up = self.gate_up[expert].chunk(2)
            at = f"{prefix}.experts.{expert}"
            named |= {f"{at}.gate_proj.weight": gate, f"{at}.up_proj.weight": up}
            named[f"{at}.down_proj.weight"] = self.down[expert]
        return named
