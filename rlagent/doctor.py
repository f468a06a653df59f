"""`rlagent doctor`: does a model directory's chat template let recorded tokens be reused turn after turn? On a CPU, without torch.

The template is asked to write small conversations. What it writes for an assistant's turn is taken as what the model sampled, the
router plans the next turn as it would for an agent, and the prompt must go on from those ids, with the very text that the template
gives for the whole history. Invariant: a verdict comes from the router's own planning, never from knowledge about a model's name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from rlagent.errors import LoadError
from rlagent.patient import Patient, Unfit
from rlagent.router.chat_template import TemplateError
from rlagent.router.families import FamilyName
from rlagent.router.render import Renderer
from rlagent.router.tokenizer import read_stop_ids

Verdict = Literal["ok", "note", "fails"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check. `core`: without it nothing can be trained turn by turn."""

    name: str
    verdict: Verdict
    detail: str
    core: bool = False


def examine(model_dir: Path, family: FamilyName | None = None) -> list[Finding]:
    """All checks of a model directory, read as of `family` if one is given. LoadError if it has no tokenizer or no chat template."""
    renderer = Renderer.load(model_dir, family)
    stops = _stop_texts(model_dir, renderer)
    patient = Patient(renderer, stops)
    takes_tools = patient.takes_tools()
    checks: list[tuple[str, bool, Callable[[], str]]] = [
        ("the stop token", True, patient.stop_token),
        ("a chat of three turns", True, lambda: patient.dialogue(3)),
        ("a system prompt", False, lambda: patient.dialogue(2, system="Be brief.")),
        ("an answer cut by its length", False, patient.truncated),
        ("ids that the tokenizer would not choose", True, patient.non_canonical),
        ("special tokens in an agent's text", True, patient.injection),
    ]
    if takes_tools:
        checks += [
            ("a tool loop", True, lambda: patient.tool_loop(1, "")),
            ("a tool call behind text", False, lambda: patient.tool_loop(1, "Let me look.")),
            ("two tool calls at once", False, lambda: patient.tool_loop(2, "")),
            ("a question behind a tool loop", False, patient.next_question),
            ("reasoning kept (router.reasoning = all)", False, lambda: patient.thinking("all", tools=True)),
        ]
    checks.append(("reasoning of earlier questions", False, lambda: patient.thinking("template", tools=False)))
    findings = [_family(renderer), *(_check(name, core, work) for name, core, work in checks)]
    if not takes_tools:
        findings.append(Finding(name="tools", verdict="note", detail="the template does not show tools to the model"))
    return findings


def _family(renderer: Renderer) -> Finding:
    """Which parser reads the answers, and how the template takes tool calls."""
    if not renderer.family_known:
        detail = "not known by its marks: answers are served as text and tool calls are not read; set router.family"
        return Finding(name="the model family", verdict="note", detail=detail)
    form = renderer.message_form
    wants = [
        name
        for name, wanted in (
            ("arguments as text", form.arguments_as_text),
            ("no content beside calls", form.null_content),
            ("call ids of nine characters", form.short_ids),
        )
        if wanted
    ]
    calls = "prints no earlier tool calls" if not form.shows_calls else f"takes {', '.join(wants)}" if wants else ""
    detail = f"{renderer.output_form.name}" + (f"; the template {calls}" if calls else "")
    return Finding(name="the model family", verdict="ok", detail=detail)


def _check(name: str, core: bool, work: Callable[[], str]) -> Finding:
    try:
        return Finding(name=name, verdict="ok", detail=work(), core=core)
    except TemplateError as error:
        return Finding(name=name, verdict="note", detail=f"the template refuses it: {error}", core=core)
    except Unfit as error:
        return Finding(name=name, verdict="fails" if core else "note", detail=str(error), core=core)


def _stop_texts(model_dir: Path, renderer: Renderer) -> tuple[str, ...]:
    """The tokens at which engines stop: eos_token_id of the configs, else the tokenizer's eos_token."""
    found = tuple(renderer.tokenizer.decode([token]) for token in sorted(read_stop_ids(model_dir)))
    if found:
        return found
    path = model_dir / "tokenizer_config.json"
    eos = orjson.loads(path.read_bytes()).get("eos_token") if path.is_file() else None
    text = eos.get("content") if isinstance(eos, dict) else eos
    if not isinstance(text, str):
        raise LoadError(
            f"{str(model_dir)!r} names no eos token: neither in its config.json, nor in tokenizer_config.json"
        )
    return (text,)


def proven(findings: Sequence[Finding]) -> bool:
    """Whether token-in reuse holds in every core check."""
    return all(finding.verdict == "ok" for finding in findings if finding.core)


def to_json(model_dir: Path, findings: Sequence[Finding]) -> dict[str, Any]:
    """For machines."""
    return {
        "model": str(model_dir),
        "proven": proven(findings),
        "findings": [
            {"name": one.name, "verdict": one.verdict, "core": one.core, "detail": one.detail} for one in findings
        ],
    }
