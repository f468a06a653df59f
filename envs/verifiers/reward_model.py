"""A reward model behind HTTP: SGLang's /classify, an embedding endpoint whose one number is the reward, or plain JSON.

In the flow: as a check of a `Rubric` it scores the attempt; among its `steps` it scores each recorded call with what came before
(a process reward model), which `learner.advantage.name = "turn_level"` credits to that call.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

import httpx

from rlagent.envs.verifiers.attempt import Attempt, Verifier
from rlagent.errors import VerifierError
from rlagent.router.chat_template import ChatTemplate

Form = Literal["classify", "embedding", "json"]
Render = Callable[[Attempt], str]
_READ_S: Final = 600.0  # the check's own limit is the one that counts


def reward_model(
    url: str, *, form: Form = "classify", model: str = "reward", template: Path | None = None, render: Render | None = None,
    headers: dict[str, str] | None = None,
) -> Verifier:  # fmt: skip
    """The number that an endpoint gives an attempt; as it is, unbounded.

    classify: POST {model, text} -> {"embedding": [number]} or a list of one such (SGLang started with --is-embedding).
    embedding: POST {model, input} -> {"data": [{"embedding": [number]}]}, OpenAI's form.
    json: POST {task, answer, messages} -> a number, or {"score": number} or {"reward": number}.
    The text is what `render` makes of the attempt, or the chat template of the reward model's directory `template`; its
    messages, or (question, answer) where there are none. VerifierError when the answer holds no number; httpx's errors else.
    """
    if form != "json" and (template is None) == (render is None):
        raise VerifierError(f"form {form!r} needs the text: give template (the reward model's directory) or render")
    text = render if render is not None or template is None else _rendered(template)

    async def verify(attempt: Attempt) -> float:
        if form == "json" or text is None:
            body: dict[str, Any] = {
                "task": dict(attempt.task), "answer": attempt.answer, "messages": [dict(m) for m in attempt.messages],
            }  # fmt: skip
        else:
            body = {"model": model, "text" if form == "classify" else "input": text(attempt)}
        async with httpx.AsyncClient(timeout=_READ_S, trust_env=False, headers=headers) as client:
            response = await client.post(url, json=body)
        response.raise_for_status()
        return _number(response.json(), url)

    return verify


def _rendered(directory: Path) -> Render:
    chat = ChatTemplate.load(directory)

    def render(attempt: Attempt) -> str:
        messages = list(attempt.messages) or [
            {"role": "user", "content": str(attempt.field("question"))},
            {"role": "assistant", "content": attempt.answer},
        ]
        return chat.render(messages, tools=(), args={}, add_generation_prompt=False)

    return render


def _number(answer: Any, url: str) -> float:
    """The one number in what an endpoint answers, in any of the forms."""
    found = answer
    while True:
        if isinstance(found, int | float) and not isinstance(found, bool):
            return float(found)
        if isinstance(found, list) and len(found) == 1:
            found = found[0]
        elif isinstance(found, dict) and (names := [n for n in ("data", "embedding", "score", "reward") if n in found]):
            found = found[names[0]]
        else:
            raise VerifierError(f"{url} answered no single number: {answer!r:.200}; is it a reward model?")
