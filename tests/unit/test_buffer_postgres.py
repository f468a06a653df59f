"""What only PostgreSQL can meet: no psycopg, a wrong URL, a server that is down or comes back, two replicas at once."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psycopg
import pytest
from postgres_server import PostgresServer, server_or_skip
from stores import Place, make_call

from rlagent.buffer import Buffer
from rlagent.buffer.config import BufferConfig
from rlagent.buffer.database import Transaction
from rlagent.buffer.store import Store
from rlagent.errors import ConflictError, MovedError, StoreError
from rlagent.types import Reward, Session

NOWHERE = Path("no-file-is-used")


@pytest.fixture
async def pair(postgres: PostgresServer) -> AsyncIterator[tuple[Buffer, Buffer]]:
    """Two replicas' buffers on one database."""
    place = Place(NOWHERE, postgres.new_schema())
    first, second = await place.open(), await place.open()
    await first.ensure_initial(checksum="", snapshot="model")
    await second.read_policy()
    yield first, second
    await first.close()
    await second.close()


async def until(buffer: Buffer, version: int) -> None:
    """Wait for what the other replica says."""
    async with asyncio.timeout(20):
        while buffer.policy().version != version:
            await buffer.policy_moved()


@pytest.mark.parametrize("url", ["mysql://x", "/a/file"])
def test_a_url_of_something_else_is_a_config_error(url: str) -> None:
    with pytest.raises(ValueError, match="url"):
        BufferConfig(url=url)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql://user@host:port/db?nonsense=1", "buffer.url is no PostgreSQL URL"),
        ("postgresql://user:secret@127.0.0.1:1/db", "cannot reach the data buffer.*127.0.0.1:1.*start the server"),
    ],
)
async def test_a_wrong_url_and_a_server_that_is_down_are_said(url: str, words: str) -> None:
    with pytest.raises(StoreError, match=f"(?s){words}") as raised:
        await Place(NOWHERE, url).open()
    assert "secret" not in str(raised.value)


def test_without_psycopg_sqlite_works_and_a_url_says_what_to_install(tmp_path: Path) -> None:
    script = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from rlagent.buffer import Buffer\nfrom rlagent.buffer.config import BufferConfig\n"
        "import rlagent.serve\n"
        "async def opened(url):\n"
        "    await (await Buffer.open(Path(sys.argv[1]), BufferConfig(url=url))).close()\n"
        "asyncio.run(opened(None))\n"
        "assert 'psycopg' not in sys.modules\n"
        "sys.modules['psycopg'] = None\n"
        "try: asyncio.run(opened('postgresql://x/y'))\n"
        "except Exception as error: print(error)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "b.db")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "pip install 'rlagent-rl[postgres]'" in done.stdout


async def test_a_key_opens_one_session_over_all_replicas(pair: tuple[Buffer, Buffer]) -> None:
    sessions = [Session(session_id=f"s{number}", key_hash="k") for number in range(8)]
    results = await asyncio.gather(
        *(pair[number % 2].open_session(session) for number, session in enumerate(sessions)), return_exceptions=True
    )
    assert [type(result) for result in results if result is not None] == [ConflictError] * 7


async def test_version_numbers_are_given_out_once_over_all_replicas(pair: tuple[Buffer, Buffer]) -> None:
    first, second = pair
    seen = []
    for _ in range(6):
        begun = await asyncio.gather(
            *(buffer.begin_publish(step=0, parent=0) for buffer in pair), return_exceptions=True
        )
        owner, other = pair if isinstance(begun[1], BaseException) else pair[::-1]
        (publish,) = [each for each in begun if not isinstance(each, BaseException)]
        (refused,) = [each for each in begun if isinstance(each, BaseException)]
        assert isinstance(refused, ConflictError)
        seen.append(publish.version)
        for ended in (
            other.commit_publish(publish.publish_id, checksum="", snapshot=None),
            other.fail_publish(publish.publish_id, ""),
        ):
            with pytest.raises(ConflictError, match="another replica"):
                await ended
        await owner.commit_publish(publish.publish_id, checksum="", snapshot=f"v{publish.version}")
        for buffer in pair:
            await until(buffer, publish.version)
            snapshot = buffer.newest_snapshot()
            assert snapshot is not None
            assert snapshot.version == publish.version
    assert seen == sorted(set(seen))
    assert first.policy() == second.policy()


async def test_one_replica_at_a_time_holds_the_engines(pair: tuple[Buffer, Buffer]) -> None:
    inside = 0

    async def change(buffer: Buffer) -> None:
        nonlocal inside
        for _ in range(5):
            async with buffer.engines_held():
                inside += 1
                await buffer.read_policy()
                assert inside == 1
                inside -= 1

    async with asyncio.timeout(30):
        await asyncio.gather(*map(change, pair))


async def test_what_a_dead_replica_was_publishing_is_given_up_by_one_that_lived_all_the_time(
    postgres: PostgresServer,
) -> None:
    place = Place(NOWHERE, postgres.new_schema())
    dead, other = await place.open(clock=lambda: 0.0), await place.open(clock=lambda: 0.0)
    await dead.ensure_initial(checksum="", snapshot="model")
    begun = await dead.begin_publish(step=0, parent=0)
    async with other.engines_held() as publishing:
        assert publishing == begun.version
    for second in (3.0, 6.0, 9.0):
        await other.expire_due(second)
        async with other.engines_held() as publishing:
            assert publishing == begun.version
    await other.expire_due(12.0)
    async with other.engines_held() as publishing:
        assert publishing is None
    async with asyncio.timeout(20):
        await other.policy_moved()  # so that its engines are brought in line
    with pytest.raises(ConflictError, match="its router went away"):
        await dead.commit_publish(begun.publish_id, checksum="", snapshot=None)
    for buffer in (dead, other):
        await buffer.close()


async def test_text_that_postgresql_cannot_store_fails_alone(pair: tuple[Buffer, Buffer]) -> None:
    good, bad = Session(session_id="a", key_hash="a"), Session(session_id="b\0", key_hash="b")
    results = await asyncio.gather(pair[0].open_session(good), pair[0].open_session(bad), return_exceptions=True)
    assert results[0] is None
    assert isinstance(results[1], StoreError)
    assert await pair[1].session("a") == good


@pytest.mark.slow
async def test_a_server_that_goes_away_fails_changes_and_is_found_again() -> None:
    server = server_or_skip(fsync=True)
    buffer = await Place(NOWHERE, server.new_schema()).open()
    try:
        for number in range(2):
            await buffer.open_session(Session(session_id=f"before{number}", key_hash=f"before{number}"))
            server.kill()
            for work in (buffer.open_session(Session(session_id="lost", key_hash="lost")), buffer.status()):
                with pytest.raises(StoreError, match="start the server"):
                    await work
            server.start()
            assert await buffer.session(f"before{number}") is not None
            assert await buffer.session("lost") is None
        await buffer.open_session(Session(session_id="after", key_hash="after"))
    finally:
        await buffer.close()
        server.stop()


async def test_a_connection_that_is_ended_from_outside_is_made_again(pair: tuple[Buffer, Buffer]) -> None:
    first, _ = pair
    await first.open_session(Session(session_id="a", key_hash="a"))
    async with await psycopg.AsyncConnection.connect(_url(first), autocommit=True) as admin:
        await admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = 'rlagent' AND pid != pg_backend_pid()"
        )
    await first.open_session(Session(session_id="b", key_hash="b"))  # run again, on a new connection
    assert await first.session("b") is not None


def _url(buffer: Buffer) -> str:
    url = buffer._config.url
    assert url is not None
    return url


async def test_of_two_replicas_that_took_a_session_over_only_the_last_extends_it(pair: tuple[Buffer, Buffer]) -> None:
    first, second = pair
    told: list[str] = []
    heard = asyncio.Event()
    first.on_session(lambda session_id: (told.append(session_id), heard.set()))  # type: ignore[func-returns-value]
    await first.open_session(Session(session_id="s", key_hash="k"))
    await first.record_call(make_call(0))
    session, epoch = await second.claim_session("s")
    assert session is not None
    assert (session.state, epoch) == ("open", 1)
    async with asyncio.timeout(20):
        while "s" not in told:
            heard.clear()
            await heard.wait()
    with pytest.raises(MovedError, match="taken over"):
        await first.record_call(make_call(1))
    await second.record_call(make_call(1), epoch=epoch)
    assert await second.may_extend("s", epoch)
    assert not await first.may_extend("s", 0)
    assert [call.index for call in await first.calls("s")] == [0, 1]


async def test_a_full_disk_fails_the_writes_and_not_the_server() -> None:
    server = server_or_skip(max_file_bytes=4 << 20)  # a real EFBIG from the file system
    store = await Store.open(Place(NOWHERE, server.new_schema()).database)

    def put(number: int) -> Callable[[Transaction], int]:
        text = random.Random(number).randbytes(250_000).hex()
        return lambda tx: tx.run("INSERT INTO meta VALUES (?, ?)", f"big{number:03d}", text)

    try:
        results = [await asyncio.gather(store.write(put(number)), return_exceptions=True) for number in range(20)]
        stored = [f"big{number:03d}" for number, (result,) in enumerate(results) if result == 1]
        failed = [result for (result,) in results if result != 1]
        assert stored
        assert failed
        assert all(isinstance(result, StoreError) for result in failed), failed
        await store.write(lambda tx: tx.run("INSERT INTO meta VALUES ('small', 'x')"))
        found = await store.read(lambda tx: [row[0] for row in tx.rows("SELECT name FROM meta ORDER BY name")])
        assert found == [*stored, "schema", "small"]
    finally:
        await store.close()
        server.stop()


async def test_replicas_that_touch_the_same_sessions_in_any_order_lose_no_change(pair: tuple[Buffer, Buffer]) -> None:
    names = [f"s{number}" for number in range(8)]
    for name in names:
        await pair[0].open_session(Session(session_id=name, key_hash=name))

    async def reward(buffer: Buffer, order: list[str]) -> None:
        await asyncio.gather(*(buffer.add_reward(name, Reward(components={"r": 1.0})) for name in order))

    for _ in range(3):  # each a commit of many, which lock in opposite order: deadlocks are run again
        await asyncio.gather(reward(pair[0], names), reward(pair[1], names[::-1]))
    for name in names:
        session = await pair[0].session(name)
        assert session is not None
        assert session.reward == Reward(components={"r": 6.0})
