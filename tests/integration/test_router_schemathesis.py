"""The router against its own OpenAPI document: schemathesis makes up requests, and every answer must be as the document says.

No failure of our making (5xx), no status, content type, header or body that the document does not name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from router_harness import TOOLS, USER, always, router, said
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS: Final[list[Any]] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
# Conversations that a made-up body takes up in half of the cases, so that its other fields are looked at.
REAL: Final[dict[str, dict[str, Any]]] = {
    "chat/completions": {"messages": USER, "tools": TOOLS},
    "completions": {"prompt": "Once"},
    "responses": {"input": "Hello"},
    "messages": {"messages": USER, "max_tokens": 9},
}
EXAMPLES: Final = 15  # an operation


def check(url: str, agent: Callable[[], tuple[str, str]]) -> int:
    """Every operation of the document, by made-up requests; how many were sent."""
    operations: Any = schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations()
    return sum(check_operation(found.ok(), *agent()) for found in operations)


def check_operation(operation: Any, session_id: str, key: str) -> int:
    """One operation, of a session that exists and of others."""
    sent = 0
    real = REAL.get(operation.path.partition("/v1/")[2], {})
    headers = {"authorization": f"Bearer {key}"} if "/v1/" in operation.path else {}

    @settings(
        max_examples=EXAMPLES, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(operation.as_strategy(), st.booleans())
    def ask(case: Any, known: bool) -> None:
        nonlocal sent
        if known and "session_id" in (case.path_parameters or {}):
            case.path_parameters["session_id"] = session_id
        if known and isinstance(case.body, dict):
            case.body |= real
        if operation.path == "/learner/lease" and isinstance(case.body, dict):
            case.body.pop("wait_s", None)  # or it waits that long
        case.call_and_validate(checks=CHECKS, headers=headers)
        sent += 1

    ask()
    return sent


@pytest.mark.slow
async def test_every_answer_is_as_the_document_says(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("hi"))) as app:

        def agent() -> tuple[str, str]:
            opened = httpx.post(f"{app.url}/sessions", json={}, trust_env=False).json()
            return opened["session_id"], opened["api_key"]

        assert await asyncio.to_thread(check, app.url, agent) > 200
