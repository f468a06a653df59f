"""OpenAI completions, the request: a prompt as text or as token ids, not as a conversation, parsed into an Ask.

The prompt is the client's own template: special tokens in its text are special tokens, and nothing is put in front.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import Field

from rlagent.router.conversation import Conversation, RawPrompt, digest
from rlagent.router.dialects.ask import Ask
from rlagent.router.dialects.body import OTHER_SAMPLING, Body, ignored, read_body, read_retry_count, read_stops, refuse
from rlagent.router.errors import invalid
from rlagent.router.grammar import Grammar, json_answer
from rlagent.router.sampling import Asked

MAX_CHOICES: Final = 128  # OpenAI's own limit
# OpenAI's own default, where the client says nothing.
_MAX_TOKENS: Final = 16
_REFUSED: Final = {
    "echo": "the prompt is the client's own, and logprobs of prompts are not kept; put the prompt in front yourself",
    "suffix": "the policy completes what comes after a prompt; leave it out",
    "logit_bias": "it would change the distribution that is trained on; leave it out",
}


class Request(Body):
    """The fields that have an effect."""

    model: str
    prompt: str | list[Any]
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    best_of: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    logprobs: int | None = Field(None, ge=0)
    max_tokens: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    response_format: dict[str, Any] | None = None
    temperature: float | None = Field(None, ge=0, le=10, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1)
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None


def parse(content: bytes, headers: Mapping[str, str]) -> Ask:
    """A request's body as an Ask. ApiError names the field and what to do."""
    body = read_body(Request, content)
    refuse(body, _REFUSED)
    if (body.logprobs or 0) > 1:
        raise invalid("logprobs is at most 1: only the sampled token's logprob is kept", "logprobs")
    if body.best_of not in (None, 1, body.n):
        raise invalid("best_of is not supported beyond n: every sampled choice is answered; use n", "best_of")
    return Ask(
        dialect="completions",
        id_prefix="cmpl-",
        model=body.model,
        conversation=Conversation(messages=(), prompt=_prompt(body.prompt)),
        asked=Asked(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            seed=body.seed,
            max_tokens=body.max_tokens or _MAX_TOKENS,
            stop=read_stops(body.stop),
            other={name: value for name in OTHER_SAMPLING if (value := getattr(body, name)) is not None},
        ),
        grammar=_grammar(body.response_format or {}),
        n=body.n or 1,
        stream=bool(body.stream),
        include_usage=bool((body.stream_options or {}).get("include_usage")),
        logprobs=body.logprobs is not None,
        ignored=ignored(body),
        body_digest=digest(content),
        retry_count=read_retry_count(headers),
    )


def _prompt(found: str | list[Any]) -> RawPrompt:
    """Text, ids, or a list of one of them."""
    if isinstance(found, list) and len(found) == 1 and not isinstance(found[0], int):
        found = found[0]
    if isinstance(found, str):
        if not found:
            raise invalid("prompt is empty; a completion goes on from at least one token", "prompt")
        return RawPrompt(text=found)
    if isinstance(found, list) and found and all(type(token) is int and 0 <= token < 2**31 for token in found):
        return RawPrompt(ids=tuple(found))
    if isinstance(found, list) and len(found) > 1 and all(isinstance(prompt, str | list) for prompt in found):
        raise invalid("prompt holds several prompts, and a request records one call; send a request for each", "prompt")
    raise invalid("prompt is neither text nor a list of token ids, nor a list of one of them", "prompt")


def _grammar(form: Mapping[str, Any]) -> Grammar | None:
    """`response_format`, as SGLang and vLLM take it here too."""
    match form.get("type", "text"):
        case "text":
            return None
        case "json_object":
            return json_answer({"type": "object"}, "response_format")
        case "json_schema":
            named = form.get("json_schema")
            schema = named.get("schema") if isinstance(named, dict) else None
            return json_answer(schema, "response_format.json_schema.schema")
    raise invalid(
        f"response_format is of type {form.get('type')!r}; use text, json_object or json_schema", "response_format"
    )
