"""What is on the Hub after a push is what was trained, all of it, nothing else, and nothing is sent twice."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_rocm_tune.errors import CorruptionError, UsageError
from hf_rocm_tune.integrity import manifest
from hf_rocm_tune.integrity.manifest import Manifest
from hf_rocm_tune.publish.hub import PushSettings, push
from tests.publish.hub_fixtures import (
    bytes_of,
    clean_report,
    on_hub,
    write_run,
)
from tests.publish.hub_server import USER, LoopbackHub

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


def quietly(directory: Path, repo: str = REPO, **settings: object) -> object:
    return push(directory, repo, settings=PushSettings(**settings), say=lambda _: None)  # type: ignore[arg-type]


def manifest_on(files: dict[str, bytes], folder: Path) -> Manifest:
    """The manifest that was uploaded, after every file that it lists was compared with it."""
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    found = manifest.inspect(folder)
    assert found.problems == [] and found.manifest is not None
    return found.manifest


def test_a_push_brings_what_the_manifest_lists_and_leaves_the_local_files_alone(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    out = write_run(tmp_path / "out")
    before = bytes_of(out)
    said: list[str] = []
    done = push(out, REPO, say=said.append)
    there = on_hub(hub, REPO)
    assert set(there) == TOP and done.files == done.sent == len(TOP)
    assert bytes_of(out) == before
    assert there["adapter_model.safetensors"] == before["adapter_model.safetensors"]
    assert there["tokenizer.json"] == before["tokenizer.json"], "a vocabulary is never rewritten"
    published = manifest_on(there, tmp_path / "pulled")
    assert (
        published.run_id == "run-1" and published.status == "final" and set(published.files) == TOP - {"integrity.json"}
    )
    told = published.extra["published"]
    assert set(told["changed"]) == {"README.md", "adapter_config.json", "tokenizer_config.json", "transfer_report.json"}
    assert set(told["left_out"]) == {"run.json", "training_args.bin"}
    assert "8 sent, 0 there already" in done.summary and any("adapter_config.json" in line for line in said)


def test_a_second_push_sends_only_what_changed(hub: LoopbackHub, tmp_path: Path) -> None:
    out = write_run(tmp_path / "out")
    first = quietly(out)
    sent = len(hub.lines("^PUT|/commit/"))
    again = quietly(out)
    assert again.commit == first.commit and again.sent == 0  # type: ignore[attr-defined]
    assert len(hub.lines("^PUT|/commit/")) == sent, "nothing changed, and something was sent"
    (out / "README.md").write_text((out / "README.md").read_text() + "\nEdited.\n")
    third = quietly(out)
    assert third.sent == 2 and len(hub.lines("^PUT")) == 1  # type: ignore[attr-defined]
    there = on_hub(hub, REPO)
    assert there["README.md"].endswith(b"Edited.\n")
    manifest_on(there, tmp_path / "pulled")


def test_files_of_an_earlier_run_are_not_left_beside_the_new_one(hub: LoopbackHub, tmp_path: Path) -> None:
    quietly(write_run(tmp_path / "one"))
    repo = hub.store.repos[REPO]
    theirs = {**repo.files(), "notes.txt": repo.files()["tokenizer.json"]}
    repo.add_commit("main", theirs, "the user's own file")
    other = write_run(tmp_path / "two", seed=1)
    (other / "chat_template.jinja").unlink()
    kept = [name for name in TOP if name not in ("chat_template.jinja", "integrity.json")]
    manifest.write(other, run_id="run-2", step=9, status="final", files=kept)
    done = quietly(other)
    assert set(on_hub(hub, REPO)) == (TOP - {"chat_template.jinja"}) | {"notes.txt"}
    assert done.deleted == 1  # type: ignore[attr-defined]


def test_checkpoints_go_into_folders_of_their_own_with_what_a_resume_needs(hub: LoopbackHub, tmp_path: Path) -> None:
    out = write_run(tmp_path / "out", checkpoints=(2, 10))
    quietly(out, checkpoints="last")
    there = on_hub(hub, REPO)
    last = {path.removeprefix("last-checkpoint/") for path in there if path.startswith("last-checkpoint/")}
    assert {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "integrity.json"} <= last
    assert "training_args.bin" not in last
    assert there["last-checkpoint/optimizer.pt"] == (out / "checkpoint-10" / "optimizer.pt").read_bytes(), (
        "10 is after 2"
    )
    pulled = {path.removeprefix("last-checkpoint/"): content for path, content in there.items() if "/" in path}
    assert manifest_on(pulled, tmp_path / "pulled").step == 10
    quietly(out, repo=f"{USER}/all", checkpoints="all")
    assert {path.split("/")[0] for path in on_hub(hub, f"{USER}/all") if "/" in path} == {
        "checkpoint-2",
        "checkpoint-10",
    }


def test_the_folder_of_the_last_checkpoint_holds_nothing_of_the_one_before(hub: LoopbackHub, tmp_path: Path) -> None:
    out = write_run(tmp_path / "out", checkpoints=(2,))
    (out / "checkpoint-2" / "scaler.pt").write_bytes(b"PK\0scaler")
    manifest.write(out / "checkpoint-2", run_id="run-1", step=2, status="checkpoint")
    quietly(out, checkpoints="last")
    assert "last-checkpoint/scaler.pt" in on_hub(hub, REPO)
    quietly(write_run(out, checkpoints=(4,)), checkpoints="last")
    assert "last-checkpoint/scaler.pt" not in on_hub(hub, REPO)


def test_a_checkpoint_alone_is_pushed_as_a_model(hub: LoopbackHub, tmp_path: Path) -> None:
    out = write_run(tmp_path / "out", checkpoints=(2,))
    quietly(out / "checkpoint-2")
    assert set(on_hub(hub, REPO)) == TOP - {"transfer_report.json"}


def test_private_revision_and_tags(hub: LoopbackHub, tmp_path: Path) -> None:
    out = write_run(tmp_path / "out")
    done = quietly(out, private=True, revision="trial", tags=("v1", "best"))
    repo = hub.store.repos[REPO]
    assert repo.private and repo.tags == {"v1": done.commit, "best": done.commit}  # type: ignore[attr-defined]
    assert set(on_hub(hub, REPO, "trial")) == TOP and on_hub(hub, REPO) == {}
    quietly(out, private=True, revision="trial", tags=("v1",))
    (out / "README.md").write_text("# other\n")
    with pytest.raises(UsageError, match=r"tag v1 .* is at"):
        quietly(out, revision="trial", tags=("v1",))


def test_private_is_not_pushed_to_a_public_repository(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.store.create(REPO, private=False)
    with pytest.raises(UsageError, match="is there and public"):
        quietly(write_run(tmp_path / "out"), private=True)
    assert on_hub(hub, REPO) == {}


def test_what_the_manifest_does_not_name_stays_and_what_goes_is_listed_before(hub: LoopbackHub, tmp_path: Path) -> None:
    out = write_run(tmp_path / "out")
    (tmp_path / "passport.png").write_bytes(b"\x89PNG secret")
    for name in ("holiday.png", "report.html", "my-notes.txt"):
        (out / name).write_text("mine")
    (out / "loss.png").symlink_to(tmp_path / "passport.png")
    said: list[str] = []
    requests: list[int] = []

    def say(line: str) -> None:
        said.append(line)
        requests.append(len(hub.requests))

    push(out, REPO, say=say)
    assert set(on_hub(hub, REPO)) == TOP
    listed = next(line for line in said if line.startswith("to be uploaded"))
    assert set(listed.partition(": ")[2].split(", ")) == TOP and requests[said.index(listed)] == 0
    assert any("not uploaded" in line and "my-notes.txt" in line for line in said)


@pytest.mark.parametrize(("wanted", "private"), [(None, True), (True, True), (False, False)])
def test_a_new_repository_is_private_unless_said_otherwise(
    hub: LoopbackHub, tmp_path: Path, wanted: bool | None, private: bool
) -> None:
    quietly(write_run(tmp_path / "out"), private=wanted)
    assert hub.store.repos[REPO].private is private


def test_a_public_repository_that_is_there_is_named_as_public(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.store.create(REPO, private=False)
    said: list[str] = []
    push(write_run(tmp_path / "out"), REPO, say=said.append)
    assert any("is there and public: everyone can read" in line for line in said)


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_card_that_is_no_plain_file_is_not_read(hub: LoopbackHub, tmp_path: Path, kind: str) -> None:
    out = write_run(tmp_path / "out")
    (out / "README.md").unlink()
    if kind == "link":
        (tmp_path / "id_ed25519").write_text("private key")
        (out / "README.md").symlink_to(tmp_path / "id_ed25519")
    else:
        os.mkfifo(out / "README.md")
    with pytest.raises(UsageError, match=r"README\.md (is a link|cannot be read)"):
        quietly(out)
    assert hub.requests == []


def test_an_edited_or_deleted_card_is_no_damage(hub: LoopbackHub, tmp_path: Path) -> None:
    out = write_run(tmp_path / "out")
    (out / "README.md").write_text("# mine\n")
    quietly(out)
    assert on_hub(hub, REPO)["README.md"] == b"# mine\n"
    (out / "README.md").unlink()
    (out / "training_args.bin").unlink()  # never uploaded, so it may be gone
    quietly(out)
    assert "README.md" not in on_hub(hub, REPO)


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
        (lambda out: (out / "training_args.bin").write_bytes(b""), UsageError, "training_args.bin is truncated"),
        (lambda out: (out / "integrity.json").unlink(), UsageError, "no run has completed it"),
        (lambda out: (out / "integrity.json").write_text("{"), UsageError, "is damaged"),
        (lambda out: _report(out, incidents=[STOPPED]), CorruptionError, "weights lm_head at step 3"),
        (
            lambda out: _report(out, batches={"mismatches": 3, "recovered": 2}),
            CorruptionError,
            "batches: 1 of 3 mismatches",
        ),
        (lambda out: _report(out, incidents=None), UsageError, "cannot be understood"),
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


def test_recovered_corruption_is_no_reason_to_refuse(hub: LoopbackHub, tmp_path: Path) -> None:
    out = write_run(tmp_path / "out")
    _report(out, incidents=[{**STOPPED, "outcome": "recovered"}], weights={"mismatches": 1, "recovered": 1})
    quietly(out)
    assert set(on_hub(hub, REPO)) == TOP


@pytest.mark.parametrize(
    "settings",
    [{"verify": "no"}, {"checkpoints": "some"}, {"message": " "}, {"base_model_id": "/home/x"}, {"revision": ""}],
)
def test_wrong_settings_are_refused(settings: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        PushSettings(**settings)  # type: ignore[arg-type]


def test_checkpoints_that_are_asked_for_must_be_there(hub: LoopbackHub, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no checkpoint-N"):
        quietly(write_run(tmp_path / "out"), checkpoints="last")
    assert hub.requests == []
