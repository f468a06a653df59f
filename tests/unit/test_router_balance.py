"""Which engine a call goes to: sessions stay, groups go together, load decides, and what an engine leaves behind moves."""

import asyncio

import pytest

from rlagent.router.balance import NoEngine, Pool
from rlagent.router.engine_client import Engine, EngineHttp, new_http


def engines(http: EngineHttp, count: int) -> list[Engine]:
    found = [Engine(f"http://127.0.0.1:{9000 + i}", http, vocabulary=10, timeout_s=1.0) for i in range(count)]
    for engine in found:
        engine.state = "ready"
    return found


async def test_a_session_stays_where_it_was_though_others_are_less_loaded() -> None:
    async with new_http() as http:
        first, second = engines(http, 2)
        pool = Pool([first, second])
        home = await pool.pick("s")
        home.running = 9
        assert await pool.pick("s") is home
        assert await pool.pick("t") is not home
        pool.forget("s")
        assert await pool.pick("s") is not home


async def test_mates_of_a_group_go_together_and_groups_are_spread() -> None:
    async with new_http() as http:
        pool = Pool(engines(http, 3))
        homes = {}
        for group in ("a", "b", "c"):
            members = {await pool.pick(f"{group}{i}", group) for i in range(8)}
            assert len(members) == 1
            (homes[group],) = members
            homes[group].running = 8
        assert len(set(homes.values())) == 3


async def test_what_an_engine_leaves_behind_moves_together() -> None:
    async with new_http() as http:
        pool = Pool(engines(http, 3))
        (left,) = {await pool.pick(f"a{i}", "a") for i in range(4)}
        left.lose()
        moved = {await pool.pick(f"a{i}", "a") for i in range(4)}
        assert len(moved) == 1
        assert left not in moved
        left.state = "ready"
        assert {await pool.pick(f"a{i}", "a") for i in range(4)} == moved  # no way back: the prefixes are there now


async def test_an_engine_that_broke_a_call_off_is_avoided_for_its_session_alone() -> None:
    async with new_http() as http:
        pool = Pool(engines(http, 2))
        home = await pool.pick("s")
        other = await pool.pick("s", None, {home})
        assert other is not home
        assert await pool.pick("s") is other


async def test_a_call_waits_for_an_engine_that_starts_and_not_for_one_that_is_gone() -> None:
    async with new_http() as http:
        (engine,) = engines(http, 1)
        engine.state = "starting"
        pool = Pool([engine])
        waiting = asyncio.create_task(pool.pick("s"))
        await asyncio.sleep(0)
        engine.state = "ready"
        await pool.announce()
        assert await waiting is engine
        engine.lose()
        with pytest.raises(NoEngine, match="down"):
            await pool.pick("s")
