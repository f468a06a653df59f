"""What the embedded engine holds of a model in float8 blocks: those as they came, beside the whole ones that it computes with.

In the flow: checkpoints and pushes bring `NAME` and `NAME_scale_inv`; the model computes with their product, as SGLang's kernels do with
activations left whole. Invariant: the model's weight is always the product of what is stored here.
"""

from collections.abc import Mapping

import torch

from rlagent.fp8 import SCALE, Fp8Blocks
from rlagent.kernels.quantize import FLOAT8, num_blocks


class Float8Weights:
    """`stored`: float8 weights and their factors by name, of those of `named` that `fp8` holds."""

    def __init__(self, fp8: Fp8Blocks, named: Mapping[str, torch.Tensor]) -> None:
        self._fp8 = fp8
        self.stored: dict[str, torch.Tensor] = {}
        for name, tensor in named.items():
            if fp8.holds(name):
                self.stored[name] = torch.zeros(tensor.shape, dtype=FLOAT8, device=tensor.device)
                self.stored[name + SCALE] = torch.ones(num_blocks(tensor.shape, fp8.block), device=tensor.device)

    def take(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Store what is float8 of these; all of them whole, by the model's own names."""
        whole = {name: tensor for name, tensor in weights.items() if name not in self.stored}
        for name in weights.keys() - whole.keys():
            self.stored[name].copy_(weights[name])
        for name in {name.removesuffix(SCALE) for name in weights.keys() - whole.keys()}:
            whole[name] = self._fp8.whole(name, self.stored[name], self.stored[name + SCALE])
        return whole
