"""The router's OpenAPI document, and what every path in it makes of bodies, keys and headers that nobody expects."""

import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
from router_harness import USER, Harness, always, router, said

from rlagent.router.config import RouterConfig

FIELDS = (
    "model",
    "messages",
    "input",
    "prompt",
    "tools",
    "stop",
    "n",
    "max_tokens",
    "stream",
    "reward",
    "status",
    "ttl_s",
)
FIELDS += (
    "metadata",
    "group_id",
    "group_size",
    "num_groups",
    "step",
    "wait_s",
    "lease_id",
    "cursor",
    "version",
    "parent",
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**70,
    1e308,
    "",
    "\x00",
    "\ud7ff",
    [],
    [None],
    {},
    {"role": 1},
    USER,
    [[]],
)
RAW = (b"", b"null", b"[]", b'"x"', b"{", b"\xff\xfe", b'{"a":' * 5000, b'{"messages": NaN}')


async def operations(app: Harness) -> list[tuple[str, str]]:
    """(method, path with made-up parameters) of the whole document."""
    paths = (await app.http.get("/openapi.json")).json()["paths"]
    return [(method, re.sub(r"{\w+}", "nobody", path)) for path, methods in paths.items() for method in methods]


async def test_the_document_names_what_is_served(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("hi"))) as app:
        paths = (await app.http.get("/openapi.json")).json()["paths"]
        assert {"/openapi.json", "/v1/chat/completions", "/sessions/{session_id}/finish", "/policy/begin"} <= set(paths)
        assert paths["/v1/chat/completions"]["post"]["security"]
        assert not paths["/health"]["get"]["security"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_no_body_makes_an_error_of_ours(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    async with router(tmp_path, always(said("hi"))) as app:
        for method, path in await operations(app):
            for index in range(len(RAW) if method == "post" else 1):
                body = {field: random.choice(VALUES) for field in random.sample(FIELDS, 8)}
                key = {"authorization": f"Bearer {seed}-{path}-{index}"} if random.random() < 0.8 else {}
                for more in ({"json": body}, {"content": RAW[index]}) if method == "post" else ({},):
                    answer = await app.http.request(method, path, headers=key, **more)
                    assert answer.status_code < 500, (method, path, more, answer.text)


async def test_headers_and_bodies_have_a_limit(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("hi")), config=RouterConfig(max_body_bytes=10_000)) as app:
        assert (await app.http.get("/health", headers={"x-long": "x" * 100_000})).status_code == 400
        assert (await app.chat([{"role": "user", "content": "x" * 20_000}])).status_code == 413
        assert (await app.chat()).status_code == 200


async def test_with_an_admin_key_all_but_three_paths_need_a_key(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("hi")), config=RouterConfig(admin_key="secret")) as app:
        paths = (await app.http.get("/openapi.json")).json()["paths"]
        for path, methods in paths.items():
            for method, operation in methods.items():
                answer = await app.http.request(method, re.sub(r"{\w+}", "nobody", path))
                assert (answer.status_code == 401) == bool(operation["security"]), (method, path, answer.text)
