"""A tiny random Qwen2.5-VL with the demo's tokenizer and template, and images for it: all that a server of images needs."""

from __future__ import annotations

import base64
import json
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

PARCELS: Final = Path(__file__).parents[2] / "examples" / "parcels" / "model"
VISION_TOKENS: Final = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_CONTENT: Final = "{%- set content = message.content if message.content is string else '' %}"
_PARTS: Final = """{%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set shown = namespace(text='') %}
        {%- for part in message.content or [] %}
            {%- set shown.text = shown.text + (part.text if part.type == 'text' else '<|vision_start|><|image_pad|><|vision_end|>') %}
        {%- endfor %}
        {%- set content = shown.text %}
    {%- endif %}"""
_SIZES: Final = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def vision_directory(directory: Path) -> Path:
    """Tokenizer, template and configs, without weights: what the router reads. Images stand where Qwen's template puts them."""
    directory.mkdir(parents=True)
    tokenizer = Tokenizer.from_file(str(PARCELS / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in VISION_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    for name in ("tokenizer_config.json", "generation_config.json"):
        shutil.copy(PARCELS / name, directory)
    template = (PARCELS / "chat_template.jinja").read_text()
    assert _CONTENT in template
    (directory / "chat_template.jinja").write_text(template.replace(_CONTENT, _PARTS))
    ids = {token: tokenizer.token_to_id(token) for token in VISION_TOKENS}
    (directory / "config.json").write_text(json.dumps(_config(ids)))
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor",
        "min_pixels": 56 * 56, "max_pixels": 1 << 20, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.25, 0.25],
    }  # fmt: skip
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    return directory


def _config(ids: dict[str, int]) -> dict[str, Any]:
    text = {
        **_SIZES, "model_type": "qwen2_5_vl_text", "vocab_size": 768, "num_key_value_heads": 2, "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}, "bos_token_id": None,
        "eos_token_id": 697, "pad_token_id": 695, "use_sliding_window": False, "tie_word_embeddings": False,
    }  # fmt: skip
    vision = {
        "model_type": "qwen2_5_vl", "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 14,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112, "fullatt_block_indexes": [1],
        "out_hidden_size": _SIZES["hidden_size"], "in_channels": 3,
    }  # fmt: skip
    return {
        "model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"], "text_config": text,
        "vision_config": vision, "image_token_id": ids["<|image_pad|>"], "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"], "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": False,
    }  # fmt: skip


def vision_model(directory: Path) -> Path:
    """The same with random weights, so strong that what is seen matters."""
    import torch
    from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration

    vision_directory(directory)
    torch.manual_seed(1)
    model = Qwen2_5_VLForConditionalGeneration(AutoConfig.from_pretrained(directory))
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.15)
    generation = (directory / "generation_config.json").read_bytes()
    model.save_pretrained(directory)
    (directory / "generation_config.json").write_bytes(generation)
    return directory


def png(red: int, green: int = 0, blue: int = 0, *, width: int = 56, height: int = 56) -> bytes:
    """An image of one colour. Of 28 by 28 pixels the model above makes one token."""
    row = b"\0" + bytes((red, green, blue)) * width
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        _chunk(kind, body)
        for kind, body in (
            (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
            (b"IDAT", zlib.compress(row * height)),
            (b"IEND", b""),
        )
    )


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def uri(image: bytes) -> str:
    """An image as a data: URI."""
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"
