"""A judge: a model behind any OpenAI endpoint that is asked how good an answer is.

In the flow: without a base_url of its own it asks the attempt's session, through the router, under a model name that the run
lists in `router.untrained_models`: recorded, never trained on, and with the judge's own temperature.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from rlagent.envs.verifiers.attempt import Attempt, Verifier
from rlagent.errors import VerifierError

_PROMPT: Final = (
    "Judge an answer.\n\nQuestion:\n{question}\n\nReference:\n{answer}\n\nAnswer to judge:\n{attempt}\n\n"
    "Is the answer right? End with one line: Score: N, where N is a number from 0 (wrong) to 1 (right)."
)
_SCORE: Final = r"(?i)score\W*([-+]?\d*\.?\d+)"


class _Fields(dict[str, Any]):
    def __missing__(self, name: str) -> str:
        return ""


def judge(
    *, model: str = "judge", base_url: str | None = None, api_key: str = "none", prompt: str = _PROMPT, score: str = _SCORE,
    scale: tuple[float, float] = (0.0, 1.0), temperature: float = 0.0, max_tokens: int = 512,
) -> Verifier:  # fmt: skip
    """A model's score, from `scale` to 0..1, and cut there.

    prompt: a template with the task's fields (empty where it has none) and {attempt}, the answer to judge. score: a pattern whose last
    match's group 1 is the number. VerifierError when the judge gives none; openai's errors when it cannot be reached.
    """
    low, high = scale
    if high <= low:
        raise VerifierError(f"scale is {scale}; give (lowest, highest)")

    async def verify(attempt: Attempt) -> float:
        import openai  # slow to import, and not for the processes of other verifiers

        if base_url is None and attempt.session is None:
            raise VerifierError("the judge has no base_url and the attempt no session; give one of them")
        where = base_url if base_url is not None or attempt.session is None else attempt.session.base_url
        key = api_key if base_url is not None or attempt.session is None else attempt.session.api_key
        text = prompt.format_map(_Fields(_strings(attempt.task), attempt=attempt.answer))
        async with openai.AsyncOpenAI(base_url=where, api_key=key, max_retries=1) as client:
            completion = await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": text}],
                temperature=temperature,
                max_tokens=max_tokens,
            )
        said = completion.choices[0].message.content or ""
        found = re.findall(score, said)
        if not found:
            raise VerifierError(f"the judge gave no score that matches {score!r}: {said[-200:]!r}")
        return min(1.0, max(0.0, (float(found[-1]) - low) / (high - low)))

    return verify


def _strings(task: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in task.items()}
