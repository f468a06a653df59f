"""Agent programs: what they are given, how they end, and what they reach from a sandbox without network."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from router_harness import always, router, said
from sandbox_backends import Signal, alive, needs_bwrap

from rlagent.agent_program import run_agent
from rlagent.client import SessionHandle
from rlagent.errors import RolloutError, SandboxError
from rlagent.sandboxes.base import Door
from rlagent.sandboxes.docker import DockerBackend
from rlagent.sandboxes.docker_sandbox import DockerSandbox
from rlagent.sandboxes.process import ProcessSandbox

SESSION = SessionHandle(session_id="s1", base_url="http://127.0.0.1:9/sessions/s1/v1", api_key="k1")
# An agent for a sandbox where nothing but the system's shell is sure to be: bash speaks HTTP by itself.
ASK = r"""
rest=${OPENAI_BASE_URL#http://}; host=${rest%%/*}; path=/${rest#*/}
body='{"model": "policy", "messages": [{"role": "user", "content": "Hi"}]}'
exec 3<>"/dev/tcp/${host%:*}/${host#*:}"
printf 'POST %s HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer %s\r\ncontent-length: %d\r\n\r\n%s' \
    "$path${1:-/chat/completions}" "$OPENAI_API_KEY" "${#body}" "$body" >&3
cat <&3
"""


async def test_a_program_in_a_directory_is_given_the_session_and_its_end_is_kept(tmp_path: Path) -> None:
    script = "cat; env | sort; pwd; echo oops >&2; exit 3"
    done = await run_agent(["sh", "-c", script], SESSION, tmp_path, env={"MORE": "m"}, stdin=b"task\n", check=False)
    lines = done.stdout.decode().splitlines()
    assert (done.exit_code, done.stderr, lines[0], lines[-1]) == (3, b"oops\n", "task", str(tmp_path.resolve()))
    assert {f"{name}={value}" for name, value in SESSION.environ().items()} < set(lines)
    assert {"MORE=m", f"HOME={tmp_path.resolve()}"} < set(lines)


async def test_nothing_else_of_our_environment_reaches_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTPS_PROXY", "OPENAI_ORG_ID", "ANTHROPIC_AUTH_TOKEN"):
        monkeypatch.setenv(name, "leak")
    done = await run_agent(["env"], SESSION, tmp_path)
    assert b"leak" not in done.stdout


async def test_a_failing_program_is_an_error_that_tells_how_and_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match=r"(?s)'sh' exited with code 3.*no such tool"):
        await run_agent(["sh", "-c", "echo no such tool >&2; exit 3"], SESSION, tmp_path)
    with pytest.raises(RolloutError, match="ended by signal 15"):
        await run_agent(["sh", "-c", "kill -TERM $$"], SESSION, tmp_path)
    with pytest.raises(SandboxError, match="'no-such-agent' cannot be started: it is not a program"):
        await run_agent(["no-such-agent"], SESSION, tmp_path)


async def test_output_is_capped(tmp_path: Path) -> None:
    done = await run_agent(["head", "-c", "300000", "/dev/zero"], SESSION, tmp_path, output_limit_bytes=1000)
    assert (len(done.stdout), done.truncated, done.exit_code) == (1000, True, 0)


LEAVER = "(setsid sleep 987.5 >/dev/null 2>&1 &) ; sleep {mark} & echo up"


async def test_a_timeout_ends_all_that_the_program_started(tmp_path: Path) -> None:
    mark = "986.5"
    done = await run_agent(
        ["sh", "-c", f"{LEAVER.format(mark=mark)}; wait"], SESSION, tmp_path, timeout_s=1, check=False
    )
    assert (done.timed_out, done.exit_code, done.signal, done.stdout) == (True, None, 9, b"up\n")
    assert (alive(mark), alive("987.5")) == ([], [])


async def test_cancelling_ends_all_that_the_program_started(tmp_path: Path) -> None:
    mark = "985.5"
    up = Signal(tmp_path / "up")
    script = f"(setsid sleep 984.5 >/dev/null 2>&1 &) ; sh -c 'echo > up; sleep 900' sh {mark} & wait"
    task = asyncio.create_task(run_agent(["sh", "-c", script], SESSION, tmp_path))
    await up.wait()
    assert alive(mark)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (alive(mark), alive("984.5")) == ([], [])


@needs_bwrap
async def test_a_sandbox_without_network_reaches_its_sessions_model_and_nothing_else(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("Hello."))) as harness, ProcessSandbox() as sandbox:
        session = await harness.admin.new_session(task_id="t")
        done = await run_agent(["bash", "-c", ASK], session, sandbox)
        assert b"Hello." in done.stdout
        (call,) = await harness.admin.calls(session.session_id)
        assert call["delivery"] == "delivered"
        for path in ("/../reward", "/../../sessions", "/%2e%2e/finish"):
            refused = await run_agent(["bash", "-c", ASK, "sh", path], session, sandbox)
            assert refused.stdout.startswith(b"HTTP/1.1 404"), refused.stdout
        port = session.base_url.split(":")[2].split("/")[0]
        direct = await run_agent(["bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{port}"], session, sandbox, check=False)
        assert b"refused" in direct.stderr
        (seen,) = await harness.admin.sessions()
        assert seen["state"] == "open"


@needs_bwrap
async def test_a_sandbox_with_network_is_given_the_routers_own_address(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("Hello."))) as harness, ProcessSandbox(network=True) as sandbox:
        session = await harness.admin.new_session(task_id="t")
        done = await run_agent(["bash", "-c", ASK], session, sandbox)
        assert b"Hello." in done.stdout
        with pytest.raises(SandboxError, match="takes no door"):
            await sandbox.exec(["true"], door=Door(port=1, serve=_never))


@needs_bwrap
async def test_a_command_that_cannot_begin_behind_a_door_says_so(tmp_path: Path) -> None:
    async with ProcessSandbox() as sandbox:
        with pytest.raises(SandboxError, match="no-such-agent"):
            await run_agent(["no-such-agent"], SESSION, sandbox)
        done = await run_agent(["sleep", "60"], SESSION, sandbox, timeout_s=1, check=False)
        assert done.timed_out


@needs_bwrap
async def test_a_sandbox_sees_the_places_it_is_told_to_and_cannot_write_them(tmp_path: Path) -> None:
    prefix = Path(sys.base_prefix)
    async with ProcessSandbox(readable=[prefix]) as sandbox:
        done = await sandbox.exec([str(prefix / "bin" / "python3"), "-I", "-c", "print(6 * 7)"])
        assert (done.stdout, done.stderr) == (b"42\n", b"")
        assert not (await sandbox.exec(["touch", str(prefix / "new")])).ok


async def test_a_container_has_no_door() -> None:
    sandbox = DockerSandbox(DockerBackend(image="none"), None, None)  # type: ignore[arg-type]
    with pytest.raises(SandboxError, match="network=True"):
        await run_agent(["true"], SESSION, sandbox)


def _never(_: object) -> object:
    raise AssertionError
