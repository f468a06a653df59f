"""Who may do what: an agent's key opens `/v1` and shows its own session; everything else is the admin's.

Keys are compared by hash, in constant time where they are compared at all. Invariants: a session's key never reaches
another session, nor any admin call, also where admin calls need no key (a loopback bind without an admin key); a wrong
key never reaches a session at all.
"""

from __future__ import annotations

import hmac
import ipaddress
from typing import Final

from aiohttp import web

from rlagent.router.config import RouterConfig
from rlagent.router.errors import ApiError
from rlagent.router.live import LiveSession, LiveSessions, hash_key

# The session that a request turned out to be of; every answer names it.
SESSION_KEY: Final = web.RequestKey("session_id", str)


def is_loopback(host: str) -> bool:
    """Whether a bind address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Auth:
    """The checks of one router."""

    def __init__(self, config: RouterConfig, live: LiveSessions) -> None:
        self._admin_hash = None if config.admin_key is None else hash_key(config.admin_key)
        self._live = live
        opens = config.open_sessions_by_key
        self._opens_by_key = is_loopback(config.host) if opens is None else opens

    async def admin(self, request: web.Request) -> None:
        """Let an admin pass."""
        key = _key(request)
        if self._admin_hash is not None:
            if key is None or not self._is_admin(key):
                raise _unauthorized("this call needs the admin key: Authorization: Bearer ADMIN_KEY")
        elif key is not None and await self._live.id_of_key(hash_key(key)) is not None:
            raise _forbidden("a session's key may call /v1 and read its own session, nothing else")

    async def reader(self, request: web.Request, session_id: str) -> None:
        """Let an admin pass, and the session's own key. A key that is neither is wrong, also where admin calls need none."""
        key = _key(request)
        if key is None:
            await self.admin(request)
        elif not self._is_admin(key):
            found = await self._live.id_of_key(hash_key(key))
            if found is None:
                open_admin = "" if self._admin_hash is not None else ", or none (this router has no admin key)"
                raise _unauthorized(
                    f"this is not the key of session {session_id}; use the api_key that came with its base_url{open_admin}"
                )
            if found != session_id:
                raise _forbidden("a session's key may call /v1 and read its own session, nothing else")

    async def by_path(self, request: web.Request, session_id: str) -> LiveSession:
        """The session that a path names, for its own key or an admin."""
        await self.reader(request, session_id)
        request[SESSION_KEY] = session_id
        return await self._live.by_id(session_id)

    async def by_key(self, request: web.Request) -> LiveSession:
        """The session that a key names; a key never seen opens one where that is allowed."""
        key = self._need_key(request)
        key_hash = hash_key(key)
        found = await self._live.id_of_key(key_hash)
        if found is not None:
            request[SESSION_KEY] = found
            return await self._live.by_id(found)
        if not self._opens_by_key:
            raise _unauthorized("unknown api key; open a session with POST /sessions and use the key it answers")
        live = await self._live.open_by_key(key_hash)
        request[SESSION_KEY] = live.session.session_id
        return live

    async def any_key(self, request: web.Request) -> str | None:
        """The session of a key that may list models, without opening one."""
        key = self._need_key(request, admin=True)
        found = await self._live.id_of_key(hash_key(key))
        if found is None and not self._opens_by_key and not self._is_admin(key):
            raise _unauthorized("unknown api key")
        return found

    def _need_key(self, request: web.Request, *, admin: bool = False) -> str:
        key = _key(request)
        if not key:
            raise _unauthorized("send an api key: Authorization: Bearer KEY")
        if not admin and self._is_admin(key):
            raise _forbidden("the admin key is no session's key; open a session with POST /sessions and use its key")
        return key

    def _is_admin(self, key: str) -> bool:
        return self._admin_hash is not None and hmac.compare_digest(hash_key(key), self._admin_hash)


def _key(request: web.Request) -> str | None:
    """The key of a request, where the SDKs put it."""
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip()
    return request.headers.get("x-api-key") or None


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", retry=False)


def _forbidden(message: str) -> ApiError:
    return ApiError(403, message, kind="permission_error", code="forbidden", retry=False)
