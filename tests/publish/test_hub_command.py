"""``hf-rocm-tune push`` as a process: exit codes, one line, kills in the middle, and the token in nothing it leaves."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_rocm_tune.cli import main
from hf_rocm_tune.integrity import manifest
from tests.publish.hub_fixtures import on_hub, write_run
from tests.publish.hub_server import TOKEN, USER, LoopbackHub, loopback_hub

REPO = f"{USER}/adapter"


@pytest.fixture
def hub() -> Iterator[LoopbackHub]:
    with loopback_hub() as server:
        yield server


def start(server: LoopbackHub, scratch: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "HF_ENDPOINT": server.url,
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(scratch / "hf"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "TMPDIR": str(scratch),
        "HF_ROCM_TUNE_QUIET": "1",
    }
    command = [sys.executable, "-m", "hf_rocm_tune", "push", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(done: object, what: str) -> None:
    for _ in range(600):
        if done():  # type: ignore[operator]
            return
        time.sleep(0.05)
    raise AssertionError(f"never came: {what}")


def test_a_push_that_is_killed_goes_on_where_it_was(hub: LoopbackHub, tmp_path: Path) -> None:
    out = write_run(tmp_path / "out", checkpoints=(4,))
    adapter = hashlib.sha256((out / "adapter_model.safetensors").read_bytes()).hexdigest()
    hub.fault(f"PUT /upload/{adapter}", hold=True)
    first = start(hub, tmp_path, str(out), REPO, "--checkpoints", "all")
    try:
        # Four other objects of the checkpoint have arrived, this one is half sent.
        wait_for(lambda: hub.held.is_set() and len(hub.store.objects) == 4, "the other objects")
    finally:
        first.kill()
        first.communicate()
    assert first.returncode == -signal.SIGKILL
    assert on_hub(hub, REPO) == {}, "what is half pushed is not seen"
    assert manifest.verify(out) == []
    hub.release.set()
    before = len(hub.requests)
    second = start(hub, tmp_path, str(out), REPO, "--checkpoints", "all")
    printed, said = second.communicate()
    assert second.returncode == 0, said
    sent = [one.line for one in hub.requests[before:] if one.method == "PUT"]
    assert len(sent) == 1 and adapter in sent[0], "what had arrived was sent again"
    assert on_hub(hub, REPO)["adapter_model.safetensors"] == (out / "adapter_model.safetensors").read_bytes()
    assert "the Hub serves what was trained" in printed and TOKEN not in printed + said


def test_ctrl_c_ends_it_with_130_and_says_how_to_go_on(hub: LoopbackHub, tmp_path: Path) -> None:
    out = write_run(tmp_path / "out")
    hub.fault("PUT /upload/", hold=True)
    running = start(hub, tmp_path, str(out), REPO)
    try:
        wait_for(hub.held.is_set, "the upload")
        running.send_signal(signal.SIGINT)
        printed, said = running.communicate(timeout=30)
    finally:
        running.kill()
    assert running.returncode == 130
    assert "interrupted: the push was stopped. The same command goes on" in said and "Traceback" not in said
    assert printed == "" and [path.name for path in tmp_path.glob("hf-rocm-tune-push-*")] == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere", REPO], "nowhere is no directory"),
        ([".", REPO, "--tags", "x"], "unrecognized arguments: --tags"),
        (["."], "the following arguments are required: REPO"),
        ([".", REPO, "--base_model_id", "/x/y"], "--base_model_id must be an id on the Hub"),
        ([".", REPO, "--verify", "never"], "invalid choice"),
    ],
)
def test_wrong_input_is_one_line_and_2(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", *arguments]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


def test_the_command_imports_no_torch() -> None:
    look = "import sys, hf_rocm_tune.publish.hub; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look], env={**os.environ, "HF_ROCM_TUNE_QUIET": "1"}).returncode == 0
