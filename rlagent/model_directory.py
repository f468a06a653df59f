"""What is read of a Hugging Face model directory before anything is started: that it is one, and how long its rows may be.

`rlagent serve` and the driver begin here; neither imports torch.
"""

from pathlib import Path
from typing import Any

import orjson

from rlagent.errors import LoadError


def read_model(model_dir: Path) -> dict[str, Any]:
    """Its config.json. LoadError where there is none, or it leaves out what a run needs to know."""
    path = model_dir / "config.json"
    try:
        found: dict[str, Any] = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        why = "there is no config.json" if isinstance(error, FileNotFoundError) else str(error)
        raise LoadError(
            f"model.path {str(model_dir)!r} is no Hugging Face model directory: {why}; name one by --model DIR"
        ) from error
    for name in ("vocab_size", "max_position_embeddings"):
        if not isinstance(text_part(found).get(name), int):
            raise LoadError(f"{path} does not say {name}; take the config.json the model came with")
    return found


def text_part(model: dict[str, Any]) -> dict[str, Any]:
    """What a config.json says of the language model, which a model with vision has beside that."""
    text = model.get("text_config")
    return model | text if isinstance(text, dict) else model


def model_context(model_dir: Path) -> int:
    """Longest row the model can take, in tokens."""
    return int(text_part(read_model(model_dir))["max_position_embeddings"])
