"""What an agent program in a sandbox without network reaches: the model calls of its own session, and nothing else of the router.

In the flow: agent program -> 127.0.0.1 in its namespace -> here, in the rollout's process -> router. Answers stream through, and who
goes away on either side takes the other along. Invariant: only paths below the session's own base_url pass, so that a program cannot
reach the router's other routes (rewards, other sessions), which on a loopback bind may need no key.
"""

import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import aiohttp
from aiohttp import web
from yarl import URL

from rlagent.client import SessionHandle
from rlagent.sandboxes.base import Door

PORT: Final = 8000  # in a network namespace of the command's own: nobody else is there
_MAX_BODY_BYTES: Final = 256 * 1024**2  # the router has its own, lower bound
# Of one connection, never of the whole message; the two ends agree on lengths and encodings by themselves.
_OF_THE_CONNECTION: Final = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host", "content-length", "expect"}
)


def session_door(session: SessionHandle) -> tuple[Door, SessionHandle]:
    """A door to one session's model calls, and the session as the command behind the door sees it."""
    real = URL(session.base_url)
    inside = SessionHandle(
        session_id=session.session_id, base_url=f"http://127.0.0.1:{PORT}{real.path}", api_key=session.api_key
    )
    allowed = re.compile(re.escape(real.path) + r"(/[\w-]+)+(\?[^#]*)?")  # no dots, no escapes: nothing to resolve

    @asynccontextmanager
    async def serve(listening: socket.socket) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
        async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as client:

            async def forward(request: web.Request) -> web.StreamResponse:
                if allowed.fullmatch(request.raw_path) is None:
                    return _refused(404, f"only paths below {real.path} can be reached from here")
                try:
                    return await _forwarded(request, client, real.origin())
                except aiohttp.ClientConnectorError as error:
                    return _refused(502, f"the router cannot be reached: {error}")

            app = web.Application(client_max_size=_MAX_BODY_BYTES)
            app.router.add_route("*", "/{tail:.*}", forward)
            runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0)
            await runner.setup()
            try:
                await web.SockSite(runner, listening).start()
                yield
            finally:
                await runner.cleanup()

    return Door(port=PORT, serve=serve), inside


async def _forwarded(request: web.Request, client: aiohttp.ClientSession, origin: URL) -> web.StreamResponse:
    sent = [(name, value) for name, value in request.headers.items() if name.lower() not in _OF_THE_CONNECTION]
    async with client.request(
        request.method, URL(f"{origin}{request.raw_path}", encoded=True), headers=sent, data=await request.read(),
        allow_redirects=False,
    ) as answer:  # fmt: skip
        response = web.StreamResponse(status=answer.status, reason=answer.reason)
        for name, value in answer.headers.items():
            if name.lower() not in _OF_THE_CONNECTION:
                response.headers.add(name, value)
        await response.prepare(request)
        async for piece in answer.content.iter_any():
            await response.write(piece)
        await response.write_eof()
        return response


def _refused(status: int, message: str) -> web.Response:
    """In the shape that both vendors' SDKs read."""
    return web.json_response({"error": {"message": message, "type": "invalid_request_error"}}, status=status)
