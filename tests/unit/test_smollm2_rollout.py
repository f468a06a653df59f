"""The graded reward of examples/smollm2: every step towards the answer counts, and no two raw answers score alike by accident."""

from __future__ import annotations

from pathlib import Path

import pytest
from router_harness import in_turn, router, said

from rlagent.loading import load_function

FILE = Path(__file__).resolve().parents[2] / "examples" / "smollm2" / "rollout.py"
TASK = {"id": "p", "customer": "Mia", "order": 41, "depot": "Kale", "code": 57}
CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
FIND = CALL.format("find_order", '{"customer": "Mia"}')
TRACK = CALL.format("track_parcel", '{"order": 41}')
CODE = CALL.format("pickup_code", '{"depot": "Kale", "order": 41}')


@pytest.mark.parametrize(
    ("texts", "correct", "looked_up", "form"),
    [
        ((FIND, TRACK, CODE, "The code is 57."), 1.0, 0.4, 0.1),
        ((FIND, FIND, "The code is 12."), 0.0, 0.4 / 3, 0.1),  # the same call twice is one
        ((FIND, CALL.format("track_parcel", '{"order": 42}'), "never asked for"), 0.0, 0.4 / 3, 0.1),
        (("The code is 12.",), 0.0, 0.0, None),
    ],
    ids=["all", "a guess", "a wrong call", "text"],
)  # fmt: skip
async def test_the_reward_grows_with_every_right_step(
    texts: tuple[str, ...], correct: float, looked_up: float, form: float | None, tmp_path: Path
) -> None:
    rollout = load_function(f"{FILE}:rollout", what="rollout function")
    async with router(tmp_path, in_turn(*map(said, texts))) as harness:
        reward = await rollout(TASK, await harness.admin.new_session(task_id="t"))
    assert (reward["correct"], reward["looked_up"]) == (correct, pytest.approx(looked_up))
    if form is None:
        assert 0.0 < reward["form"] < 0.1
    else:
        assert reward["form"] == pytest.approx(form)
