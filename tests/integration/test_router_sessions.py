"""A session from its opening to its seal: reward, drain, time, restart."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
from router_harness import TOOLS, USER, always, error_of, router, said

from rlagent.errors import RouterError
from rlagent.router.config import RouterConfig
from rlagent.types import OPENED_BY_DRIVER

CALL = '<tool_call>\n{"name": "look", "arguments": {"key": "a"}}\n</tool_call>'


async def test_a_sealed_session_takes_nothing_more(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("ok"))) as r:
        response = await r.chat()
        session_id = response.headers["x-rlagent-session"]
        await r.admin.finish(session_id, reward=1.0)
        again = await r.chat()
        assert again.status_code == 409
        assert again.headers["x-should-retry"] == "false"
        assert again.headers["x-rlagent-session"] == session_id
        assert "new key" in error_of(again)["message"]
        assert len(await r.admin.calls(session_id)) == 1
        with pytest.raises(RouterError, match="409"):
            await r.admin.reward(session_id, 1.0)


async def test_a_session_past_its_time_is_sealed_and_takes_nothing_more(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("ok")), config=RouterConfig(session_ttl_s=0.3)) as r:
        session_id = (await r.chat()).headers["x-rlagent-session"]
        async with asyncio.timeout(5):
            while (await r.admin.session(session_id))["state"] == "open":
                pass
        late = await r.chat()
        assert (late.status_code, error_of(late)["code"]) == (409, "session_sealed")
        assert (await r.admin.session(session_id))["state"] == "expired"


async def test_a_learners_restore_ends_its_own_sessions_in_memory_and_no_agents(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("ok"))) as r:
        own = await r.admin.new_session(metadata=OPENED_BY_DRIVER)
        for key in (own.api_key, "agent"):
            assert (await r.chat(key=key)).status_code == 200
        assert (await r.admin.restore(cursor=0, version=0)).interrupted == 1
        assert (await r.chat(key=own.api_key)).status_code == 409
        assert (await r.chat(key="agent")).status_code == 200


async def test_a_model_name_can_be_recorded_without_being_trained_on(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("ok")), config=RouterConfig(untrained_models=("judge",))) as r:
        response = await r.chat(model="judge", temperature=0.3)
        assert r.engine.requests[0]["sampling_params"]["temperature"] == 0.3
        (row,) = await r.admin.trajectories(response.headers["x-rlagent-session"])
        assert sum(row["loss_mask"]) == 0


async def test_finish_drains_calls_in_flight_and_repeats_alike(tmp_path: Path) -> None:
    hold = asyncio.Event()
    async with router(tmp_path, always(said("ok", hold=hold))) as r:
        call = asyncio.create_task(r.chat())
        await r.engine.started.wait()
        (session,) = await r.admin.sessions()
        finish = asyncio.create_task(r.admin.finish(session["session_id"], reward={"a": 1.0, "b": 0.5}))  # type: ignore[arg-type]
        done, _ = await asyncio.wait([finish], timeout=0.2)
        assert not done
        assert (await r.chat()).status_code == 409
        hold.set()
        assert (await call).status_code == 200
        sealed = await finish
        assert (sealed["state"], sealed["reward"]["total"]) == ("sealed", 1.5)
        assert len(await r.admin.calls(session["session_id"])) == 1
        assert await r.admin.finish(session["session_id"], reward={"a": 1.0, "b": 0.5}) == sealed  # type: ignore[arg-type]
        with pytest.raises(RouterError, match="409"):
            await r.admin.finish(session["session_id"], reward=0.0)


@pytest.mark.parametrize("reward", ["NaN", "Infinity", "1e300", '{"a": -1e31}', '"1"', "[1]"])
async def test_a_reward_that_is_no_finite_number_is_400(tmp_path: Path, reward: str) -> None:
    async with router(tmp_path, always(said("ok"))) as r:
        session_id = (await r.chat()).headers["x-rlagent-session"]
        for action in ("reward", "finish"):
            response = await r.http.post(f"/sessions/{session_id}/{action}", content=f'{{"reward": {reward}}}')
            assert (response.status_code, error_of(response)["param"]) == (400, "reward")
            assert error_of(response)["message"].startswith("reward")
        assert (await r.admin.session(session_id))["state"] == "open"


async def test_our_own_client_sends_no_reward_that_json_cannot_hold(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("ok"))) as r:
        session_id = (await r.chat()).headers["x-rlagent-session"]
        with pytest.raises(RouterError, match=r"^reward = nan has no place in JSON; give a finite number"):
            await r.admin.finish(session_id, reward=math.nan)
        with pytest.raises(RouterError, match=r"^reward\.format = -inf "):
            await r.admin.reward(session_id, {"correct": 1.0, "format": -math.inf})
        assert (await r.admin.session(session_id))["state"] == "open"


async def test_sessions_open_without_a_body_and_new_groups_need_a_size(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("ok"))) as r:
        assert (await r.http.post("/sessions")).json()["session_id"]
        response = await r.http.post("/sessions", json={"group_id": "g"})
        assert (response.status_code, response.headers["x-should-retry"]) == (400, "false")
        assert "group_size" in error_of(response)["message"]


async def test_a_restart_goes_on_where_the_session_was(tmp_path: Path) -> None:
    async with router(tmp_path, always(said(CALL))) as r:
        response = await r.chat(tools=TOOLS)
        answer = response.json()["choices"][0]["message"]
    async with router(tmp_path, always(said("ok"))) as r:
        replayed = await r.chat(tools=TOOLS, headers={"x-stainless-retry-count": "1"})
        assert replayed.content == response.content
        result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "7"}
        second = await r.chat([*USER, answer, result], tools=TOOLS)
        calls = await r.calls(second)
        assert [call["origin"] for call in calls] == ["fresh", "extended"]
        assert calls[1]["prompt_ids"] == r.engine.requests[0]["input_ids"]


async def test_a_session_finished_without_a_reward_is_said_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with router(tmp_path, always(said("ok"))) as r:
        for _ in range(2):
            forgotten = await r.admin.new_session()
            for _ in range(2):  # the same again counts once
                answer = (await r.http.post(f"/sessions/{forgotten.session_id}/finish", json={})).json()
                assert "without a reward" in answer["warning"]
        for body in ({"reward": 0.0}, {"status": "failed"}):
            session = await r.admin.new_session()
            assert (await r.http.post(f"/sessions/{session.session_id}/finish", json=body)).json()["warning"] is None
        watched = await r.admin.new_session(train=False)
        assert (await r.http.post(f"/sessions/{watched.session_id}/finish", json={})).json()["warning"] is None
        assert 'rlagent_sessions_total{kind="unrewarded"} 2' in (await r.http.get("/metrics")).text
    assert len([one for one in caplog.messages if "without a reward" in one]) == 1
