"""Verifiers: what each makes of an answer, and that one that hangs, crashes or raises is a counted failure and no more."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from rlagent.envs.verifiers import (
    Attempt,
    Check,
    Isolated,
    Rubric,
    exact,
    judge,
    math_answer,
    numeric,
    pattern,
    reward_model,
)
from rlagent.envs.verifiers.text import last_number
from rlagent.errors import ConfigError, LoadError, VerifierError
from rlagent.types import Reward

MODEL = Path(__file__).parents[2] / "examples" / "parcels" / "model"
TRAPS = """
import os, signal, time
def hangs(attempt):
    while attempt.answer == "hang":
        time.sleep(0.01)
    return 0.5
def dies(attempt):
    if attempt.answer == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    return 0.5
def raises(attempt):
    raise ValueError("no such thing")
def eats(attempt):
    return float(len(bytearray(8 * 1024**3)))
"""


def attempt(answer: str, wanted: object = "42") -> Attempt:
    return Attempt(task={"question": "?", "answer": wanted}, answer=answer)


async def value(verifier: Any, of: Attempt) -> float:
    found = verifier(of)
    return float(found if isinstance(found, float) else await found)


@pytest.mark.parametrize(
    ("answer", "wanted", "right"),
    [
        ("It is 42.", "42", 1.0), ("41, no: 42", 42, 1.0), ("42 or 41", 42, 0.0), ("1,234.5 kg", "1234.5", 1.0), ("3/4", 0.75, 1.0),
        ("about 12%", "0.12", 1.0), ("-1e-3", "-0.001", 1.0), ("none", "42", 0.0), ("1e999999999999", "42", 0.0), ("5/0", "5", 0.0),
        ("9" * 5000, "42", 0.0), (".5", "0.5", 1.0),
    ],
)  # fmt: skip
def test_numeric_compares_the_last_number(answer: str, wanted: object, right: float) -> None:
    assert numeric()(attempt(answer, wanted)) == right


@given(st.text(alphabet="0123456789.,eE+-/% \n", max_size=60))
def test_any_text_has_a_last_number_or_none(text: str) -> None:
    found = last_number(text)
    assert found is None or any(letter.isdigit() for letter in text)


@given(st.integers(-(10**12), 10**12))
def test_a_number_in_words_is_found(number: int) -> None:
    assert last_number(f"So the answer is {number:,}.") == number


def test_exact_is_to_the_letter_but_for_space_around() -> None:
    assert exact()(attempt(" 42\n")) == 1.0
    assert exact()(attempt("It is 42")) == 0.0
    assert (exact()(attempt("Yes", "yes")), exact(casefold=True)(attempt("Yes", "yes"))) == (0.0, 1.0)
    with pytest.raises(VerifierError, match="no field 'gold'; it has 'question', 'answer'"):
        exact("gold")(attempt("42"))


async def test_mathematics_is_compared_by_meaning() -> None:
    verifier = math_answer()
    try:
        for answer, wanted, right in [
            (r"so $\frac{1}{2}$", "0.5", 1.0), (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", 1.0), (r"$\{2, 1\}$", r"\{1,2\}", 1.0),
            (r"$x^2 + 2x + 1$", "(x+1)^2", 1.0), ("7", "8", 0.0), ("no idea", "8", 0.0), (r"\boxed{\frac{3}{4}}", r"\frac{3}{5}", 0.0),
        ]:  # fmt: skip
            assert await verifier(attempt(answer, wanted)) == right, (answer, wanted)
        with pytest.raises(VerifierError, match="is not mathematics"):
            await verifier(attempt("8", ""))
    finally:
        await verifier.close()


async def test_a_pattern_that_backtracks_for_ever_is_ended_and_the_next_attempt_is_served() -> None:
    check = Check(name="form", verifier=pattern(r"^(a+)+$"), timeout_s=4.0)
    async with Rubric([check]) as rubric:
        assert await rubric.reward(attempt("a" * 64 + "b")) == Reward(
            components={"form": 0.0}, failed={"form": "timeout"}
        )
        assert (await rubric.reward(attempt("aaa"))).components == {"form": 1.0}
        assert rubric.failures == {("form", "timeout"): 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "answer", "how"),
    [("hangs", "hang", "timeout"), ("dies", "die", "crash"), ("raises", "x", "error"), ("eats", "x", "error")],
)  # fmt: skip
async def test_a_function_that_breaks_is_a_counted_failure(
    tmp_path: Path, function: str, answer: str, how: str
) -> None:
    (tmp_path / "traps.py").write_text(TRAPS)
    timeout_s = 4.0 if how == "timeout" else 60.0
    checks = [
        Check(name="trap", verifier=Isolated(f"{tmp_path}/traps.py:{function}"), on_failure=-1.0, timeout_s=timeout_s),
        Check(name="right", verifier=exact(), weight=2.0),
    ]
    async with Rubric(checks) as rubric:
        found = await rubric.reward(attempt(answer, answer))
        assert found == Reward(components={"trap": -1.0, "right": 2.0}, failed={"trap": how})
        if function in ("hangs", "dies"):  # the next one finds a process that works
            assert (await rubric.reward(attempt("well"))).components["trap"] == 0.5


async def test_a_verifier_that_does_not_heed_its_cancellation_stalls_nobody() -> None:
    release = asyncio.Event()

    async def stubborn(of: Attempt) -> float:
        while True:
            try:
                await release.wait()
                return 1.0
            except asyncio.CancelledError:
                continue

    async with Rubric([Check(name="s", verifier=stubborn, timeout_s=0.05)]) as rubric:
        assert (await rubric.reward(attempt("x"))).failed == {"s": "timeout"}
        release.set()


async def test_what_was_verified_is_not_asked_again_and_failures_are() -> None:
    seen: list[str] = []

    async def counted(of: Attempt) -> float:
        seen.append(of.answer)
        if of.answer == "bad":
            raise RuntimeError
        return float("nan") if of.answer == "nan" else 1.0

    async with Rubric([Check(name="c", verifier=counted)], cache_size=2) as rubric:
        for answer in ("a", "a", "bad", "bad", "nan", "b", "c", "a"):
            await rubric.reward(attempt(answer))
    assert seen == ["a", "bad", "bad", "nan", "b", "c", "a"]
    assert rubric.num_cached == 1
    assert rubric.failures == {("c", "error"): 2, ("c", "invalid"): 1}


async def test_no_more_than_the_bound_run_at_once() -> None:
    running, most = 0, 0
    free = asyncio.Event()

    async def slow(of: Attempt) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if most == 3:
            free.set()
        await free.wait()
        await asyncio.sleep(0)
        running -= 1
        return 1.0

    async with Rubric([Check(name="s", verifier=slow, concurrency=3)]) as rubric:
        await asyncio.gather(*(rubric.reward(attempt(str(number))) for number in range(12)))
    assert most == 3


def test_checks_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="a name of its own"):
        Rubric([Check(name="a", verifier=exact()), Check(name="a", verifier=exact())])
    with pytest.raises(ConfigError, match="timeout_s 0"):
        Rubric([Check(name="a", verifier=exact(), timeout_s=0)])


async def test_a_function_that_cannot_be_loaded_says_so(tmp_path: Path) -> None:
    verifier = Isolated(f"{tmp_path}/missing.py:f")
    with pytest.raises(LoadError, match=r"missing.py' does not exist"):
        await verifier(attempt("x"))
    await verifier.close()


@asynccontextmanager
async def endpoint(answers: Mapping[str, Any], seen: list[Any]) -> AsyncIterator[str]:
    """A server that answers JSON by path."""

    async def answer(request: web.Request) -> web.Response:
        seen.append(await request.json())
        found = answers[request.path]
        return web.json_response(found(seen[-1]) if callable(found) else found)

    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def completion(text: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}


async def test_a_judge_scores_in_its_scale_and_says_when_it_did_not() -> None:
    seen: list[Any] = []
    answers = {
        "/good/chat/completions": completion("Close.\nScore: 7"),
        "/odd/chat/completions": completion("I would rather not"),
    }
    async with endpoint(answers, seen) as url:
        assert await value(judge(base_url=f"{url}/good", scale=(0, 10)), attempt("41 {answer}")) == 0.7
        assert "Reference:\n42\n" in seen[0]["messages"][0]["content"]
        assert "41 {answer}" in seen[0]["messages"][0]["content"]
        assert seen[0]["temperature"] == 0.0
        with pytest.raises(VerifierError, match="gave no score"):
            await value(judge(base_url=f"{url}/odd"), attempt("41"))
    with pytest.raises(VerifierError, match="no base_url and the attempt no session"):
        await value(judge(), attempt("41"))


@pytest.mark.parametrize(
    ("form", "answer", "field"),
    [
        ("classify", {"embedding": [0.25], "meta_info": {}}, "text"), ("classify", [{"embedding": [0.25]}], "text"),
        ("embedding", {"object": "list", "data": [{"object": "embedding", "embedding": [0.25], "index": 0}]}, "input"),
        ("json", 0.25, "answer"), ("json", {"score": 0.25}, "answer"), ("json", {"reward": 0.25}, "answer"),
    ],
)  # fmt: skip
async def test_a_reward_model_of_each_form(form: Any, answer: Any, field: str) -> None:
    seen: list[Any] = []
    async with endpoint({"/score": answer}, seen) as url:
        verifier = reward_model(f"{url}/score", form=form, template=None if form == "json" else MODEL)
        assert await value(verifier, attempt("It is 42")) == 0.25
    text = seen[0][field]
    assert "It is 42" in text
    assert form == "json" or "<|im_start|>" in text


async def test_a_reward_model_that_answers_a_vector_is_named() -> None:
    async with endpoint({"/score": {"embedding": [0.1, 0.2]}}, []) as url:
        with pytest.raises(VerifierError, match="no single number"):
            await value(reward_model(f"{url}/score", form="json"), attempt("x"))


async def test_process_rewards_go_to_the_calls_they_judge() -> None:
    """Each recorded call is scored with what came before it, and the outcome with all of it."""
    seen: list[Any] = []

    def scored(body: dict[str, Any]) -> float:
        return len(body["messages"]) / 10

    messages = (
        {"role": "user", "content": "?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "t", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "t", "content": "1"},
        {"role": "assistant", "content": "42"},
    )
    played = Attempt(task={"answer": "42"}, answer="42", messages=messages, calls=("call-a", "call-b"))
    async with endpoint({"/prm": scored}, seen) as url:
        step = Check(name="step", verifier=reward_model(f"{url}/prm", form="json"), weight=0.5)
        async with Rubric([Check(name="right", verifier=exact())], steps=[step]) as rubric:
            found = await rubric.reward(played)
            assert found == Reward(components={"right": 1.0}, calls={"call-a": 0.1, "call-b": 0.2})
            with pytest.raises(VerifierError, match="2 assistant messages and 1 calls"):
                await rubric.reward(Attempt(task={}, answer="", messages=messages, calls=("call-a",)))
    assert json.dumps(sorted(body["answer"] for body in seen)) == '["", "42"]'
