"""What is on the Hub after a push is what was trained, all of it, nothing else, and nothing is sent twice."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from hf_rocm_tune import cli
from hf_rocm_tune.errors import CorruptionError, UsageError
from hf_rocm_tune.publish.push import Pushed, PushSettings, push
from hf_rocm_tune.redaction import Private, find_private, scrub_json, scrub_text
from hf_rocm_tune.survive import manifest
from hf_rocm_tune.survive.manifest import Manifest
from tests.publish.hub_server import (
    BASE,
    TOKEN,
    USER,
    LoopbackHub,
    bytes_of,
    clean_report,
    on_hub,
    write_run,
)

# huggingface_hub 2.4 passes files as httpx2 no longer likes them (lfs.py, _upload_single_part).
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

REPO = f"{USER}/adapter"
TOP = {
    "README.md",
    "adapter_config.json",
    "adapter_model.safetensors",
    "chat_template.jinja",
    "integrity.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "transfer_report.json",
}


def quietly(directory: Path, repo: str = REPO, **settings: Any) -> Pushed:
    return push(directory, repo, settings=PushSettings(**settings), say=lambda _: None)


def manifest_on(files: dict[str, bytes], folder: Path) -> Manifest:
    """The manifest that was uploaded, after every file that it lists was compared with it."""
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    found = manifest.inspect(folder)
    assert found.problems == [] and found.manifest is not None
    return found.manifest


def test_a_push_brings_what_the_manifest_lists_listed_before_and_leaves_the_local_files_alone(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    out = write_run(tmp_path / "out")
    (tmp_path / "passport.png").write_bytes(b"\x89PNG secret")
    (out / "my-notes.txt").write_text("mine")
    (out / "loss.png").symlink_to(tmp_path / "passport.png")
    before = bytes_of(out)
    said: dict[str, int] = {}
    done = push(out, REPO, say=lambda line: said.update({line: len(hub.requests)}))
    there = on_hub(hub, REPO)
    assert set(there) == TOP and done.files == len(TOP) and "8 files" in done.summary
    (listed,) = [line for line in said if line.startswith("to be uploaded: ")]
    assert set(listed.partition(": ")[2].split(", ")) == TOP and said[listed] == 0
    assert bytes_of(out) == before
    for name in ("adapter_model.safetensors", "tokenizer.json"):  # nothing private is in them
        assert there[name] == before[name], name
    assert there["tokenizer.json"] == before["tokenizer.json"], "a vocabulary is never rewritten"
    published = manifest_on(there, tmp_path / "pulled")
    assert (published.run_id, published.status) == ("run-1", "final") and set(published.files) == TOP - {
        "integrity.json"
    }


def test_a_second_push_sends_only_what_changed_and_a_card_may_be_edited_or_deleted(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    out = write_run(tmp_path / "out")
    first = quietly(out)
    sent = len(hub.lines("^PUT|/commit/"))
    assert quietly(out).commit == first.commit
    assert len(hub.lines("^PUT|/commit/")) == sent, "nothing changed, and something was sent"
    (out / "README.md").write_text("# mine\n")
    third = quietly(out)
    assert third.commit != first.commit and len(hub.lines("^PUT")) == 1
    there = on_hub(hub, REPO)
    assert there["README.md"] == b"# mine\n"
    manifest_on(there, tmp_path / "pulled")
    (out / "README.md").unlink()
    (out / "training_args.bin").unlink()  # never uploaded, so it may be gone
    quietly(out)
    assert "README.md" not in on_hub(hub, REPO)


def test_files_of_an_earlier_run_are_not_left_beside_the_new_one(hub: LoopbackHub, tmp_path: Path) -> None:
    quietly(write_run(tmp_path / "one"))
    repo = hub.store.repos[REPO]
    theirs = {**repo.files(), "notes.txt": repo.files()["tokenizer.json"]}
    repo.add_commit("main", theirs, "the user's own file")
    other = write_run(tmp_path / "two", seed=1)
    (other / "chat_template.jinja").unlink()
    kept = [name for name in TOP if name not in ("chat_template.jinja", "integrity.json")]
    manifest.write(other, run_id="run-2", step=9, status="final", files=kept)
    quietly(other)
    assert set(on_hub(hub, REPO)) == (TOP - {"chat_template.jinja"}) | {"notes.txt"}


def test_checkpoints_go_into_folders_of_their_own_with_what_a_resume_needs(hub: LoopbackHub, tmp_path: Path) -> None:
    out = write_run(tmp_path / "out", checkpoints=(2,))
    (out / "checkpoint-2" / "scaler.pt").write_bytes(b"PK\0scaler")
    manifest.write(out / "checkpoint-2", run_id="run-1", step=2, status="checkpoint")
    quietly(out, checkpoints="last")
    assert "last-checkpoint/scaler.pt" in on_hub(hub, REPO)
    quietly(write_run(out, checkpoints=(10,)), checkpoints="last")
    last = {path.partition("/")[2]: content for path, content in on_hub(hub, REPO).items() if "/" in path}
    resumed = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"}
    assert set(last) == TOP - {"transfer_report.json"} | resumed, "nothing of the one before, and no pickle"
    assert last["optimizer.pt"] == (out / "checkpoint-10" / "optimizer.pt").read_bytes(), "10 is after 2"
    assert manifest_on(last, tmp_path / "pulled").step == 10
    quietly(out, repo=f"{USER}/all", checkpoints="all")
    folders = {path.partition("/")[0] for path in on_hub(hub, f"{USER}/all") if "/" in path}
    assert folders == {"checkpoint-2", "checkpoint-10"}
    quietly(out / "checkpoint-2", repo=f"{USER}/alone")
    assert set(on_hub(hub, f"{USER}/alone")) == TOP - {"transfer_report.json"}


@pytest.mark.parametrize(
    ("wanted", "there", "private"),
    [(None, None, True), (True, None, True), (False, None, False), (None, "public", False), (True, "public", None)],
)
def test_a_repository_is_private_unless_said_otherwise(
    hub: LoopbackHub, tmp_path: Path, wanted: bool | None, there: str | None, private: bool | None
) -> None:
    if there:
        hub.store.create(REPO, private=False)
    if private is None:
        with pytest.raises(UsageError, match="exists and is public"):
            quietly(write_run(tmp_path / "out"), private=wanted)
        assert on_hub(hub, REPO) == {}
        return
    done = quietly(write_run(tmp_path / "out"), private=wanted, revision="trial")
    assert hub.store.repos[REPO].private is private
    assert hub.store.repos[REPO].branches["trial"] == done.commit and on_hub(hub, REPO) == {}


def test_the_command_pushes_to_the_branch_that_is_named_and_prints_the_result_alone(
    hub: LoopbackHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.store.create(REPO, private=False)
    assert cli.main(["push", str(write_run(tmp_path / "out")), REPO, "--revision", "trial"]) == 0
    said = capsys.readouterr()
    assert not hub.store.repos[REPO].private and on_hub(hub, REPO) == {}
    assert hub.store.repos[REPO].branches["trial"][:10] in said.out
    assert "to be uploaded: " in said.err and "to be uploaded: " not in said.out


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_card_that_is_no_plain_file_is_not_read(hub: LoopbackHub, tmp_path: Path, kind: str) -> None:
    out = write_run(tmp_path / "out")
    (out / "README.md").unlink()
    if kind == "link":
        (tmp_path / "id_ed25519").write_text("private key")
        (out / "README.md").symlink_to(tmp_path / "id_ed25519")
    else:
        os.mkfifo(out / "README.md")
    with pytest.raises(UsageError, match=r"README\.md is a link or no plain file"):
        quietly(out)
    assert hub.requests == []


def _damage(out: Path) -> None:
    content = bytearray((out / "adapter_model.safetensors").read_bytes())
    content[-1] ^= 1
    (out / "adapter_model.safetensors").write_bytes(bytes(content))


def _report(out: Path, **changes: object) -> None:
    (out / "transfer_report.json").write_text(json.dumps(clean_report(**changes)))
    listed = json.loads((out / "integrity.json").read_text())["files"]
    manifest.write(out, run_id="run-1", step=8, status="final", files=listed)


STOPPED = {"step": 3, "stage": "weights", "tensor": "lm_head", "kind": "zeros", "outcome": "stopped"}


@pytest.mark.parametrize(
    ("spoil", "error", "says"),
    [
        (_damage, UsageError, "adapter_model.safetensors is changed"),
        (lambda out: (out / "adapter_model.safetensors").unlink(), UsageError, "adapter_model.safetensors is missing"),
        (lambda out: (out / "integrity.json").unlink(), UsageError, "is missing"),
        (lambda out: _report(out, incidents=[STOPPED]), CorruptionError, "weights lm_head at step 3"),
        (
            lambda out: _report(out, batches={"mismatches": 3, "recovered": 2}),
            CorruptionError,
            "batches: 1 of 3 mismatches",
        ),
    ],
)
def test_what_is_not_what_was_trained_is_refused_before_anything_is_asked(
    hub: LoopbackHub,
    tmp_path: Path,
    spoil: Callable[[Path], None],
    error: type[Exception],
    says: str,
) -> None:
    out = write_run(tmp_path / "out")
    spoil(out)
    with pytest.raises(error, match=says) as caught:
        quietly(out)
    assert "\n" not in str(caught.value)
    assert hub.requests == []


def test_a_large_file_that_changes_before_it_is_sent_is_not_sent(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_rocm_tune.publish.push._LARGE", 1000)
    out = write_run(tmp_path / "out")
    quietly(out, repo=f"{USER}/sound")
    assert set(on_hub(hub, f"{USER}/sound")) == TOP
    content = (out / "adapter_model.safetensors").read_bytes()
    assert on_hub(hub, f"{USER}/sound")["adapter_model.safetensors"] == content
    hub.fault("POST /api/repos/create", first=lambda: _damage(out))
    with pytest.raises(UsageError, match=r"adapter_model.safetensors has changed since it was checked"):
        quietly(out)
    assert on_hub(hub, REPO) == {} and not hub.lines(f"^PUT .*{REPO}")


# ---- nothing private leaves this machine --------------------------------------------------------------------


ENVIRON = {
    "USER": "planted-user",
    "HOME": "/home/planted-user",
    "HOSTNAME": "planted-host.lan",
    "WANDB_API_KEY": "k" * 40,
}
PRIVATE = Private.of_this_machine(ENVIRON, paths={BASE: "org/tiny", "/opt/kept here/d": ""}, secrets=[TOKEN, None])


@pytest.mark.parametrize(
    ("text", "published"),
    [
        ("loaded from /home/planted-user/runs/x7", "loaded from .../x7"),
        ("it is in /home/planted-user.", "it is in ~."),
        (f"`{BASE}/config.json`", "`org/tiny/config.json`"),
        ("/opt/kept here/d/part.jsonl", "d/part.jsonl"),
        ("base_model:adapter:/mnt/disk/llama", "base_model:adapter:.../llama"),
        ("file:///srv/hub/x and /dev/shm/x/y", "file://.../x and .../y"),
        ("~/models/llama and ~other/models/y", ".../llama and .../y"),
        ("('/tmp/a/b', \"/data/c/d\")", "('.../b', \".../d\")"),
        ("in /root/.cache/huggingface/hub/models--org--name/snapshots/abc/config.json", "in .../org/name"),
        ("ssh planted-user@planted-host failed", "ssh user@host failed"),
        (f"token {TOKEN} and hf_{'a' * 34}", "token REDACTED and REDACTED"),
        (f"key {'k' * 40}", "key REDACTED"),
        ("https://bob:pass1234@example.org/x", "https://REDACTED@example.org/x"),
    ],
)
def test_what_is_private_is_replaced(text: str, published: str) -> None:
    assert scrub_text(text, PRIVATE) == published
    assert scrub_text(published, PRIVATE) == published, "what is public already is not changed again"


@pytest.mark.parametrize(
    "text",
    [
        "https://huggingface.co/org/name/blob/main/README.md",
        "/sys/class/kfd/kfd/topology/nodes and /usr/bin/cc -O3 and /dev/shm",
        "and/or, 3/4, text/html, model.layers.0/x",
        "</think> <|im_end|> /no_think",
        "POST /v1/chat/completions",
        "org/name and ./runs/x and ../data/y",
        "planted-users are not planted-user-7",
        "a token, a key and a password",
    ],
)
def test_what_is_public_stays(text: str) -> None:
    assert scrub_text(text, PRIVATE) == text


def test_json_is_searched_to_its_last_leaf() -> None:
    before = {"/tmp/a/b": [{"x": f"{BASE}/y"}, 1, None, True, 0.5]}
    assert scrub_json(before, PRIVATE) == {".../b": [{"x": "org/tiny/y"}, 1, None, True, 0.5]}


def test_literal_secrets_and_paths_are_found_in_a_file() -> None:
    assert find_private(b"\0" * (1 << 20) + TOKEN.encode() + b"\0", PRIVATE) == "a secret"
    assert find_private(BASE.encode(), PRIVATE) == f"the path {BASE}"
    assert find_private(b"/root /home/x/y /tmp/a/b", PRIVATE) is None, "a vocabulary may hold anything"


# ---- a whole push ---------------------------------------------------------------------------------------------


def test_nothing_planted_gets_out(hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "planted-user")
    monkeypatch.setenv("SOME_API_KEY", "planted-key-0123456789")
    out = write_run(tmp_path / "planted-place" / "out", checkpoints=(4,))
    (out / "report.html").write_text(f"<p>{out} planted-key-0123456789</p>")
    said: list[str] = []
    push(out, f"{USER}/a", settings=PushSettings(checkpoints="all", report=True), say=said.append)
    there = on_hub(hub, f"{USER}/a")
    assert b"training report</title>" in there["report.html"]
    leaks = {
        (path, planted)
        for path, content in there.items()
        for planted in ("planted-user", "planted-disk", "planted-place", "planted-key", TOKEN, str(tmp_path))
        if planted.encode() in content
    }
    assert leaks == set()
    sent = [one for one in hub.requests if TOKEN in one.path]
    assert sent == [] and TOKEN not in "\n".join(said)
    assert json.loads(there["adapter_config.json"])["base_model_name_or_path"] == "Tiny Llama"
    state = json.loads(there["checkpoint-4/trainer_state.json"])
    assert state["global_step"] == 4 and state["best_model_checkpoint"] == f"{USER}/a/checkpoint-4"
    report = json.loads(there["transfer_report.json"])
    assert report["findings"] == [{"text": "user is not in the group render; Tiny Llama/x is slow"}]


def test_the_base_model_is_named_as_the_user_says(hub: LoopbackHub, tmp_path: Path) -> None:
    out = write_run(tmp_path / "out")
    said: list[str] = []
    push(out, f"{USER}/a", settings=PushSettings(base_model_id="org/tiny"), say=said.append)
    there = on_hub(hub, f"{USER}/a")
    assert json.loads(there["adapter_config.json"])["base_model_name_or_path"] == "org/tiny"
    assert json.loads(there["tokenizer_config.json"])["name_or_path"] == "org/tiny"
    assert ModelCard(there["README.md"].decode()).data.base_model == "org/tiny"
    assert b"from `org/tiny`" in there["README.md"]


def test_a_secret_in_a_file_that_cannot_be_rewritten_stops_the_push(hub: LoopbackHub, tmp_path: Path) -> None:
    out = write_run(tmp_path / "out")
    (out / "loss.png").write_bytes(b"\x89PNG\0" + TOKEN.encode())
    listed = [*manifest.read(out).files, "loss.png"]  # type: ignore[union-attr]
    manifest.write(out, run_id="run-1", step=8, status="final", files=listed)
    with pytest.raises(UsageError, match=r"loss\.png holds a secret") as caught:
        push(out, f"{USER}/a")
    assert TOKEN not in str(caught.value) and hub.requests == []
