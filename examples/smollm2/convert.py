"""The packaged weights (four bits, GGUF) as a Hugging Face directory in bfloat16, with the tool template of this folder.

`python convert.py PACKAGE_DIRECTORY MODEL_DIRECTORY`; called by get_model.sh, with the `gguf` package on the path.
"""

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def main(package: Path, directory: Path) -> None:
    """Write config, weights, tokenizer and template. What was four bits wide fits into bfloat16 up to rounding."""
    (packed,) = package.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(package, gguf_file=packed.name, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=packed.name)
    directory.mkdir(parents=True, exist_ok=True)
    del model.config.quantization_config  # the weights that are written are plain ones
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    tokenizer.chat_template = None  # the packaged one has no tools
    tokenizer.save_pretrained(directory)
    shutil.copy(TEMPLATE, directory / TEMPLATE.name)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    part = directory / "model.safetensors.part"
    save_file(weights, part, metadata={"format": "pt"})
    part.rename(directory / "model.safetensors")  # last and at once: where it stands, the model is whole


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
