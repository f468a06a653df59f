"""Who may do what, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from router_harness import USER, always, error_of, router, said

from rlagent.client import RouterClient
from rlagent.errors import ConfigError, RouterError
from rlagent.router.config import RouterConfig


async def test_a_sessions_key_reads_and_calls_its_own_session_only(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("ok")), config=RouterConfig(admin_key="root")) as r:
        mine, other = await r.admin.new_session(), await r.admin.new_session()
        headers = {"authorization": f"Bearer {mine.api_key}"}
        body = {"model": "m", "messages": USER}
        assert (await r.http.post(mine.base_url + "/chat/completions", json=body, headers=headers)).status_code == 200
        assert (await r.http.get(f"/sessions/{mine.session_id}/calls", headers=headers)).status_code == 200
        for response in (
            await r.http.post(other.base_url + "/chat/completions", json=body, headers=headers),
            await r.http.get(f"/sessions/{other.session_id}", headers=headers),
            await r.http.get(f"/sessions/{other.session_id}/trajectories", headers=headers),
            await r.http.post(f"/sessions/{mine.session_id}/reward", json={"reward": 1}, headers=headers),
            await r.http.post(f"/sessions/{mine.session_id}/finish", json={}, headers=headers),
            await r.http.post("/sessions", json={}, headers=headers),
            await r.http.post("/policy/begin", json={"step": 0, "parent": 0}, headers=headers),
            await r.http.post("/learner/lease", json={"num_groups": 1, "step": 0}, headers=headers),
            await r.http.get("/sessions"),
        ):
            assert response.status_code in (401, 403), response.request.url
        unknown = await r.chat(key="never seen")
        assert unknown.status_code == 200  # a loopback bind opens sessions by key
        assert (await r.chat(key="root")).status_code == 403
        async with RouterClient(r.url, admin_key="wrong") as stranger:
            with pytest.raises(RouterError, match="401"):
                await stranger.sessions()


@pytest.mark.parametrize("admin_key", [None, "root"])
async def test_a_wrong_key_never_reaches_a_session(tmp_path: Path, admin_key: str | None) -> None:
    """Also where admin calls are open: no key is an admin's there, a wrong one nobody's."""
    async with router(tmp_path, always(said("ok")), config=RouterConfig(admin_key=admin_key)) as r:
        mine, other = await r.admin.new_session(), await r.admin.new_session()
        body = {"model": "m", "messages": USER}
        statuses = {
            "wrong": 401,
            mine.api_key[:-1]: 401,
            other.api_key: 403,
            mine.api_key: 200,
            "root": 401 if admin_key is None else 200,
        }
        for key, status in statuses.items():
            for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
                called = await r.http.post(mine.base_url + "/chat/completions", json=body, headers=headers)
                shown = await r.http.get(f"/sessions/{mine.session_id}", headers=headers)
                assert (called.status_code, shown.status_code) == (status, status), key
        bare = await r.http.post(mine.base_url + "/chat/completions", json=body)
        assert bare.status_code == (200 if admin_key is None else 401)


async def test_an_agent_cannot_reward_itself_where_admin_calls_are_open(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("ok"))) as r:
        session_id = (await r.chat(key="mine")).headers["x-rlagent-session"]
        headers = {"authorization": "Bearer mine"}
        response = await r.http.post(f"/sessions/{session_id}/reward", json={"reward": 1}, headers=headers)
        assert response.status_code == 403


async def test_unknown_keys_are_refused_where_sessions_are_not_opened_by_key(tmp_path: Path) -> None:
    config = RouterConfig(admin_key="root", open_sessions_by_key=False)
    async with router(tmp_path, always(said("ok")), config=config) as r:
        assert (await r.chat()).status_code == 401
        assert (await r.http.get("/v1/models", headers={"authorization": "Bearer x"})).status_code == 401
        assert (await r.http.post("/v1/chat/completions", json={"model": "m", "messages": USER})).status_code == 401


async def test_a_client_cannot_set_input_ids_and_unknown_paths_are_404(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("ok"))) as r:
        response = await r.chat(input_ids=[1, 2, 3], return_logprob=False, lora_path="x")
        assert response.status_code == 200
        (call,) = await r.calls(response)
        assert r.engine.requests[0]["input_ids"] == call["prompt_ids"] != [1, 2, 3]
        assert "lora_path" not in r.engine.requests[0]
        assert call["client"]["ignored"] == {"input_ids": [1, 2, 3], "return_logprob": False, "lora_path": "x"}
        for path in ("/v1/embeddings", "/generate", "/v1/chat/completions/x", "/sessions/x/v1/unknown"):
            found = await r.http.post(path, json={}, headers={"authorization": "Bearer agent"})
            assert (found.status_code, error_of(found)["code"]) == (404, "unknown_url")
        assert (await r.http.get("/v1/chat/completions")).status_code == 405


async def test_bad_bodies_are_400_and_name_the_field(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("ok")), config=RouterConfig(max_body_bytes=10_000)) as r:
        headers = {"authorization": "Bearer agent"}
        broken = await r.http.post("/v1/chat/completions", content=b'{"model": ', headers=headers)
        assert (broken.status_code, broken.headers["x-should-retry"]) == (400, "false")
        assert "not valid JSON" in error_of(broken)["message"]
        large = await r.http.post("/v1/chat/completions", content=b" " * 20_000, headers=headers)
        assert large.status_code == 413
        assert r.engine.requests == []


async def test_models_are_listed(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("ok"))) as r:
        headers = {"authorization": "Bearer fresh"}
        listed = (await r.http.get("/v1/models", headers=headers)).json()
        assert [model["id"] for model in listed["data"]] == ["policy"]
        assert (await r.http.get("/v1/models/gpt-x", headers=headers)).json()["id"] == "gpt-x"
        assert await r.admin.sessions() == []


async def test_a_bind_for_others_needs_an_admin_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="admin_key"):
        async with router(tmp_path, always(said("ok")), config=RouterConfig(host="0.0.0.0")):
            pass


async def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    async with router(tmp_path / "a", always(said("ok"))) as r:
        port = int(r.url.rpartition(":")[2])
        with pytest.raises(ConfigError, match="in use"):
            async with router(tmp_path / "b", always(said("ok")), config=RouterConfig(port=port)):
                pass
