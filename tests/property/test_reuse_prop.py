"""In every family: a history of any turns goes on from the sampled ids, in the template's own words, or is rendered afresh."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from templates import eos_of, renderer

from rlagent.patient import QUESTION, Patient, Unfit
from rlagent.router.chat_template import TemplateError
from rlagent.router.conversation import Message, ToolCall

STOPS = {"harmony_like": ("<|return|>", "<|call|>")}
# Text that would mislead a search for the end of a turn, if it were not guarded.
_texts = st.sampled_from(
    ["x", "", "</s>", "<|call|>", "<|end|>", "<|im_end|>", '"}]</s>', "\ue000t0\ue001", "look_up", " ä\n"]
)
_calls = st.lists(
    st.dictionaries(st.sampled_from(["word", "look_up", "a"]), _texts, max_size=2), min_size=1, max_size=2
)
_turns = st.lists(st.tuples(_texts.filter(str.strip), st.none() | _calls, _texts), min_size=1, max_size=4)


@pytest.mark.parametrize(
    "family", ["mistral_like", "deepseek_like", "harmony_like", "llama3_like", "qwen3_like", "parcels"]
)
def test_any_history_is_extended_in_the_templates_own_words_or_rendered_afresh(family: str) -> None:
    ours = renderer(family)
    extended = 0

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(_turns)
    def check(turns: list[tuple[str, Any, str]]) -> None:
        nonlocal extended  # counted, so that the test cannot pass by refusing everything
        patient = Patient(ours, STOPS.get(family, (eos_of(family),)))
        session, history = patient.session(), [QUESTION]
        try:
            for number, (text, given, result) in enumerate(turns):
                calls = tuple(
                    ToolCall(call_id=f"call{number}abc{i}", name="look_up", arguments=orjson.dumps(one).decode())
                    for i, one in enumerate(given or ())
                )
                said = Message(role="assistant", content="" if calls else text, tool_calls=calls)
                served = patient.turn(session, history, said, tools=True)
                read = [call.name for call in served.tool_calls] == [call.name for call in calls]
                if not read or served.content != said.content:
                    return  # what the template writes is not read as the same: markers spelled out by the model
                answers = [Message(role="tool", content=result, tool_call_id=one.call_id) for one in served.tool_calls]
                history += [served, *(answers or [QUESTION])]
            patient.went_on(session, history, tools=True)
        except TemplateError:
            return
        except Unfit as error:
            if "afresh" not in str(error):
                raise
            return
        extended += 1

    check()
    assert extended >= 3
