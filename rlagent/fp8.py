"""Which weights of a model directory are float8 blocks, as its config.json says; and those weights, both ways.

In the flow: an engine whose model is in float8 holds `NAME` (float8) and `NAME_scale_inv` (f32 factors) where the learner holds NAME whole.
The learner reads such a directory into its own dtype, and stores what it pushes and writes in this form again. What the engine samples with
is then the rounded policy, never the learner's own. Invariant: of a directory and of a push, names, shapes and dtypes are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from rlagent.errors import LoadError
from rlagent.kernels.quantize import FLOAT8, Block, dequantize_blocks, num_blocks, quantize_blocks

SCALE: Final = "_scale_inv"
_LINEAR: Final = (
    "_proj.weight"  # attention and feed-forward, experts too; not embeddings, head, norms and the routers of experts
)
_LAYERS: Final = "model.layers."


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Blocks:
    """Blocks of rows x columns share a factor; `kept` are modules whose weights are left whole."""

    block: Block
    kept: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Fp8Blocks | None:
        """What a parsed config.json says; None where weights are stored whole. LoadError for any other quantisation."""
        said = config.get("quantization_config")
        if said is None:
            return None
        method, block = said.get("quant_method"), said.get("weight_block_size")
        scheme, scales = said.get("activation_scheme", "dynamic"), said.get("scale_fmt") or "float"
        if method != "fp8" or block is None or len(block) != 2 or (scheme, scales) != ("dynamic", "float"):
            raise LoadError(
                f"config.json: quantization_config has quant_method {method!r}, weight_block_size {block!r}, activation_scheme "
                f"{scheme!r} and scale_fmt {scales!r}; only 'fp8' in blocks, 'dynamic' and 'float' is read and pushed: "
                "use such a model, or one that is not quantised"
            )
        kept = said.get("modules_to_not_convert") or said.get("ignored_layers") or ()
        return cls(block=(int(block[0]), int(block[1])), kept=tuple(kept))

    def holds(self, name: str) -> bool:
        """Whether this weight is stored in float8."""
        module = name.removesuffix(".weight")
        kept = any(module == each or module.startswith(f"{each}.") or module.endswith(f".{each}") for each in self.kept)
        return name.startswith(_LAYERS) and name.endswith(_LINEAR) and not kept

    def store(self, name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """What stands for a weight that is stored in float8: itself, then its factors."""
        stored, scale_inv = quantize_blocks(weight, self.block)
        yield name, stored
        yield name + SCALE, scale_inv

    def whole(self, name: str, stored: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
        """The weight in f32. LoadError where it is not float8, or the factors are not those of its shape."""
        wanted = num_blocks(stored.shape, self.block)
        if stored.dtype != FLOAT8 or scale_inv.shape != wanted:
            raise LoadError(
                f"tensor {name!r} is {stored.dtype} with factors {tuple(scale_inv.shape)}; config.json makes it {FLOAT8} with {wanted}"
            )
        return dequantize_blocks(stored, scale_inv, self.block)


def stored(
    fp8: Fp8Blocks | None, weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights as a directory and an engine hold them: float8 where `fp8` says so, else in `dtype` (None: as they are)."""
    for name, weight in weights:
        if fp8 is not None and fp8.holds(name):
            yield from fp8.store(name, weight)
        else:
            yield name, weight if dtype is None else weight.to(dtype)
