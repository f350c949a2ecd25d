"""Whatever the Hub, the network or its storage does: a push ends right, or as a failure that says what to do."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from hf_rocm_tune.cli import main
from hf_rocm_tune.errors import CorruptionError, TuneError, UsageError
from hf_rocm_tune.publish.push import HubError, Pushed, PushSettings, push
from hf_rocm_tune.survive import manifest
from tests.publish.hub_server import TOKEN, USER, LoopbackHub, bytes_of, loopback_hub, on_hub, write_run

# huggingface_hub 2.4 passes files as httpx2 no longer likes them (lfs.py, _upload_single_part).
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

REPO = f"{USER}/adapter"
COMMIT = "POST .*/commit/"


def pushed(out: Path, *, repo: str = REPO, **settings: Any) -> Pushed:
    return push(out, repo, settings=PushSettings(**settings), say=lambda _: None)


def commits(server: LoopbackHub) -> list[str]:
    """Messages of the commits that were made after the Hub's own first one."""
    return [message for message in server.store.repos[REPO].messages.values() if message != "initial commit"]


def check(server: LoopbackHub, out: Path) -> None:
    there = on_hub(server, REPO)
    assert there["adapter_model.safetensors"] == (out / "adapter_model.safetensors").read_bytes()
    assert len(commits(server)) == 1, "one push is one commit, whatever happened on the way"


ENDPOINTS = {
    "create": "POST /api/repos/create",
    "card": "POST /api/validate-yaml",
    "upload": "PUT /upload/",
    "commit": COMMIT,
}


@pytest.mark.parametrize(
    "fault", [{"status": 502, "body": b"<html>Bad gateway</html>"}, {"drop": "before"}, {"drop": "after"}]
)
def test_a_commit_that_fails_is_one_line_and_the_same_command_continues_it(
    hub: LoopbackHub, tmp_path: Path, fault: dict[str, Any]
) -> None:
    """Also where the commit was made and its answer was lost: it is not made twice."""
    out = write_run(tmp_path / "out")
    hub.fault(COMMIT, **fault)
    assert isinstance(failure(out), HubError)
    sent = len(hub.lines("^PUT"))
    pushed(out)
    check(hub, out)
    assert len(hub.lines("^PUT")) == sent, "nothing is sent again"


def test_a_commit_of_somebody_else_in_between_stays(hub: LoopbackHub, tmp_path: Path) -> None:
    out = write_run(tmp_path / "out")

    def other() -> None:
        repo = hub.store.repos[REPO]
        repo.add_commit("main", {**repo.files(), "theirs.txt": repo.files()[".gitattributes"]}, "theirs")

    hub.fault(COMMIT, first=other)
    pushed(out)
    assert "theirs.txt" in on_hub(hub, REPO) and commits(hub) == ["theirs", "Upload with hf-rocm-tune"]


def failure(out: Path, **more: Any) -> TuneError:
    """The one line with which a push fails; the directory is as it was."""
    before = bytes_of(out)
    with pytest.raises(TuneError) as caught:
        pushed(out, **more)
    assert bytes_of(out) == before
    said = str(caught.value)
    assert "\n" not in said and TOKEN not in said and caught.value.__cause__ is not None
    return caught.value


@pytest.mark.parametrize(
    ("endpoint", "status", "error", "says"),
    [
        ("create", 401, UsageError, rf"refuses the push to {REPO} \(401: .*settings/tokens.*hf auth login"),
        ("commit", 403, UsageError, "refuses the push"),
        ("upload", 403, UsageError, "refuses the push"),
        ("commit", 413, UsageError, r"refuses the push to .* \(413: injected 413"),
        ("commit", 500, HubError, r"the Hub answers 500: injected 500: try again later"),
        ("commit", 409, HubError, "the Hub answers 409"),
    ],
)
def test_a_hub_that_refuses_is_explained_in_one_line(
    hub: LoopbackHub,
    tmp_path: Path,
    endpoint: str,
    status: int,
    error: type[TuneError],
    says: str,
) -> None:
    out = write_run(tmp_path / "out")
    fault = hub.fault(ENDPOINTS[endpoint], status=status, times=None)
    found = failure(out)
    assert type(found) is error and found.exit_code == (2 if error is UsageError else 1)
    assert re.search(says, str(found)), str(found)
    assert fault.hits == 1


def test_a_hub_that_is_away_an_offline_machine_and_a_name_that_cannot_be(
    hub: LoopbackHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = write_run(tmp_path / "out")
    for name in ("a/b/c", "a b", "user/--x", "../x"):
        assert "not a valid repository name" in str(failure(out, repo=name))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in str(failure(out)) and hub.requests == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    found = failure(out)
    assert isinstance(found, HubError) and "cannot be reached (ConnectError" in str(found)


def test_a_card_that_the_hub_refuses(hub: LoopbackHub, tmp_path: Path) -> None:
    out = write_run(tmp_path / "out")
    said = b'{"error": "x", "errors": [{"message": "\\"license\\" must be one of ..."}], "warnings": []}'
    hub.fault(ENDPOINTS["card"], status=400, headers={"Content-Type": "application/json"}, body=said, times=None)
    found = failure(out)
    assert isinstance(found, UsageError) and '"license" must be one of' in str(found) and "README.md" in str(found)
    assert hub.lines("^PUT") == [], "nothing is sent before the card is accepted"


def test_a_file_that_is_stored_wrong_is_found(hub: LoopbackHub, tmp_path: Path) -> None:
    out = write_run(tmp_path / "out")
    hub.corrupt("tokenizer.json")
    with pytest.raises(CorruptionError, match=r"another hash than was sent for tokenizer\.json") as caught:
        pushed(out)
    assert caught.value.exit_code == 3 and "local files are correct" in str(caught.value)


def test_what_upstream_logs_holds_no_secret_and_no_signature(
    hub: LoopbackHub,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    out = write_run(tmp_path / "out")
    hub.fault(ENDPOINTS["upload"], status=500)
    hub.fault(COMMIT, status=500, body=f"oh, {TOKEN}!".encode())
    printed = str(failure(out)) + caplog.text
    assert "Retrying in" in printed
    assert TOKEN not in printed and "X-Amz-Signature" not in printed


# ---- the command as a process: exit codes, one line, kills in the middle ------------------------------------


@pytest.fixture
def server() -> Iterator[LoopbackHub]:
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


def test_a_push_that_is_killed_goes_on_where_it_was(server: LoopbackHub, tmp_path: Path) -> None:
    out = write_run(tmp_path / "out", checkpoints=(4,))
    adapter = hashlib.sha256((out / "adapter_model.safetensors").read_bytes()).hexdigest()
    server.fault(f"PUT /upload/{adapter}", hold=True)
    first = start(server, tmp_path, str(out), REPO, "--checkpoints", "all")
    try:
        # Four other objects of the checkpoint have arrived, this one is half sent.
        wait_for(lambda: server.held.is_set() and len(server.store.objects) == 4, "the other objects")
    finally:
        first.kill()
        first.communicate()
    assert first.returncode == -signal.SIGKILL
    assert on_hub(server, REPO) == {}, "what is half pushed is not seen"
    assert manifest.verify(out) == []
    server.release.set()
    before = len(server.requests)
    second = start(server, tmp_path, str(out), REPO, "--checkpoints", "all")
    printed, said = second.communicate()
    assert second.returncode == 0, said
    sent = [one.line for one in server.requests[before:] if one.method == "PUT"]
    assert len(sent) == 1 and adapter in sent[0], "what had arrived was sent again"
    assert on_hub(server, REPO)["adapter_model.safetensors"] == (out / "adapter_model.safetensors").read_bytes()
    assert "all hashes on the Hub are correct" in printed and TOKEN not in printed + said


def test_ctrl_c_ends_it_with_130_and_says_how_to_go_on(server: LoopbackHub, tmp_path: Path) -> None:
    out = write_run(tmp_path / "out")
    server.fault("PUT /upload/", hold=True)
    running = start(server, tmp_path, str(out), REPO)
    try:
        wait_for(server.held.is_set, "the upload")
        running.send_signal(signal.SIGINT)
        printed, said = running.communicate(timeout=30)
    finally:
        running.kill()
    assert running.returncode == 130
    assert "interrupted: the push was stopped. The same command continues it" in said and "Traceback" not in said
    assert printed == "" and [path.name for path in tmp_path.glob("hf-rocm-tune-push-*")] == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere", REPO], "nowhere is not a directory"),
        ([".", REPO, "--base_model_id", "/x/y"], "--base_model_id must be an id on the Hub"),
    ],
)
def test_wrong_input_to_a_push_is_one_line_and_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", *arguments]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


def test_the_command_imports_no_torch() -> None:
    look = "import sys, hf_rocm_tune.publish.push; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look], env={**os.environ, "HF_ROCM_TUNE_QUIET": "1"}).returncode == 0
