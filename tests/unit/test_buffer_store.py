"""The store: group commit, one failure beside its neighbours; of the file, a full disk and one process at a time."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from stores import Place

from rlagent.buffer.database import Transaction
from rlagent.buffer.sqlite import SqliteDatabase
from rlagent.buffer.store import Store
from rlagent.errors import StoreError


@pytest.fixture
async def store(place: Place) -> AsyncIterator[Store]:
    store = await Store.open(place.database)
    yield store
    await store.close()


@pytest.fixture
async def file(tmp_path: Path) -> AsyncIterator[Store]:
    """In SQLite: for what only a file can do."""
    store = await opened(tmp_path / "deep" / "buffer.db")
    yield store
    await store.close()


async def opened(path: Path) -> Store:
    return await Store.open(lambda: SqliteDatabase(path))


def put(name: str, value: str = "x") -> Callable[[Transaction], int]:
    return lambda tx: tx.run("INSERT INTO meta VALUES (?, ?)", name, value)


def names(tx: Transaction) -> list[str]:
    return [row[0] for row in tx.rows("SELECT name FROM meta WHERE name != 'schema' ORDER BY name")]


async def test_a_write_is_read_back_and_survives_a_reopen(place: Place) -> None:
    store = await Store.open(place.database)
    assert await store.write(put("a")) == 1
    assert await store.read(names) == ["a"]
    store.write_soon(put("b"))
    await store.close()
    store = await Store.open(place.database)
    assert await store.read(names) == ["a", "b"]
    await store.close()


async def test_pending_writes_share_a_commit_and_a_failed_one_harms_no_neighbour(store: Store) -> None:
    inside, gate = threading.Event(), threading.Event()
    commits: list[None] = []
    await store.write(lambda tx: None)
    writer = store._writer
    assert writer is not None
    commit = writer.commit
    writer.commit = lambda: commits.append(commit())  # type: ignore[method-assign]

    def hold(_tx: Transaction) -> None:
        inside.set()
        gate.wait(10)

    def broken(tx: Transaction) -> None:
        tx.run("INSERT INTO meta VALUES ('broken', 'x')")
        raise ValueError("mine")

    held = store.write_soon(hold)
    await asyncio.to_thread(inside.wait, 10)
    pending = [store.write_soon(work) for work in (put("a"), broken, put("a"), put("b"))]
    gate.set()
    results = await asyncio.gather(*pending, return_exceptions=True)
    assert held.done()
    assert results[0] == results[3] == 1
    assert isinstance(results[1], ValueError)  # the caller's own error comes back as it is
    assert isinstance(results[2], StoreError)  # a constraint of the database
    assert "unique" in str(results[2]).lower()
    assert await store.read(names) == ["a", "b"]
    assert len(commits) == 2  # the gate's, and one for all four


async def test_what_nobody_waits_for_joins_the_next_commit_and_is_seen_by_the_next_read(place: Place) -> None:
    store = await Store.open(place.database)
    await store.write(lambda tx: None)
    writer = store._writer
    assert writer is not None
    commit, commits = writer.commit, list[None]()
    writer.commit = lambda: commits.append(commit())  # type: ignore[method-assign]
    for name in "abc":
        store.write_later(put(name))
    await store.write(put("d"))
    assert len(commits) == 1
    store.write_later(put("e"))
    assert await store.read(names) == ["a", "b", "c", "d", "e"]
    store.write_later(put("f"))
    await store.close()  # and by the end
    store = await Store.open(place.database)
    assert await store.read(names) == ["a", "b", "c", "d", "e", "f"]
    await store.close()


async def test_what_nobody_waits_for_is_committed_though_nothing_follows(store: Store) -> None:
    committed = asyncio.Event()
    loop = asyncio.get_running_loop()

    def work(tx: Transaction) -> None:
        put("a")(tx)
        loop.call_soon_threadsafe(committed.set)

    store.write_later(work)
    async with asyncio.timeout(20):
        await committed.wait()


async def test_a_full_disk_fails_the_writes_and_not_the_process(file: Store) -> None:
    store = file
    await store.write(put("before"))
    path = Path(store.database.name)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = path.with_name(path.name + "-wal").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 8192, hard))  # a real EFBIG from the file system
    try:
        big = "x" * 200_000
        results = await asyncio.gather(*(store.write(put(f"lost{i}", big)) for i in range(3)), return_exceptions=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert all(isinstance(result, StoreError) for result in results), results
    assert await store.read(names) == ["before"]
    await store.write(put("after"))
    assert await store.read(names) == ["after", "before"]


async def test_a_database_too_large_rolls_back_every_member_of_the_commit(file: Store) -> None:
    store = file
    pages = await store.write(lambda tx: tx.row("PRAGMA page_count"))
    assert pages is not None
    await store.write(lambda tx: tx.row(f"PRAGMA max_page_count = {pages[0] + 4}"))
    results = await asyncio.gather(
        store.write(put("small")), store.write(put("large", "x" * 500_000)), return_exceptions=True
    )
    assert isinstance(results[1], StoreError)
    stored = await store.read(names)
    assert stored == (["small"] if results[0] == 1 else [])  # what was acknowledged is there, what was refused is not


async def test_a_second_process_is_refused(file: Store) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from rlagent.buffer.sqlite import SqliteDatabase; from rlagent.errors import StoreError\n"
        "try: SqliteDatabase(Path(sys.argv[1]))\n"
        "except StoreError as error: print(error)\n"
    )
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", script, file.database.name], capture_output=True, text=True, check=True
    )
    assert "in use by another process" in done.stdout


async def test_a_path_that_cannot_be_written_and_what_is_no_database_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"choose another buffer\.path"):
        await opened(tmp_path / "file" / "buffer.db")
    (tmp_path / "other.db").write_bytes(b"not a database at all" * 100)
    with pytest.raises(StoreError, match="not a database"):
        await opened(tmp_path / "other.db")


async def test_another_schema_is_refused(place: Place) -> None:
    store = await Store.open(place.database)
    await store.write(lambda tx: tx.run("UPDATE meta SET value = '0' WHERE name = 'schema'"))
    await store.close()
    with pytest.raises(StoreError, match="has schema 0"):
        await Store.open(place.database)


async def test_a_closed_store_says_so(place: Place) -> None:
    store = await Store.open(place.database)
    await store.close()
    await store.close()
    with pytest.raises(StoreError, match="is closed"):
        await store.write(put("a"))
    with pytest.raises(StoreError, match="is closed"):
        await store.read(names)
