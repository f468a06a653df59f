"""A real embedded engine as a child process, and what tests ask of it over HTTP."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx

LONG = {"max_new_tokens": 3000, "ignore_eos": True}  # seconds of generation: whatever a test does comes in the middle


@contextmanager
def running_engine(model_dir: Path, *options: str) -> Iterator[str]:
    """`python -m rlagent.engine` on a free port; yields its base URL, and ends it by its process id."""
    command = [
        sys.executable,
        "-m",
        "rlagent.engine",
        "--model",
        str(model_dir),
        "--port",
        "0",
        "--weight-version",
        "0",
        *options,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            assert ready, f"the engine ended before it was ready, with status {process.wait()}"
            yield ready.split()[-1]
        finally:
            process.kill()
            process.wait()


def widen_context(model_dir: Path, length: int) -> None:
    """Give a tiny checkpoint room for long generations; its RoPE tables follow the config."""
    path = model_dir / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": length}))


class EngineClient:
    """One engine's routes; every answer but a refusal must be a 200."""

    def __init__(self, url: str) -> None:
        self.http = httpx.AsyncClient(base_url=url, timeout=60)

    async def post(self, path: str, **body: object) -> httpx.Response:
        """A POST that must be done."""
        response = await self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response

    async def refused(self, path: str, **body: object) -> str:
        """A POST that must be refused with 400; its message."""
        response = await self.http.post(path, json=body)
        assert response.status_code == 400, response.text
        answer = response.json()  # SGLang says why in one of two places
        message: str = answer["error"]["message"] if "error" in answer else answer["message"]
        return message

    async def generate(self, ids: list[int], **params: object) -> Any:
        """/generate with logprobs, not streamed."""
        body = {"input_ids": ids, "return_logprob": True, "sampling_params": {"ignore_eos": True, **params}}
        return (await self.post("/generate", **body)).json()

    @asynccontextmanager
    async def stream(self, ids: list[int], **body: Any) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """/generate, streamed: chunk after chunk, up to [DONE]."""
        body = {"input_ids": ids, "return_logprob": True, "stream": True, "sampling_params": LONG, **body}
        async with self.http.stream("POST", "/generate", json=body) as response:
            assert response.status_code == 200
            yield _chunks(response)

    async def info(self) -> dict[str, Any]:
        """/server_info."""
        found: dict[str, Any] = (await self.http.get("/server_info")).json()
        return found

    async def version(self) -> str:
        """The weight version in force."""
        return str((await self.http.get("/model_info")).json()["weight_version"])


async def _chunks(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            return
        if line:
            yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream broke off before [DONE]")
