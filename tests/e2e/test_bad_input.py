"""Bad input on the command line gets one clear message, exit code 1, no traceback, and leaves no half-made run."""

import socket
import subprocess
import sys
from pathlib import Path

import demo
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("e2e")]
MODEL = demo.ROOT / "examples" / "parcels" / "model"


def refused(*arguments: str, words: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rlagent.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=demo.environ(),
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr or "failed while it was imported" in done.stderr, done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


def test_settings_that_are_not_there(tmp_path: Path) -> None:
    refused("train", "--set", "run.stepz=1", words=("run.stepz", "steps"))
    refused("train", "--config", str(tmp_path / "none.toml"), words=("none.toml",))
    refused("train", words=("model.path", "--model"))
    refused("train", "--resume", "--run-dir", str(tmp_path / "run"), words=(str(tmp_path / "run"), "no run to resume"))
    assert not (tmp_path / "run").exists()


def test_a_directory_that_is_no_model(tmp_path: Path) -> None:
    refused("train", "--model", str(tmp_path), "--run-dir", str(tmp_path / "run"), words=(str(tmp_path), "config.json"))
    refused("serve", "--model", str(tmp_path), "--buffer", str(tmp_path / "b.db"), words=(str(tmp_path),))
    refused("engine", "--model", str(tmp_path), words=(str(tmp_path), "config.json"))
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_without_a_chat_template(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json", "generation_config.json"):
        (tmp_path / name).write_bytes((MODEL / name).read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("{}")
    refused("serve", "--model", str(tmp_path), "--buffer", str(tmp_path / "b.db"), words=("chat template",))


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refused("engine", "--model", str(MODEL), "--port", port, words=(port, "--port"))
        refused(
            "serve", "--model", str(MODEL), "--port", port, "--buffer", str(tmp_path / "of" / "b.db"),
            words=(port, "in use"),
        )  # fmt: skip
        refused(
            "train", "--model", str(MODEL), "--run-dir", str(tmp_path / "runs" / "mine"), "-s", f"router.port={port}",
            words=(port, "in use"),
        )  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_a_database_that_is_not_there() -> None:
    for url, words in (
        ("postgresql://nobody:secret@127.0.0.1:1/db", ("127.0.0.1:1", "start the server")),
        ("sqlite:///b.db", ("buffer.url",)),
    ):
        refused("serve", "--model", str(MODEL), "--buffer-url", url, words=words)


def test_a_public_address_without_an_admin_key(tmp_path: Path) -> None:
    refused(
        "serve", "--model", str(MODEL), "--host", "0.0.0.0", "--buffer", str(tmp_path / "b.db"), words=("admin_key",)
    )


def test_a_task_file_with_a_broken_line(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"id": 1}\n{"id"\n')
    refused(
        "train", "--model", str(MODEL), "--tasks", str(tmp_path / "tasks.jsonl"), "--rollout-function-path", "x.py:f",
        "--run-dir", str(tmp_path / "run"), words=("tasks.jsonl:2",),
    )  # fmt: skip
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ("does not exist",)),
        ("def other(): ...", ("no 'rollout'",)),
        ("import nothing_of_that_name", ("failed while", "nothing_of_that_name")),
    ],
)
def test_a_rollout_function_that_cannot_be_had(tmp_path: Path, content: str | None, words: tuple[str, ...]) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"id": 1}\n')
    file = tmp_path / "mine.py"
    if content is not None:
        file.write_text(content)
    refused(
        "train", "--model", str(MODEL), "--tasks", str(tmp_path / "tasks.jsonl"), "--rollout-function-path", f"{file}:rollout",
        "--run-dir", str(tmp_path / "run"), words=("rollout function", *words),
    )  # fmt: skip
    assert not (tmp_path / "run").exists()


def test_an_advantage_and_a_loss_that_cannot_be_had(tmp_path: Path) -> None:
    for name in ("advantage", "loss"):
        refused(
            "train", "--model", str(MODEL), "--run-dir", str(tmp_path / "run"), "-s", f"learner.{name}.name=none.py:f",
            words=(f"learner.{name}.name", "none.py", "does not exist"),
        )  # fmt: skip
    assert not (tmp_path / "run").exists()


def test_a_router_that_is_not_there(tmp_path: Path) -> None:
    refused("session", "new", "--router", "http://127.0.0.1:9", words=("127.0.0.1:9", "running"))
    refused(
        "train",
        "--model",
        str(MODEL),
        "--router",
        "http://127.0.0.1:9",
        "--run-dir",
        str(tmp_path / "run"),
        words=("127.0.0.1:9",),
    )
    assert not (tmp_path / "run").exists()


def test_an_export_of_nothing(tmp_path: Path) -> None:
    refused("export", str(tmp_path), "--out", str(tmp_path / "out"), words=("run directory",))


def test_why_rollouts_fail_is_shown_once_and_kept(tmp_path: Path) -> None:
    function = tmp_path / "raises.py"
    function.write_text("async def rollout(task, session):\n    raise ValueError('my own bug')\n")
    run = tmp_path / "run"
    command = demo.train_command(
        run, "run.steps=1", "buffer.min_group_rollouts=2", options=("--rollout-function-path", f"{function}:rollout")
    )
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=demo.environ()
    ) as process:
        assert process.stdout is not None
        said = next(line for line in process.stdout if "rollout failed" in line)
        process.kill()
    assert "ValueError: my own bug" in said
    assert "Traceback" in (run / "logs" / "failed_rollouts.log").read_text()


def test_a_run_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = demo.command("train", "--config", str(demo.CONFIG), "--run-dir", str(tmp_path / "file"), code=1)
    assert "cannot be made" in said
