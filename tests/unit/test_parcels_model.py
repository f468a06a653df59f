"""The demo's model directory: what ships loads, encodes any text, and its chat template only ever appends."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from rlagent.envs.parcels import CUSTOMERS, DEPOTS, NUMBERS, TOOLS, Task, World, generate_tasks

transformers = pytest.importorskip("transformers")

PARCELS = Path(__file__).parents[2] / "examples" / "parcels"
MODEL = PARCELS / "model"
MIA = Task(id="t", customer="Mia", order=41, depot="Kale", code=57)

Message = dict[str, Any]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(MODEL)


def render(tokenizer: Any, messages: list[Message], *, prompt: bool = False, tools: bool = True) -> str:
    return str(
        tokenizer.apply_chat_template(
            messages, tools=list(TOOLS) if tools else None, tokenize=False, add_generation_prompt=prompt
        )
    )


def call(name: str, arguments: Message | str, content: str | None = None) -> Message:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }


def expert_messages(task: Task) -> list[Message]:
    world = World(task=task)
    messages: list[Message] = [{"role": "user", "content": task.question}]
    for name, arguments in (
        ("find_order", {"customer": task.customer}),
        ("track_parcel", {"order": task.order}),
        ("pickup_code", {"depot": task.depot, "order": task.order}),
    ):
        messages.append(call(name, arguments))
        messages.append({"role": "tool", "tool_call_id": "call_1", "content": world.call(name, json.dumps(arguments))})
    return [*messages, {"role": "assistant", "content": task.answer}]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text())
def test_any_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_names_and_numbers_are_one_token_each(tokenizer: Any) -> None:
    for word in (*CUSTOMERS, *DEPOTS, *map(str, NUMBERS)):
        assert len(tokenizer.encode(word, add_special_tokens=False)) == 1, word


def test_markup_is_one_token_each_and_a_turn_ends_with_the_eos_token(tokenizer: Any) -> None:
    markup = [f"<{slash}{name}>" for name in ("tool_call", "tool_response", "think") for slash in ("", "/")]
    for token in ["<|im_start|>", "<|im_end|>", "<|endoftext|>", *markup]:
        assert tokenizer.encode(token, add_special_tokens=False) == [tokenizer.convert_tokens_to_ids(token)]
    assert tokenizer.eos_token == "<|im_end|>"
    # Calls and thoughts must survive a decoder that skips special tokens.
    assert tokenizer.decode(tokenizer.encode("<tool_call></think>"), skip_special_tokens=True) == "<tool_call></think>"


def test_rendering_more_messages_only_appends(tokenizer: Any) -> None:
    messages = expert_messages(MIA)
    for end in range(1, len(messages)):
        if messages[end]["role"] != "assistant":
            continue
        before, after = render(tokenizer, messages[:end], prompt=True), render(tokenizer, messages[: end + 1])
        assert after.startswith(before)
        assert after.endswith("<|im_end|>\n")
        assert render(tokenizer, messages).startswith(after)


def test_tokens_of_a_prompt_stay_when_the_conversation_grows(tokenizer: Any) -> None:
    messages = expert_messages(MIA)
    whole = tokenizer.encode(render(tokenizer, messages), add_special_tokens=False)
    for end in (1, 3, 5, 7):
        ids = tokenizer.encode(render(tokenizer, messages[:end], prompt=True), add_special_tokens=False)
        assert whole[: len(ids)] == ids


def test_arguments_as_text_and_as_object_render_alike(tokenizer: Any) -> None:
    arguments = {"depot": "Kale", "order": 41}
    user = {"role": "user", "content": MIA.question}
    as_object = render(tokenizer, [user, call("pickup_code", arguments)])
    assert as_object == render(tokenizer, [user, call("pickup_code", json.dumps(arguments))])
    assert (
        '<tool_call>\n{"name": "pickup_code", "arguments": {"depot": "Kale", "order": 41}}\n</tool_call><|im_end|>\n'
        in as_object
    )


def test_null_and_empty_content_render_alike_and_text_stands_before_a_call(tokenizer: Any) -> None:
    user = {"role": "user", "content": "hi"}
    assert render(tokenizer, [user, call("f", {})]) == render(tokenizer, [user, call("f", {}, content="")])
    assert "assistant\nLet me see.\n<tool_call>" in render(tokenizer, [user, call("f", {}, content="Let me see.")])


def test_plain_chat_without_tools(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert render(tokenizer, messages, prompt=True, tools=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(tokenizer, messages).startswith("<|im_start|>system\nBe brief.\n\n# Tools\n\n")


def test_results_that_follow_one_another_share_a_turn(tokenizer: Any) -> None:
    results = [{"role": "tool", "tool_call_id": str(i), "content": f"r{i}"} for i in range(2)]
    rendered = render(tokenizer, [{"role": "user", "content": "hi"}, call("f", {}), *results])
    assert rendered.endswith(
        "<|im_start|>user\n<tool_response>\nr0\n</tool_response>\n<tool_response>\nr1\n</tool_response><|im_end|>\n"
    )


def test_thoughts_stay_in_the_conversation(tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "reasoning_content": "hm", "content": "57"},
        {"role": "user", "content": "and?"},
    ]
    assert "<|im_start|>assistant\n<think>\nhm\n</think>\n\n57<|im_end|>\n" in render(tokenizer, messages)


def test_the_shipped_model_is_small_and_loads(tokenizer: Any) -> None:
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= 5_000_000
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert str(model.dtype) == "torch.bfloat16"
    assert model.num_parameters() <= 2_000_000
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.vocab_size == len(tokenizer)
    assert (MODEL / "chat_template.jinja").read_text() == (PARCELS / "chat_template.jinja").read_text()


@pytest.mark.parametrize(("split", "path"), [("train", "tasks.jsonl"), ("heldout", "heldout.jsonl")])
def test_the_shipped_tasks_are_what_the_generator_makes(split: Any, path: str) -> None:
    lines = (PARCELS / path).read_text().splitlines()
    assert lines == [task.to_line() for task in islice(generate_tasks(split, seed=1), len(lines))]
