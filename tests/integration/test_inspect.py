"""`rlagent inspect` on a forked session: calls, rows, masks and colours, from a router and from its buffer's file."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from fake_engine import Reply
from rich.console import Console
from router_harness import EOS, MODEL, TOKENIZER, USER, in_turn, router, said

from rlagent.errors import LoadError, NotFoundError
from rlagent.inspect import TRAINED, UNTRAINED, show, show_newest
from rlagent.recorded import recorded_config
from rlagent.recorded_session import Recorded, newest, read


def printed(recorded: Recorded, **options: object) -> Console:
    console = Console(record=True, width=160, file=StringIO(), force_terminal=True, color_system="truecolor")
    show(recorded, console, **options)  # type: ignore[arg-type]
    return console


async def forked(tmp_path: Path) -> tuple[Recorded, Recorded]:
    """A session of three calls in two rows, as the router and as the file show it."""
    ids = TOKENIZER.encode("two")
    unlikely = Reply(ids=[*ids, EOS], logprob=-5.0, finish={"type": "stop", "matched": EOS})
    async with router(tmp_path, in_turn(said("one"), unlikely, said("three"))) as r:
        first = await r.chat()
        answer = first.json()["choices"][0]["message"]
        await r.chat([*USER, answer, {"role": "user", "content": "And\tnow?"}])
        last = await r.chat([*USER, answer, {"role": "user", "content": "Or so?"}])
        session_id = last.headers["x-rlagent-session"]
        await r.admin.finish(session_id, reward=0.5)
        served = await read(r.url, session_id, admin_key=None, model=None)
        with pytest.raises(NotFoundError, match=session_id):
            await read(str(tmp_path / "buffer.db"), "s-none", admin_key=None, model=None)
        stored = await read(str(tmp_path / "buffer.db"), session_id, admin_key=None, model=None)
    return served, stored


async def test_a_forked_session_is_shown_by_call_row_and_token(tmp_path: Path) -> None:
    served, stored = await forked(tmp_path)
    console = printed(served)
    text = console.export_text(clear=False)
    assert "sealed · completed · reward 0.5" in text
    assert "#0    fresh (first)" in text
    assert text.count("extends #0") == 2
    assert "row 2 of 2  #0 > #2" in text
    assert "tokens as in row 1" in text
    assert "And⇥" in text
    assert text.count("one<|im_end|>") == 1  # the second row does not say again what the first said
    assert printed(stored).export_text() == text

    tokens = printed(served, row=2, tokens=True).export_text()
    rows = served.rows[1]
    assert len([line for line in tokens.splitlines() if line.split()[:1] and line.split()[0].isdigit()]) == len(
        rows["token_ids"]
    )
    assert "row 1 of 2" not in tokens
    with pytest.raises(NotFoundError, match="rows 1 to 2"):
        printed(served, row=3)


async def test_colours_follow_mask_and_probability(tmp_path: Path) -> None:
    served, _ = await forked(tmp_path)
    html = printed(served).export_html(inline_styles=True)
    plain = Console(record=True, width=160, file=StringIO(), force_terminal=True, color_system="truecolor")
    for style in (TRAINED[-1][1], TRAINED[1][1], UNTRAINED):
        plain.print("x", style=style)
    wanted = [
        line.split('style="')[1].split('"')[0]
        for line in plain.export_html(inline_styles=True).splitlines()
        if ">x<" in line
    ]
    assert len(wanted) == 3
    assert all(style in html for style in wanted[:2])  # the unlikely answer, and the likely ones


async def test_the_newest_sessions_are_listed_from_a_router_and_from_serves_directory(tmp_path: Path) -> None:
    async with router(tmp_path, in_turn(said("one"), said("two"))) as r:
        first, second = [(await r.chat(key=key)).headers["x-rlagent-session"] for key in ("a", "b")]
        await r.admin.finish(first, reward=0.25)
        served = await newest(r.url, admin_key=None)
        stored = await newest(str(tmp_path), admin_key=None)
        assert (await read(str(tmp_path), first, admin_key=None, model=None)).rows
        with pytest.raises(LoadError, match=r"of `rlagent serve`.*lists its sessions"):
            recorded_config(tmp_path)
    assert [session["session_id"] for session in served] == [second, first]
    assert served == stored
    console = Console(record=True, width=160, file=StringIO())
    show_newest(served, console)
    lines = console.export_text().splitlines()
    assert [line.split()[0] for line in lines] == ["session", second, first]
    assert lines[2].split()[-1] == "0.25"


async def test_a_place_without_a_run_and_a_model_that_is_elsewhere_are_said(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="does not exist"):
        await read(str(tmp_path / "none"), "s", admin_key=None, model=None)
    with pytest.raises(LoadError, match="does not exist"):
        recorded_config(tmp_path / "none")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(LoadError, match="cannot be read as a data buffer"):
        await newest(str(tmp_path / "text"), admin_key=None)
    with pytest.raises(LoadError, match="no run directory"):
        await read(str(tmp_path), "s", admin_key=None, model=None)
    async with router(tmp_path, in_turn(said("one"))) as r:
        session_id = (await r.chat()).headers["x-rlagent-session"]
        with pytest.raises(LoadError, match="no tokenizer"):
            await read(r.url, session_id, admin_key=None, model=tmp_path)
        assert (await read(r.url, session_id, admin_key=None, model=MODEL)).rows
