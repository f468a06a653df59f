"""The model families whose output is understood: which markers tell reasoning and tool calls from text.

In the flow: chosen once for a model directory by what stands in its chat template, or by router.family; parse.py and
harmony.py read by it. A family decides about reading only: whether a prompt may be extended is proven for each call by
comparing renders (plan.py), whatever the family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from rlagent.router import tool_calls
from rlagent.router.tool_calls import ReadCalls

FamilyName = Literal["hermes", "llama3", "deepseek", "glm", "mistral", "harmony", "text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputForm:
    """How a family writes. A tool call stands between `opens` and `closes` ("": the output's end), read by `read`.

    `bare`: starts of an answer that is a call without a marker (its whitespace left out). `history_ends`: stop tokens
    that are only sampled, each with the token that a history has in its place.
    """

    name: FamilyName
    read: ReadCalls | None = None
    opens: str = ""
    closes: str = ""
    bare: tuple[str, ...] = ()
    think: tuple[str, str] = ("<think>", "</think>")
    history_ends: Mapping[str, str] = field(default_factory=dict)


HERMES: Final = OutputForm(name="hermes", read=tool_calls.one_json, opens="<tool_call>", closes="</tool_call>")
LLAMA3: Final = OutputForm(
    name="llama3", read=tool_calls.llama_calls, opens="<|python_tag|>", bare=('{"name":', '{"type":"function"')
)
DEEPSEEK: Final = OutputForm(
    name="deepseek", read=tool_calls.deepseek_calls, opens="<｜tool▁calls▁begin｜>", closes="<｜tool▁calls▁end｜>"
)
GLM: Final = OutputForm(name="glm", read=tool_calls.glm_call, opens="<tool_call>", closes="</tool_call>")
MISTRAL: Final = OutputForm(
    name="mistral", read=tool_calls.mistral_calls, opens="[TOOL_CALLS]", think=("[THINK]", "[/THINK]")
)
HARMONY: Final = OutputForm(  # read by harmony.py
    name="harmony", think=("", ""), history_ends={"<|return|>": "<|end|>"}
)
TEXT: Final = OutputForm(name="text")

FORMS: Final[Mapping[str, OutputForm]] = {
    form.name: form for form in (HERMES, LLAMA3, DEEPSEEK, GLM, MISTRAL, HARMONY, TEXT)
}

# The first whose marks stand in the template. Templates of one family may hold another's marks further down.
_MARKS: Final[tuple[tuple[OutputForm, tuple[str, ...]], ...]] = (
    (HARMONY, ("<|channel|>", "<|message|>")),
    (DEEPSEEK, ("<｜tool▁calls▁begin｜>",)),
    (DEEPSEEK, ("<｜Assistant｜>",)),
    (MISTRAL, ("[TOOL_CALLS]",)),
    (MISTRAL, ("[INST]",)),
    (GLM, ("<arg_key>",)),
    (LLAMA3, ("<|python_tag|>",)),
    (LLAMA3, ("<|start_header_id|>",)),
    (TEXT, ("<function=", "<parameter=")),  # calls in XML: not read
    (HERMES, ("<tool_call>",)),
    (HERMES, ("<|im_start|>",)),
)


def detect(template: str) -> OutputForm | None:
    """The family whose marks a template's source holds; None where there are none of a known one."""
    return next((form for form, marks in _MARKS if all(mark in template for mark in marks)), None)
