"""The whole loop as a user starts it: `rlagent train` on the demo, made small. Real processes throughout."""

import json
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import demo
import httpx
import pytest
from openai import OpenAI
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("e2e")]


def test_a_run_leaves_everything_that_is_promised(tmp_path: Path) -> None:
    run = tmp_path / "run"
    output = demo.train(run)
    records = [record for record in demo.metrics(run) if record["step"] > 0]
    assert [record["step"] for record in records] == [1, 2, 3]
    for record in records:
        assert record["policy/ratio_max"] == 1.0
        assert record["policy/version"] == record["step"]
    assert "eval" in output
    assert (run / "reward.png").read_bytes()[:4] == b"\x89PNG"
    for name in ("config.toml", "buffer.db", "checkpoints/step-000003", "snapshots/v000003"):
        assert (run / name).exists(), name
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_tensors="pt"
    )
    assert model(**ids).logits.isfinite().all()


def test_staleness_is_bounded(tmp_path: Path) -> None:
    demo.train(tmp_path / "run", "buffer.max_staleness=0", "run.steps=2")
    records = [record for record in demo.metrics(tmp_path / "run") if "freshness/lag_max" in record]
    assert [record["freshness/lag_max"] for record in records] == [0, 0]
    # Without staleness what is left of the mismatch is arithmetic: the learner's logprobs are the engine's (promise 6).
    assert max(record["mismatch/abs_max"] for record in records) < 1e-4


@pytest.mark.parametrize("layout", ["tensor", "pipeline", "data"])
def test_two_learner_processes_run_the_same_loop(tmp_path: Path, layout: str) -> None:
    demo.train(tmp_path / "run", f"parallel.{layout}=2", "run.steps=2", "buffer.max_staleness=0")
    records = [record for record in demo.metrics(tmp_path / "run") if record["step"] > 0]
    assert len(records) == 2
    assert max(record["mismatch/abs_max"] for record in records) < 1e-4


def test_a_killed_run_resumes_and_consumes_exactly_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ("run.steps=8", "checkpoint.every=2", "checkpoint.asynchronous=false")
    with subprocess.Popen(
        demo.train_command(run, *settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=demo.environ(),
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step    3"):  # after the checkpoint of step 2, with consumption 3 beyond it
                process.kill()
                break
        process.wait()
    assert process.returncode == -signal.SIGKILL
    output = demo.train(run, *settings, resume=True)
    assert "resumed after step 2: " in output
    steps = [record["step"] for record in demo.metrics(run) if record["step"] > 0]
    assert steps[:3] == [1, 2, 3]
    assert steps[-6:] == [3, 4, 5, 6, 7, 8]
    with sqlite3.connect(run / "buffer.db") as database:
        versions = [row[0] for row in database.execute("SELECT version FROM policies ORDER BY rowid")]
    assert len(versions) == len(set(versions))
    first, again = (record for record in demo.metrics(run) if record["step"] == 3)
    # The batch that was trained on after the checkpoint is delivered again, the same one.
    for name in ("data/num_tokens", "data/num_sampled", "reward/mean"):
        assert first[name] == again[name], name
    assert first["policy/grad_norm"] == pytest.approx(again["policy/grad_norm"], rel=1e-5)


def test_sigterm_ends_a_run_with_a_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ("run.steps=50", "checkpoint.every=100")
    with subprocess.Popen(
        demo.train_command(run, *settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=demo.environ(),
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step    2"):
                process.terminate()
                break
        _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in error
    done = demo.metrics(run)[-1]["step"]
    assert f"after step {done} of 50" in error
    assert (run / "checkpoints" / f"step-{done:06d}" / "manifest.json").exists()
    output = demo.train(run, f"run.steps={done + 1}", "checkpoint.every=100", resume=True)
    assert f"resumed after step {done}: " in output
    assert demo.metrics(run)[-1]["step"] == done + 1


def test_ctrl_c_ends_a_run_and_names_its_checkpoint(tmp_path: Path) -> None:
    with subprocess.Popen(
        # A shell's background jobs ignore the signal, and so would their children.
        ["env", "--default-signal=INT", *demo.train_command(tmp_path / "run", "run.steps=50")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=demo.environ(),
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step    2"):
                process.send_signal(signal.SIGINT)
                break
        _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert "Traceback" not in error
    assert "is saved: `rlagent train --resume" in error


def test_a_run_directory_is_not_overwritten(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text("")
    done = subprocess.run(
        demo.train_command(run), capture_output=True, text=True, timeout=60, env=demo.environ(), check=False
    )
    assert done.returncode == 1
    assert "--resume" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_process_outlives_a_killed_driver(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with subprocess.Popen(
        demo.train_command(run, "run.steps=50"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=demo.environ(),
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step    1"):
                process.kill()
                break
        process.wait()
    deadline = time.monotonic() + 10
    while left := _processes_of(run):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)  # the kernel's signal takes a moment; there is no event to wait for


def _processes_of(run: Path) -> list[str]:
    """Command lines of processes that hold a file of the run open (their logs)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if any(str(fd.readlink()).startswith(str(run)) for fd in (entry / "fd").iterdir()):
                found.append((entry / "cmdline").read_text())
        except OSError:
            continue
    return found


def test_the_halves_run_apart_with_agents_from_outside(tmp_path: Path) -> None:
    model = str(demo.ROOT / "examples" / "parcels" / "model")
    cli = [sys.executable, "-m", "rlagent.cli"]
    serve = [*cli, "serve", "--model", model, "--port", "0", "--buffer", str(tmp_path / "buffer.db")]
    serve += ["--set", "buffer.ungrouped_size=4"]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True, env=demo.environ()) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            train = [*cli, "train", "--router", url, "--model", model, "--run-dir", str(tmp_path / "run")]
            train += ["--set", "run.steps=1", "--set", "learner.batch.groups=1"]
            with subprocess.Popen(
                train, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=demo.environ()
            ) as learner:
                for index in range(4):
                    client = OpenAI(base_url=f"{url}/v1", api_key=f"episode-{index}")
                    answer = client.chat.completions.with_raw_response.create(
                        model="policy",
                        messages=[{"role": "user", "content": "What is the pickup code of Mia's parcel?"}],
                        max_tokens=8,
                    )
                    session = answer.headers["x-rlagent-session"]
                    httpx.post(f"{url}/sessions/{session}/finish", json={"reward": float(index % 2)}).raise_for_status()
                output, _ = learner.communicate(timeout=120)
            assert learner.returncode == 0, output
            assert (
                json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["data/num_rollouts"] == 4
            )
        finally:
            server.terminate()
            server.wait(timeout=30)


def test_a_replay_is_the_recorded_run_to_the_bit(tmp_path: Path) -> None:
    run, again, other = tmp_path / "run", tmp_path / "again", tmp_path / "other"
    demo.train(run)
    replayed = demo.command("train", "--replay", str(run), "--run-dir", str(again))
    assert "replayed 3 steps: every step is the recorded one, bit for bit" in replayed
    assert (again / "model" / "model.safetensors").read_bytes() == (run / "model" / "model.safetensors").read_bytes()
    changed = demo.command(
        "train", "--replay", str(run), "--run-dir", str(other), "--set", "learner.optimizer.weight_decay=0.5"
    )
    assert "the first 1 steps are the recorded ones" in changed  # the weights differ only after the first update

    demo.command("dump", str(run), "2", "--out", str(tmp_path / "batch.safetensors"))
    batch = load_file(tmp_path / "batch.safetensors")
    record = next(record for record in demo.metrics(run) if record["step"] == 2)
    assert len(batch["token_ids"]) == record["data/num_tokens"]
    assert batch["loss_mask"].sum() == record["data/num_sampled"]
    refused = demo.command("dump", str(run), "4", "--out", str(tmp_path / "none.safetensors"), code=1)
    assert "steps 1 to 3" in refused


def test_rollouts_alone_are_collected_and_trained_on_later(tmp_path: Path) -> None:
    output = demo.train(tmp_path / "run", "run.steps=2", options=("--rollout-only",))
    assert "step    2" in output
    assert [record["policy/version"] for record in demo.metrics(tmp_path / "run") if record["step"] > 0] == [0, 0]
    assert not (tmp_path / "run" / "model").exists()
    demo.command("train", "--replay", str(tmp_path / "run"), "--run-dir", str(tmp_path / "trained"))
    assert len([r for r in demo.metrics(tmp_path / "trained") if "policy/grad_norm" in r]) == 2
