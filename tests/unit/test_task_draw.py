"""Which task a group gets: the same after a resume, from easy to hard, and where success is neither sure nor hopeless."""

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlagent.config import TaskDrawConfig
from rlagent.errors import LoadError
from rlagent.task_draw import Curriculum, Prioritised, TaskDraw, make_draw
from rlagent.types import Group, Reward, Rollout

TASKS = [{"id": f"t{place}", "difficulty": (7 * place) % 20} for place in range(20)]


def draw(**settings: Any) -> TaskDraw:
    return make_draw(TaskDrawConfig(**settings), TASKS, seed=3, groups_per_step=4)


def group(name: str | None, *rewards: float, ungrouped: bool = False) -> Group:
    rollouts = tuple(
        Rollout(rollout_id=f"r{place}", task_id=name, reward=Reward(components={"reward": reward}), rows=())
        for place, reward in enumerate(rewards)
    )
    return Group(group_id="g", rollouts=rollouts, ungrouped=ungrouped)


def test_uniformly_each_task_comes_once_an_epoch() -> None:
    places = [draw().place(index) for index in range(40)]
    assert sorted(places[:20]) == sorted(places[20:]) == list(range(20))
    assert places[:20] != places[20:]
    assert draw().metrics(39) == {"tasks/epoch": 1.0}


def test_a_curriculum_opens_the_easiest_tasks_first() -> None:
    found = draw(by="curriculum", start=0.25, steps=10)
    assert isinstance(found, Curriculum)
    assert [found.open(index) for index in (0, 4, 20, 40, 400)] == [5, 7, 13, 20, 20]
    for index in range(60):
        assert TASKS[found.place(index)]["difficulty"] < found.open(index)  # difficulties are 0 to 19, each once
    assert found.metrics(0) == {"tasks/open": 5.0, "tasks/hardest": 4.0}
    late = Counter(found.place(index) for index in range(40, 2040))
    assert set(late) == set(range(20))
    assert [found.place(index) for index in range(30)] == [
        draw(by="curriculum", start=0.25, steps=10).place(i) for i in range(30)
    ]


@pytest.mark.parametrize("value", [None, "hard", float("nan"), True])
def test_a_curriculum_needs_a_number_in_every_task(value: Any) -> None:
    tasks = [*TASKS, {"id": "odd", "difficulty": value}]
    with pytest.raises(LoadError, match=r"task .odd. has difficulty = .*rollout\.draw\.difficulty"):
        make_draw(TaskDrawConfig(by="curriculum"), tasks, seed=0, groups_per_step=1)


def test_what_is_neither_sure_nor_hopeless_is_drawn() -> None:
    found = draw(by="prioritised", uniform_share=0.1)
    assert isinstance(found, Prioritised)
    assert np.allclose(found.probabilities(), 1 / 20)  # nothing is known
    for _ in range(30):
        for place in range(20):
            found.observe([group(f"t{place}", *([1.0, 0.0] if place == 4 else [float(place % 2)] * 2))])
    chances = found.probabilities()
    assert np.isclose(chances.sum(), 1)
    assert chances.argmax() == 4
    assert chances.min() >= 0.1 / 20
    p = (np.array([20 * (1 - 0.9**30) / 2, 0]) + 1) / (20 * (1 - 0.9**30) + 2)  # of t4, and of one that always fails
    assert np.allclose(found.success()[[4, 0]], p)
    drawn = Counter(found.place(index) for index in range(300))
    assert drawn.most_common(1)[0][0] == 4
    known = found.metrics(0)
    assert known["tasks/seen"] == 20
    assert known["tasks/effective"] < 20
    assert known["tasks/success"] == pytest.approx(found.success().mean())


def test_a_group_that_exists_keeps_its_task() -> None:
    found = draw(by="prioritised")
    assert found.place(0, "t7") == 7
    assert found.place(0, "gone") == found.place(0)


def test_groups_that_tell_nothing_of_a_task_are_left_out() -> None:
    found = draw(by="prioritised")
    found.observe([group("other", 1.0), group(None, 1.0), group("t1", 1.0, ungrouped=True), group("t1")])
    assert found.state() == {}


def test_tasks_of_one_id_are_refused() -> None:
    with pytest.raises(LoadError, match="two tasks have the id 'a'"):
        make_draw(TaskDrawConfig(by="prioritised"), [{"id": "a"}, {"id": "b"}, {"id": "a"}], seed=0, groups_per_step=1)


@given(
    st.lists(
        st.tuples(st.integers(0, 19), st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=4)), max_size=12
    ),
    st.integers(0, 12),
)
@settings(deadline=None, max_examples=30)
def test_a_resumed_draw_is_the_uninterrupted_one(trained: list[tuple[int, list[float]]], cut: int) -> None:
    groups = [group(f"t{place}", *rewards) for place, rewards in trained]
    whole, first, second = (draw(by="prioritised") for _ in range(3))
    whole.observe(groups)
    first.observe(groups[:cut])
    second.restore(json.loads(json.dumps(first.state())))
    second.observe(groups[cut:])
    assert second.state() == whole.state()
    assert [second.place(index) for index in range(50)] == [whole.place(index) for index in range(50)]
