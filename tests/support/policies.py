"""Two policies of one shape: as model directories, as tensors, and as transformers models, the oracle."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

PARCELS = Path(__file__).parents[2] / "examples" / "parcels" / "model"
CONTEXT = 4096
Weights = dict[str, torch.Tensor]


class Policies:
    """`old` is the demo's model, `new` the same with noise; both in float32 and with a longer context."""

    def __init__(self, root: Path) -> None:
        self.dirs: dict[str, Path] = {}
        self.models: dict[str, Any] = {}
        torch.set_num_threads(1)
        for name, noise in (("old", 0.0), ("new", 0.02)):
            directory = self.dirs[name] = root / name
            shutil.copytree(PARCELS, directory)
            config = json.loads((directory / "config.json").read_text()) | {"max_position_embeddings": CONTEXT}
            (directory / "config.json").write_text(json.dumps(config))
            model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
            generator = torch.Generator().manual_seed(9)
            for parameter in model.parameters():
                parameter.data += noise * torch.randn(parameter.shape, generator=generator)
            model.save_pretrained(directory)
            self.models[name] = model.eval()

    def weights(self, name: str) -> Weights:
        """Full tensors by Hugging Face name."""
        return {n: p.detach().clone() for n, p in self.models[name].named_parameters()}


def continued(old: Any, new: Any, ids: list[int], kept: int, *, temperature: float = 1.0) -> torch.Tensor:
    """Logprobs of ids[1:], where the first `kept` ids have the old policy's keys and values and the new one does the rest."""
    with torch.no_grad():
        first = old(torch.tensor([ids[:kept]]), use_cache=True)
        rest = new(torch.tensor([ids[kept:]]), past_key_values=first.past_key_values)
    logits = torch.cat((first.logits[0], rest.logits[0]))[:-1]
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
