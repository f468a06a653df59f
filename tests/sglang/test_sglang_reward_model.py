"""A reward model that a real SGLang server scores: the number is transformers' own, as a check and as a step's reward."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from sglang_process import running_sglang
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlagent.envs.verifiers import Attempt, reward_model

pytestmark = pytest.mark.sglang

PARCELS = Path(__file__).parents[2] / "examples" / "parcels" / "model"
CONVERSATIONS = [
    [
        {"role": "user", "content": f"What is the pickup code of {name}'s parcel?"},
        {"role": "assistant", "content": said},
    ]
    for name, said in (("Mia", "The code is 57."), ("Kai", "I do not know."))
]


def make_reward_model(directory: Path) -> Any:
    """The demo's body under a random head of one number.

    SGLang's head has a bias, which it leaves at random where a checkpoint has none: zero is written.
    """
    torch.manual_seed(3)
    model: Any = AutoModelForSequenceClassification.from_pretrained(PARCELS, num_labels=1, dtype=torch.float32)
    model.score.weight.data.normal_()
    weights = model.state_dict()
    model.save_pretrained(directory)
    save_file({**weights, "score.bias": torch.zeros(1)}, directory / "model.safetensors", metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(PARCELS).save_pretrained(directory)
    return model.eval()


async def test_sglang_gives_the_number_of_the_reward_model(tmp_path: Path) -> None:
    model = make_reward_model(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    attempts = [
        Attempt(task={}, answer=messages[-1]["content"], messages=tuple(messages), calls=(), session=None)  # type: ignore[arg-type]
        for messages in CONVERSATIONS
    ]
    with torch.no_grad():
        ids = [tokenizer.apply_chat_template(messages, return_dict=False) for messages in CONVERSATIONS]
        expected = [model(torch.tensor([one])).logits.item() for one in ids]
    with running_sglang(tmp_path, "--is-embedding") as url:
        for form, path in (("classify", "/classify"), ("embedding", "/v1/embeddings")):
            verify = reward_model(url + path, form=form, template=tmp_path)  # type: ignore[arg-type]
            assert [await verify(attempt) for attempt in attempts] == pytest.approx(expected, abs=1e-3), form
    assert abs(expected[0] - expected[1]) > 0.01
