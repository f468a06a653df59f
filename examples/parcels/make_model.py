"""Makes the model that the demo starts from: a tokenizer, then a short supervised warm start.

It learns first from an expert, then from a skilled but careless agent, which calls tools without a mistake and answers
rightly once it has looked everything up, but often stops looking and guesses. What is left for reinforcement learning
is to gather information: a policy, not a format. Everything is seeded, and the gate at the end measures the model on
held-out tasks.

    python examples/parcels/make_model.py --out examples/parcels/model
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rlagent.envs.parcels import (
    CUSTOMERS,
    DEPOTS,
    MAX_TURNS,
    NUMBERS,
    TOOLS,
    InvalidCallError,
    Task,
    World,
    answer_with,
    generate_tasks,
    verify,
)

Message = dict[str, Any]

HERE: Final = Path(__file__).parent
TOOL_SCHEMAS: Final[list[Any]] = list(TOOLS)
SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP_TOKENS: Final = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
VOCAB_SIZE: Final = 704
"""Enough for every number, name and recurring phrase as one token; a multiple of 64, so that shards need no padding."""

CARELESS_STOPS: Final = (0.1, 0.1, 0.6)
"""The chance of guessing instead of making the first, second and third call. Success is the product of what is left,
about 0.32; the last chance is above one half, so that the greedy policy guesses too and has as much to learn."""

EXPERT_STOPS: Final = (0.0, 0.0, 0.0)

NUM_STEPS: Final = 700
EXPERT_SHARE: Final = 0.4
"""Share of the steps that learn from the expert alone. Every conversation then asks for copying from tool to call,
which the model takes some 150 steps to discover, and several times longer where most conversations are cut short."""
BATCH_SIZE: Final = 32
PEAK_LR: Final = 3e-3
INITIALIZER_RANGE: Final = 0.08
"""About 1 / sqrt(hidden size). At the usual 0.02 a model this narrow needs five times the steps to learn to copy."""

MAX_POSITIONS: Final = 1024
MAX_TURN_TOKENS: Final = 32
"""Room for the longest call (9 tokens) and for one that goes wrong."""

NUM_TOKENIZER_CONVERSATIONS: Final = 1000
IGNORED_LABEL: Final = -100


# ---------------------------------------------------------------- conversations


def tool_call(name: str, arguments: dict[str, object]) -> Message:
    return {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


def write_conversation(task: Task, stops: Sequence[float], rng: random.Random) -> list[Message]:
    """A conversation about a task in which the agent stops looking with the given chance before each call."""
    world = World(task=task)
    messages: list[Message] = [{"role": "user", "content": task.question}]
    plan: list[tuple[str, dict[str, object]]] = [
        ("find_order", {"customer": task.customer}),
        ("track_parcel", {"order": task.order}),
        ("pickup_code", {"depot": task.depot, "order": task.order}),
    ]
    for (name, arguments), stop in zip(plan, stops, strict=True):
        if rng.random() < stop:
            return [*messages, {"role": "assistant", "content": answer_with(rng.choice(NUMBERS))}]
        messages.append(tool_call(name, arguments))
        messages.append({"role": "tool", "content": world.call(name, json.dumps(arguments))})
    return [*messages, {"role": "assistant", "content": task.answer}]


# ---------------------------------------------------------------- tokenizer


def make_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """The demo's tokenizer, from expert conversations."""
    template = (HERE / "chat_template.jinja").read_text()
    return train_tokenizer(tokenizer_corpus(template, seed), template)


def train_tokenizer(corpus: Iterator[str], template: str, vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """A byte-level BPE over the full byte alphabet, trained on a corpus.

    Two-digit numbers and capitalised words stand alone; everything between them may merge, so that a tool's schema
    takes few tokens.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d{1,2}|[A-Z][a-z]*|[^\dA-Z]+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    added = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    # Not special, as in Qwen3: a decoder that skips special tokens must keep tool calls and thoughts.
    added += [AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(added),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(corpus, trainer)
    core.add_tokens(added)
    assert core.get_vocab_size() == vocab_size, "the corpus is too uniform for this many merges"
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=MAX_POSITIONS
    )
    tokenizer.chat_template = template
    return tokenizer


def tokenizer_corpus(template: str, seed: int) -> Iterator[str]:
    """The text between the added tokens of expert conversations, and every name and number often enough to be one."""
    renderer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer(models.BPE()), chat_template=template
    )
    between = re.compile("|".join(map(re.escape, SPECIAL_TOKENS + MARKUP_TOKENS)))
    for task in itertools.islice(generate_tasks("train", seed=seed), NUM_TOKENIZER_CONVERSATIONS):
        conversation = write_conversation(task, EXPERT_STOPS, random.Random(seed))
        yield from between.split(str(renderer.apply_chat_template(conversation, tools=TOOL_SCHEMAS, tokenize=False)))
    for word in (*CUSTOMERS, *DEPOTS, *map(str, NUMBERS)):
        yield from itertools.repeat(word, 2 * NUM_TOKENIZER_CONVERSATIONS)


# ---------------------------------------------------------------- warm start


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One rendered conversation.

    labels are token_ids where the assistant speaks, through <|im_end|>, and IGNORED_LABEL elsewhere.
    """

    token_ids: list[int]
    labels: list[int]


def make_example(
    tokenizer: PreTrainedTokenizerFast, conversation: list[Message], tools: list[Any] = TOOL_SCHEMAS
) -> Example:
    token_ids, labels = list[int](), list[int]()
    for i, message in enumerate(conversation):
        if message["role"] != "assistant":
            continue
        prompt = render(tokenizer, conversation[:i], tools, add_generation_prompt=True)
        turn = render(tokenizer, conversation[: i + 1], tools)[len(prompt) :].removesuffix("\n")
        prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
        turn_ids = tokenizer.encode(turn, add_special_tokens=False)
        labels += [IGNORED_LABEL] * (len(prompt_ids) - len(labels)) + turn_ids
        token_ids = prompt_ids + turn_ids
    return Example(token_ids=token_ids, labels=labels)


def render(
    tokenizer: PreTrainedTokenizerFast,
    conversation: list[Message],
    tools: list[Any] = TOOL_SCHEMAS,
    *,
    add_generation_prompt: bool = False,
) -> str:
    return str(
        tokenizer.apply_chat_template(
            conversation, tools=tools or None, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    )


def make_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        initializer_range=INITIALIZER_RANGE,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def warm_start(
    tokenizer: PreTrainedTokenizerFast, stops: Sequence[float], *, num_steps: int, seed: int
) -> Qwen3ForCausalLM:
    """Train a new model on an expert's conversations, then on some that stop with the given chances."""
    rng = random.Random(seed)
    tasks = generate_tasks("train", seed=seed)

    def batch(step: int) -> list[Example]:
        current_stops = EXPERT_STOPS if step < EXPERT_SHARE * num_steps else stops
        drawn = itertools.islice(tasks, BATCH_SIZE)
        return [make_example(tokenizer, write_conversation(task, current_stops, rng)) for task in drawn]

    return fit(tokenizer, batch, num_steps=num_steps, seed=seed)


def fit(
    tokenizer: PreTrainedTokenizerFast, batches: Callable[[int], list[Example]], *, num_steps: int, seed: int
) -> Qwen3ForCausalLM:
    """A new model, trained on a batch a step. The loss is on what the assistant says."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(make_config(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PEAK_LR, total_steps=num_steps, pct_start=0.1, cycle_momentum=False
    )
    started = time.monotonic()
    for step in range(num_steps):
        batch = batches(step)
        length = max(len(example.token_ids) for example in batch)
        pad_id = tokenizer.pad_token_id
        inputs = torch.tensor([e.token_ids + [pad_id] * (length - len(e.token_ids)) for e in batch])
        labels = torch.tensor([e.labels + [IGNORED_LABEL] * (length - len(e.labels)) for e in batch])
        # Padding stands on the right, where causal attention never looks from a real token.
        hidden = model.model(input_ids=inputs).last_hidden_state[:, :-1]
        kept = labels[:, 1:] != IGNORED_LABEL
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[kept]), labels[:, 1:][kept])
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == num_steps - 1:
            print(f"step {step:5d}  loss {loss.item():.4f}  {time.monotonic() - started:5.0f} s", flush=True)
    return model


# ---------------------------------------------------------------- gate


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What a model does with tasks: the share it solves, and the share of its calls that the world could execute."""

    success: float
    valid_calls: float
    calls_per_task: float


@torch.no_grad()
def measure(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, tasks: Sequence[Task], *, temperature: float
) -> Measurement:
    """Play the tasks, all at once, turn by turn. Temperature 0 is greedy."""
    open_episodes: list[tuple[Task, list[Message]]] = [
        (task, [{"role": "user", "content": task.question}]) for task in tasks
    ]
    num_solved = num_calls = num_valid = 0.0
    for _ in range(MAX_TURNS):
        still_open = []
        if not open_episodes:
            break
        prompts = [render(tokenizer, messages, add_generation_prompt=True) for _, messages in open_episodes]
        for (task, messages), text in zip(open_episodes, complete(model, tokenizer, prompts, temperature), strict=True):
            if not text.startswith("<tool_call>"):
                num_solved += verify(task, text)
                continue
            num_calls += 1
            try:
                call = json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
                result = World(task=task).call(call["name"], json.dumps(call["arguments"]))
            except (InvalidCallError, ValueError, KeyError, TypeError):
                continue
            num_valid += 1
            reply: Message = {"role": "tool", "content": result}
            still_open.append((task, [*messages, tool_call(call["name"], call["arguments"]), reply]))
        open_episodes = still_open
    return Measurement(
        success=num_solved / len(tasks),
        valid_calls=num_valid / max(num_calls, 1),
        calls_per_task=num_calls / len(tasks),
    )


def complete(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str], temperature: float
) -> list[str]:
    """The text the model says after each prompt, up to its end-of-turn token."""
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    outputs = model.generate(  # type: ignore[misc]
        input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, max_new_tokens=MAX_TURN_TOKENS, **sampling
    )
    turns = outputs[:, inputs.input_ids.shape[1] :]
    return [str(text) for text in tokenizer.batch_decode(turns, skip_special_tokens=True)]


# ---------------------------------------------------------------- command


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """A Hugging Face directory, weights in bfloat16."""
    if directory.exists():
        shutil.rmtree(directory)
    model.to(torch.bfloat16)  # type: ignore[arg-type]
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=1.0,
        top_k=0,
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    # Transformers 5 writes a class name that transformers 4 does not know; both know this one.
    config_path = directory / "tokenizer_config.json"
    config = {**json.loads(config_path.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"}
    config_path.write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "model", help="directory to write; replaced if it exists")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="warm-start steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--expert", action="store_true", help="train on an agent that always looks: the task's ceiling")
    parser.add_argument("--num-heldout", type=int, default=1024, help="tasks the gate plays")
    args = parser.parse_args()
    # One thread: sums in a fixed order, so that a second run gives the same weights on the same machine.
    torch.set_num_threads(1)
    tokenizer = make_tokenizer(args.seed)
    model = warm_start(tokenizer, EXPERT_STOPS if args.expert else CARELESS_STOPS, num_steps=args.steps, seed=args.seed)
    save(model, tokenizer, args.out)
    shipped = Qwen3ForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    size_bytes = sum(file.stat().st_size for file in args.out.iterdir())
    print(f"{shipped.num_parameters():,} parameters, {size_bytes:,} bytes in {args.out}")
    tasks = list(itertools.islice(generate_tasks("heldout", seed=args.seed), args.num_heldout))
    for temperature in (1.0, 0.0):
        torch.manual_seed(args.seed)
        print(f"temperature {temperature}: {measure(shipped, tokenizer, tasks, temperature=temperature)}")


if __name__ == "__main__":
    main()
