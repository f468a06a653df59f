"""/generate requests: from JSON to sequences, and back. The wire is SGLang's."""

import secrets
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from rlagent.engine.loop import Engine
from rlagent.engine.sampling import SamplingParams
from rlagent.engine.sequence import Progress, Sequence
from rlagent.engine.stops import served_text
from rlagent.errors import EngineError

_SEED_BITS: Final = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A validated /generate body: one or several prompts with one setting."""

    prompts: tuple[list[int], ...]
    batched: bool  # the answer is a list
    params: SamplingParams
    rid: str
    stream: bool
    return_logprob: bool
    logprob_start: int
    routed_start: int  # -1: the experts of its tokens are not asked for

    @classmethod
    def parse(cls, body: dict[str, Any], engine: Engine) -> "GenerateRequest":
        """EngineError names what is wrong; unknown top-level keys are ignored, as SGLang does."""
        given_params = body.get("sampling_params") or {}
        if not isinstance(given_params, dict):
            raise EngineError("sampling_params must be an object (several prompts of one request share it)")
        params = SamplingParams.parse(given_params)
        given = body.get("input_ids")
        if given is None:
            given = _encode(body.get("text"), engine)
        if not isinstance(given, list) or not given:
            raise EngineError("input_ids must be a non-empty list of token ids, or of such lists")
        batched = isinstance(given[0], list)
        prompts = tuple(given) if batched else (given,)
        for prompt in prompts:
            _check_prompt(prompt, params, engine)
        return_logprob = bool(body.get("return_logprob", False))
        start = body.get("logprob_start_len", -1)
        if type(start) is not int:
            raise EngineError(f"logprob_start_len must be an integer, got {start!r}")
        routed = body.get("routed_experts_start_len", 0)
        if type(routed) is not int or not 0 <= routed <= min(map(len, prompts)):
            raise EngineError(
                f"routed_experts_start_len must be an integer from 0 to the prompt's length, got {routed!r}"
            )
        return cls(
            prompts=prompts, batched=batched or params.n > 1, params=params, rid=str(body.get("rid") or secrets.token_hex(16)),
            stream=bool(body.get("stream", False)), return_logprob=return_logprob,
            logprob_start=start if return_logprob else -1, routed_start=routed if body.get("return_routed_experts") else -1,
        )  # fmt: skip

    def sequences(self, emit: Callable[[Progress], None]) -> list[Sequence]:
        """n sequences a prompt; several of one request get rids that share its prefix."""
        found = []
        for index, prompt in enumerate(p for p in self.prompts for _ in range(self.params.n)):
            seed = secrets.randbits(_SEED_BITS) if self.params.seed is None else self.params.seed + index
            found.append(
                Sequence(rid=self.rid if not self.batched else f"{self.rid}_{index}", ids=list(prompt), prompt_len=len(prompt),
                         params=self.params, seed=seed, emit=emit, stream=self.stream, logprob_start=self.logprob_start,
                         routed_start=self.routed_start)
            )  # fmt: skip
        return found


def answer(request: GenerateRequest, progress: Progress, engine: Engine) -> dict[str, Any]:
    """SGLang's answer object for one sequence as of `progress`."""
    sequence, output = progress.sequence, progress.output
    meta = progress.meta_info()
    if request.return_logprob:
        meta["output_token_logprobs"] = [[p, t, None] for p, t in zip(progress.logprobs, output, strict=True)]
        start = request.logprob_start
        meta["input_token_logprobs"] = (
            []
            if start < 0
            else [[p, t, None] for p, t in zip(sequence.prompt_logprobs, sequence.ids, strict=False)][start:]
        )
    if progress.stop is not None and sequence.routed is not None:
        meta["routed_experts"] = b64encode(sequence.routed.tobytes()).decode()
    text = "" if engine.tokenizer is None else served_text(output, progress.stop, request.params, engine.tokenizer)
    return {"text": text, "output_ids": output, "meta_info": meta}


def _encode(text: object, engine: Engine) -> list[int]:
    if not isinstance(text, str):
        raise EngineError("give input_ids (or text)")
    if engine.tokenizer is None:
        raise EngineError("this model directory has no tokenizer.json; give input_ids instead of text")
    ids: list[int] = engine.tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _check_prompt(prompt: object, params: SamplingParams, engine: Engine) -> None:
    architecture = engine.model.architecture
    if not isinstance(prompt, list) or not prompt:
        raise EngineError("input_ids holds an empty prompt; it needs at least one token")
    if not all(type(token) is int and 0 <= token < architecture.vocab_size for token in prompt):
        bad = next(t for t in prompt if not (type(t) is int and 0 <= t < architecture.vocab_size))
        raise EngineError(f"input_ids holds {bad!r}, which is no id of a vocabulary of {architecture.vocab_size}")
    longest = min(architecture.context, engine.config.max_total_tokens)
    if len(prompt) >= longest:
        raise EngineError(
            f"The input ({len(prompt)} tokens) is longer than the model's context length ({longest} tokens)."
        )
    if len(prompt) + params.max_new_tokens > longest:
        raise EngineError(
            f"Requested token count exceeds the model's maximum context length of {longest} tokens: {len(prompt)} of input and "
            f"{params.max_new_tokens} of max_new_tokens."
        )
