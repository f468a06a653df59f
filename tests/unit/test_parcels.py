"""The parcels environment: seeded, disjoint splits, a world that answers only what exists."""

import json
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlagent.envs.parcels import (
    CUSTOMERS,
    DEPOTS,
    NUMBERS,
    TOOLS,
    InvalidCallError,
    Task,
    World,
    answer_with,
    generate_tasks,
    split_of,
    verify,
)

tasks = st.builds(
    Task,
    id=st.text(),
    customer=st.sampled_from(CUSTOMERS),
    order=st.sampled_from(NUMBERS),
    depot=st.sampled_from(DEPOTS),
    code=st.sampled_from(NUMBERS),
)


@given(task=tasks)
def test_looking_everything_up_solves_the_task(task: Task) -> None:
    world = World(task=task)
    order = json.loads(world.call("find_order", json.dumps({"customer": task.customer})))["order"]
    depot = json.loads(world.call("track_parcel", json.dumps({"order": order})))["depot"]
    code = json.loads(world.call("pickup_code", json.dumps({"order": order, "depot": depot})))["code"]
    assert verify(task, answer_with(code)) == 1.0


@given(task=tasks)
def test_a_line_rebuilds_the_task(task: Task) -> None:
    assert Task.from_record(json.loads(task.to_line())) == task


@given(task=tasks, answer=st.text() | st.none())
def test_any_other_answer_is_wrong(task: Task, answer: str | None) -> None:
    assert verify(task, answer) == float(answer == task.answer)


MIA = Task(id="t", customer="Mia", order=41, depot="Kale", code=57)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("find_parcel", '{"customer": "Mia"}'),
        ("find_order", '{"customer": "Mia"'),
        ("find_order", '["Mia"]'),
        ("find_order", "{}"),
        ("find_order", '{"customer": "Ada"}'),
        ("find_order", '{"customer": "Mia", "order": 41}'),
        ("track_parcel", '{"order": 42}'),
        ("track_parcel", '{"order": "41"}'),
        ("track_parcel", '{"order": 41.0}'),
        ("track_parcel", '{"order": true}'),
        ("track_parcel", '{"order": [41]}'),
        ("pickup_code", '{"order": 41}'),
        ("pickup_code", '{"order": 41, "depot": "Ash"}'),
    ],
)
def test_a_call_the_world_cannot_execute_is_an_error(name: str, arguments: str) -> None:
    with pytest.raises(InvalidCallError):
        World(task=MIA).call(name, arguments)


@pytest.mark.parametrize("field", ["id", "customer", "order", "depot", "code"])
def test_a_record_with_a_missing_or_mistyped_field_names_it(field: str) -> None:
    record = json.loads(MIA.to_line())
    for broken in ({**record, field: None}, {key: value for key, value in record.items() if key != field}):
        with pytest.raises(ValueError, match=field):
            Task.from_record(broken)


def test_a_seed_gives_the_same_tasks_and_another_seed_others() -> None:
    first, again, other = (list(islice(generate_tasks("train", seed=seed), 50)) for seed in (1, 1, 2))
    assert first == again
    assert {task.id for task in first}.isdisjoint(task.id for task in other)
    assert len({task.id for task in first}) == 50


def test_splits_share_no_customer_and_order() -> None:
    train, heldout = (
        {(task.customer, task.order) for task in islice(generate_tasks(split, seed=0), 2000)}
        for split in ("train", "heldout")
    )
    assert train.isdisjoint(heldout)
    share = sum(split_of(c, o) == "heldout" for c in CUSTOMERS for o in NUMBERS) / (len(CUSTOMERS) * len(NUMBERS))
    assert 0.15 < share < 0.25


def test_schemas_name_what_the_world_executes() -> None:
    known = {"customer": MIA.customer, "order": MIA.order, "depot": MIA.depot}
    for tool in TOOLS:
        parameters: dict[str, Any] = tool["function"]["parameters"]
        assert list(parameters["properties"]) == parameters["required"]
        arguments = {parameter: known[parameter] for parameter in parameters["required"]}
        World(task=MIA).call(tool["function"]["name"], json.dumps(arguments))
