"""Alarms: which rules fire on which lines of metrics, and what firing does."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rlagent.alarm_rules import DEFAULT_ALARMS, AlarmRule, fires
from rlagent.alarms import Alarms
from rlagent.config import build_config, dump_config, load_config
from rlagent.errors import AlarmError, ConfigError


def records(name: str, values: list[Any], **others: list[Any]) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = [{"step": n, name: value} for n, value in enumerate(values, 1)]
    for other, column in others.items():
        for line, value in zip(lines, column, strict=True):
            line[other] = value
    return lines


def fired(rule: AlarmRule, lines: list[dict[str, Any]]) -> list[int]:
    return [n for n in range(1, len(lines) + 1) if fires(rule, lines[:n])]


def test_a_bound_fires_once_for_as_long_as_it_is_crossed() -> None:
    rule = AlarmRule(metric="m", above=1.0)
    assert fired(rule, records("m", [0, 2, 3, 0, 2, None, float("nan"), 2])) == [2, 5, 8]
    assert fired(AlarmRule(metric="m", below=1.0), records("m", [2, 0.5, 2])) == [2]
    assert fired(rule, records("other", [9, 9])) == []


def test_it_may_have_to_hold_for_some_steps() -> None:
    assert fired(AlarmRule(metric="m", above=1.0, for_steps=3), records("m", [2, 2, 0, 2, 2, 2, 2, 2])) == [6]


def test_a_fall_is_measured_against_the_median_of_the_window() -> None:
    rule = AlarmRule(metric="m", falls_to=0.5, window=3)
    assert fired(rule, records("m", [4, 4, 1])) == []  # too little is known yet
    assert fired(rule, records("m", [4, 100, 4, 1.9, 4, 4, 4])) == [4]


def test_reward_that_jumps_where_held_out_success_does_not() -> None:
    rule = AlarmRule(metric="r", rises_by=0.3, without="eval", window=3)
    jump = [0.1, 0.1, 0.1, 0.9]
    assert fired(rule, records("r", jump)) == [4]
    assert fired(rule, records("r", jump, eval=[0.1, None, None, 0.1])) == [4]
    assert fired(rule, records("r", jump, eval=[0.1, None, None, 0.8])) == []


def test_the_default_rules_watch_what_they_should() -> None:
    watched = {rule.metric for rule in DEFAULT_ALARMS}
    assert watched >= {"mismatch_fresh/abs_mean", "policy/approx_kl", "policy/entropy", "policy/clip_high", "reward/mean",
                       "throughput/tokens_per_s"}  # fmt: skip
    assert all(rule.action == "log" for rule in DEFAULT_ALARMS)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ('metric = "m"', "exactly one of above, below"),
        ('metric = "m"\nabove = 1\nbelow = 0', "2 conditions"),
        ('metric = "m"\nabove = 1\nwithout = "x"', "rises_by"),
        ('metric = "m"\nabove = 1\naction = "webhook"', "a webhook has both"),
        ('metric = "m"\nabove = 1\nwindwo = 3', "did you mean 'window'"),
    ],
)
def test_a_bad_rule_is_refused_with_the_fix(tmp_path: Path, rule: str, words: str) -> None:
    (tmp_path / "run.toml").write_text(f"[[alarms]]\n{rule}\n")
    with pytest.raises(ConfigError, match=words):
        load_config(tmp_path / "run.toml")


def test_rules_of_a_file_take_the_place_of_the_defaults_and_read_back(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[[alarms]]\nmetric = "m"\nabove = 1\naction = "stop"\n')
    config = load_config(tmp_path / "run.toml")
    assert config.alarms == (AlarmRule(metric="m", above=1.0, action="stop"),)
    assert build_config(tomllib.loads(dump_config(config))) == config
    assert load_config(None).alarms == DEFAULT_ALARMS


async def test_firing_is_logged_sent_and_may_end_the_run(tmp_path: Path) -> None:
    got: list[Any] = []

    async def receive(request: web.Request) -> web.Response:
        got.append(await request.json())
        return web.Response()

    app = web.Application()
    app.router.add_post("/hook", receive)
    said: list[str] = []
    async with TestServer(app) as server:
        rules = [
            AlarmRule(metric="a", above=1, action="webhook", url=str(server.make_url("/hook"))),
            AlarmRule(metric="a", above=1, action="webhook", url=str(server.make_url("/gone"))),
            AlarmRule(metric="b", above=1, action="stop"),
        ]
        alarms = Alarms(rules, tmp_path / "alarms.jsonl", said.append)
        await alarms.show({"step": 1, "a": 2.0, "b": 0.0})
        with pytest.raises(AlarmError, match=r"b \(above 1\) ended the run after step 2"):
            await alarms.show({"step": 2, "a": 2.0, "b": 3.0})
    assert [(body["metric"], body["step"], body["value"]) for body in got] == [("a", 1, 2.0)]
    logged = [json.loads(line) for line in (tmp_path / "alarms.jsonl").read_text().splitlines()]
    assert [(line["metric"], line["step"]) for line in logged] == [("a", 1), ("a", 1), ("b", 2)]
    assert sum("failed" in line for line in said) == 1
