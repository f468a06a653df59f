"""The router's OpenAPI document, and what every path in it makes of bodies, keys and headers that nobody expects."""

import re
import zlib
from pathlib import Path
from typing import Any

import pytest
from router_harness import always, router, said

from rlagent.router.config import RouterConfig

RAW = (
    b"",
    b"null",
    b"[]",
    b'"x"',
    b"{",
    b"\xff\xfe",
    b'{"a":' * 5000,
    b'{"a":' * 100 + b"1" + b"}" * 100,
    b'{"messages": NaN}',
)


async def test_the_document_names_what_is_served(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("hi"))) as app:
        paths = (await app.http.get("/openapi.json")).json()["paths"]
        assert {"/openapi.json", "/v1/chat/completions", "/sessions/{session_id}/finish", "/policy/begin"} <= set(paths)
        assert paths["/v1/chat/completions"]["post"]["security"]
        assert not paths["/health"]["get"]["security"]


async def test_what_is_no_body_is_refused_on_every_path(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("hi"))) as app:
        paths = (await app.http.get("/openapi.json")).json()["paths"]
        for path in (path for path, methods in paths.items() if "post" in methods):
            for number, raw in enumerate(RAW):
                key = {"authorization": f"Bearer {number}-{path}"} if path.startswith("/v1/") else {}
                answer = await app.http.post(re.sub(r"{\w+}", "nobody", path), headers=key, content=raw)
                empty = not raw and path == "/sessions"  # all of its fields have defaults
                assert answer.status_code in ((200,) if empty else (400, 403, 404)), (path, raw[:20], answer.text)


@pytest.mark.parametrize(
    ("method", "path", "body", "field"),
    [
        ("GET", "/sessions/a%00b", None, "session_id"),
        ("POST", "/sessions/a%00b/finish", {}, "session_id"),
        ("POST", "/sessions", {"task_id": "a\0b"}, "task_id"),
        ("POST", "/sessions", {"group_id": "a\0b"}, "group_id"),
        ("POST", "/sessions/{}/reward", {"reward": 1, "call_id": "a\0b"}, "call_id"),
        ("POST", "/sessions/{}/finish", {"status": "a\0b"}, "status"),
        ("POST", "/learner/consume", {"lease_id": "a\0b", "step": 0}, "lease_id"),
        ("POST", "/policy/fail", {"publish_id": "a\0b", "reason": "x"}, "publish_id"),
        ("POST", "/sessions", {"group_id": "a", "group_size": 2**63}, "group_size"),
        ("POST", "/learner/restore", {"cursor": 2**63, "version": 0}, "cursor"),
        ("GET", "/sessions?limit=" + "9" * 5000, None, "limit"),
    ],
)
async def test_what_no_store_can_hold_is_refused_by_name(
    tmp_path: Path, method: str, path: str, body: dict[str, Any] | None, field: str
) -> None:
    async with router(tmp_path, always(said("hi"))) as app:
        session_id = (await app.http.post("/sessions", json={})).json()["session_id"]
        answer = await app.http.request(method, path.format(session_id), json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == field


async def test_any_bytes_may_be_a_key_or_a_count_of_retries(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("hi"))) as app:
        for header in (b"Bearer \xff\xfe", b"Bearer \xed\xa0\x80"):
            answer = await app.chat(headers={"authorization": header, "x-stainless-retry-count": "9" * 5000})
            assert answer.status_code == 200, answer.text


async def test_headers_and_bodies_have_a_limit(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("hi")), config=RouterConfig(max_body_bytes=10_000)) as app:
        assert (await app.http.get("/health", headers={"x-long": "x" * 100_000})).status_code == 400
        assert (await app.chat([{"role": "user", "content": "x" * 20_000}])).status_code == 413
        assert (await app.chat()).status_code == 200


async def test_a_small_body_that_unpacks_to_a_large_one_is_too_large(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("hi")), config=RouterConfig(max_body_bytes=10_000)) as app:
        packed = zlib.compress(b" " * 5_000_000)
        headers = {"authorization": "Bearer a", "content-encoding": "deflate"}
        assert len(packed) < 10_000
        answer = await app.http.post("/v1/chat/completions", content=packed, headers=headers)
        assert answer.status_code in (400, 413), answer.text


async def test_invented_fields_are_counted_up_to_a_bound(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("hi"))) as app:
        for number in range(3):
            assert (await app.chat(**{f"field_{number}_{i}": 1 for i in range(200)})).status_code == 200
        shown = (await app.http.get("/metrics")).text
    lines = [line for line in shown.splitlines() if line.startswith("rlagent_ignored_fields_total")]
    assert len(lines) <= 257
    assert 'kind="(other)"} 344' in shown


async def test_with_an_admin_key_all_but_three_paths_need_a_key(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("hi")), config=RouterConfig(admin_key="secret")) as app:
        paths = (await app.http.get("/openapi.json")).json()["paths"]
        for path, methods in paths.items():
            for method, operation in methods.items():
                answer = await app.http.request(method, re.sub(r"{\w+}", "nobody", path))
                assert (answer.status_code == 401) == bool(operation["security"]), (method, path, answer.text)
