"""`rlagent doctor`: verdicts on templates of several kinds, good and bad."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
from templates import FAMILY_TOKENS, GLM_TOKENS, GOLDEN, MODEL, eos_of, tokenizer

from rlagent.doctor import Finding, examine, proven
from rlagent.errors import LoadError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def model_of(directory: Path, template: str, *, eos: str = "<|im_end|>", special: tuple[str, ...] = ()) -> Path:
    """The demo's tokenizer with another template."""
    directory.mkdir()
    tokens = tokenizer(*special)
    (directory / "tokenizer.json").write_text(tokens._backend.to_str())
    (directory / "chat_template.jinja").write_text(template)
    (directory / "tokenizer_config.json").write_bytes(orjson.dumps({"eos_token": eos}))
    return directory


def named(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_the_demos_template_is_proven_in_every_check() -> None:
    findings = examine(MODEL)
    assert proven(findings)
    assert {finding.verdict for finding in findings} == {"ok"}
    assert len(findings) == 13
    assert named(findings)["the model family"].detail == "hermes"


def test_a_template_that_drops_reasoning_is_proven_and_says_so(tmp_path: Path) -> None:
    findings = examine(model_of(tmp_path / "m", (GOLDEN / "qwen3_like.jinja").read_text()))
    assert proven(findings)
    assert "dropped by the template" in named(findings)["reasoning of earlier questions"].detail
    assert "kept" in named(findings)["reasoning kept (router.reasoning = all)"].detail


def test_a_template_without_tools_is_proven_for_chats(tmp_path: Path) -> None:
    findings = named(examine(model_of(tmp_path / "m", CHATML)))
    assert findings["a chat of three turns"].verdict == "ok"
    assert findings["tools"].verdict == "note"


def test_a_stop_token_that_the_template_does_not_write_is_refused(tmp_path: Path) -> None:
    findings = examine(model_of(tmp_path / "m", CHATML, eos="<|endoftext|>"))
    assert not proven(findings)
    assert "'<|im_end|>" in named(findings)["the stop token"].detail
    assert named(findings)["a chat of three turns"].verdict == "fails"
    assert "foreign_stop" in named(findings)["a chat of three turns"].detail


def test_a_template_that_treats_turns_by_their_place_is_refused(tmp_path: Path) -> None:
    numbered = CHATML.replace("{{ m.role }}", "{{ m.role }} of {{ messages | length }}")
    findings = named(examine(model_of(tmp_path / "m", numbered)))
    assert findings["a chat of three turns"].verdict == "fails"
    assert "render_differs" in findings["a chat of three turns"].detail


def test_a_template_that_refuses_system_prompts_is_noted(tmp_path: Path) -> None:
    strict = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{% endfor %}"
    findings = examine(model_of(tmp_path / "m", strict + CHATML))
    assert proven(findings)
    assert "no system role" in named(findings)["a system prompt"].detail


def test_a_stop_token_that_opens_the_next_turn_is_understood(tmp_path: Path) -> None:
    directory = model_of(tmp_path / "m", (GOLDEN / "glm_like.jinja").read_text(), special=GLM_TOKENS)
    (directory / "generation_config.json").write_bytes(
        orjson.dumps({"eos_token_id": [tokenizer(*GLM_TOKENS).encode(t)[0] for t in ("<|user|>", "<|observation|>")]})
    )
    findings = named(examine(directory))
    assert findings["the stop token"].verdict == "ok"
    assert findings["a chat of three turns"].verdict == "ok"


def family_model(directory: Path, family: str) -> Path:
    source = (GOLDEN / f"{family}.jinja").read_text()
    return model_of(directory, source, eos=eos_of(family), special=FAMILY_TOKENS[family])


def test_a_llama_template_is_proven_with_its_tools(tmp_path: Path) -> None:
    findings = examine(family_model(tmp_path / "m", "llama3_like"))
    assert proven(findings)
    assert named(findings)["a tool loop"].verdict == "ok"
    assert named(findings)["the model family"].detail == "llama3"
    assert "one tool call at a time" in named(findings)["two tool calls at once"].detail


@pytest.mark.parametrize(
    ("family", "form", "question"),
    [
        ("mistral_like", "mistral; the template takes call ids of nine characters", "note"),
        ("deepseek_like", "deepseek; the template takes arguments as text, no content beside calls", "ok"),
        ("harmony_like", "harmony", "ok"),
    ],
)
def test_a_family_whose_turns_hang_on_their_calls_is_proven_with_its_tools(
    tmp_path: Path, family: str, form: str, question: str
) -> None:
    """Mistral's tools stand before the last question, so another question moves them."""
    directory = family_model(tmp_path / "m", family)
    if family == "harmony_like":
        ids = [tokenizer(*FAMILY_TOKENS[family]).encode(text)[0] for text in ("<|return|>", "<|call|>")]
        (directory / "generation_config.json").write_bytes(orjson.dumps({"eos_token_id": ids}))
    findings = named(examine(directory))
    assert proven(list(findings.values()))
    assert findings["the model family"].detail == form
    assert findings["a tool loop"].verdict == "ok"
    assert findings["a question behind a tool loop"].verdict == question


def test_a_family_can_be_forced(tmp_path: Path) -> None:
    directory = family_model(tmp_path / "m", "llama3_like")
    findings = named(examine(directory, "text"))
    assert findings["the model family"].detail == "text"
    assert findings["a tool loop"].verdict == "fails"
    assert "not read as such" in findings["a tool loop"].detail
    command = [sys.executable, "-m", "rlagent.cli", "doctor", "--model", str(directory), "--family"]
    assert subprocess.run([*command, "text"], capture_output=True, check=False).returncode == 1
    wrong = subprocess.run([*command, "gtp"], capture_output=True, text=True, check=False)
    assert wrong.returncode != 0
    assert "use one of hermes" in wrong.stderr


def test_a_template_without_marks_is_said_to_be_unknown(tmp_path: Path) -> None:
    plain = CHATML.replace("<|im_start|>", "[[").replace("<|im_end|>", "]]")
    finding = named(examine(model_of(tmp_path / "m", plain, eos="]]", special=("[[", "]]"))))["the model family"]
    assert finding.verdict == "note"
    assert "router.family" in finding.detail


def test_the_command_prints_and_exits_by_its_verdict(tmp_path: Path) -> None:
    bad = model_of(tmp_path / "m", CHATML, eos="<|endoftext|>")
    for directory, code in ((MODEL, 0), (bad, 1)):
        command = [sys.executable, "-m", "rlagent.cli", "doctor", "--model", str(directory)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        assert "proven for" in done.stdout or "does not hold" in done.stdout
        found = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=False).stdout)
        assert found["proven"] is (code == 0)
    code = "import sys; import rlagent.doctor; print([n for n in ('torch', 'transformers') if n in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_what_is_no_model_directory_is_said(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"chat.template"):
        examine(tmp_path)
    shutil.copy(MODEL / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    with pytest.raises(LoadError, match="eos token"):
        examine(tmp_path)
