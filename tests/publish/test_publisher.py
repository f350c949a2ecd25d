"""Checkpoint pushes while a run goes on: what fails is said, brought later, and never looks like success."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.trainer_utils import HubStrategy

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.publish.push import Publisher
from tests.publish.hub_server import USER, LoopbackHub, on_hub, write_checkpoint, write_run

# huggingface_hub 2.4 passes files as httpx2 no longer likes them (lfs.py, _upload_single_part).
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

REPO = f"{USER}/adapter"
COMMIT = "POST .*/commit/"
Make = Callable[..., Publisher]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def publisher(hub: LoopbackHub, tmp_path: Path, said: list[str]) -> Iterator[Make]:
    """Makes publishers that are closed at the end."""
    made: list[Publisher] = []

    def make(strategy: Any = "every_save", **hub: Any) -> Publisher:
        usual = {"model_id": REPO, "private_repo": None, "revision": None, "always_push": False, "strategy": strategy}
        args = {f"hub_{name}": value for name, value in {**usual, **hub}.items()}
        (tmp_path / "out").mkdir(exist_ok=True)
        args["output_dir"] = str(tmp_path / "out")
        made.append(Publisher(SimpleNamespace(**args), say=said.append))
        return made[-1]

    yield make
    hub.release.set()
    for each in made:
        each.wait()


@pytest.mark.parametrize(
    ("strategy", "folders"),
    [
        ("end", set()),
        ("every_save", set()),
        ("checkpoint", {"last-checkpoint"}),
        ("all_checkpoints", {"checkpoint-2", "checkpoint-4"}),
    ],
)
def test_each_strategy_brings_what_transformers_says(
    publisher: Make, hub: LoopbackHub, tmp_path: Path, strategy: str, folders: set[str]
) -> None:
    one, out = publisher(strategy), tmp_path / "out"
    one.open()
    for step in (2, 4):
        one.checkpoint(write_checkpoint(out, step))
        one.wait()
        top = on_hub(hub, REPO).get("adapter_model.safetensors")
        live = (out / f"checkpoint-{step}" / "adapter_model.safetensors").read_bytes()
        assert top == (None if strategy == "end" else live)
    one.result(write_run(out))
    there = on_hub(hub, REPO)
    assert {path.split("/")[0] for path in there if "/" in path} == folders
    assert there["adapter_model.safetensors"] == (out / "adapter_model.safetensors").read_bytes()
    for folder in folders:
        step = 4 if folder == "last-checkpoint" else int(folder.split("-")[1])
        assert there[f"{folder}/optimizer.pt"] == (out / f"checkpoint-{step}" / "optimizer.pt").read_bytes()
        assert f"{folder}/training_args.bin" not in there
    assert "optimizer.pt" not in there


def test_the_training_does_not_wait_and_the_end_brings_the_newest(
    publisher: Make, hub: LoopbackHub, tmp_path: Path
) -> None:
    one, out = publisher("checkpoint"), tmp_path / "out"
    one.open()
    hub.fault("PUT /upload/", hold=True)
    one.checkpoint(write_checkpoint(out, 2))
    assert hub.held.wait(20)
    for step in (4, 6, 8):  # all while the first upload hangs
        one.checkpoint(write_checkpoint(out, step))
    hub.release.set()
    one.wait()
    there = on_hub(hub, REPO)
    assert there["last-checkpoint/trainer_state.json"] != (out / "checkpoint-8" / "trainer_state.json").read_bytes()
    one.result(write_run(out))
    there = on_hub(hub, REPO)
    assert there["last-checkpoint/optimizer.pt"] == (out / "checkpoint-8" / "optimizer.pt").read_bytes()
    messages = list(hub.store.repos[REPO].messages.values())
    assert messages == ["initial commit", "Training in progress, step 2", "End of training"]


def test_always_push_makes_the_training_wait_and_shows_life(
    publisher: Make, hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_rocm_tune.publish.push._HEARTBEAT_S", 0.02)
    one, out = publisher(HubStrategy.EVERY_SAVE, always_push=True), tmp_path / "out"
    beats = threading.Event()
    one.alive = beats.set
    one.open()
    hub.fault(COMMIT, first=lambda: beats.wait(20) or None)
    for step in (2, 4):
        one.checkpoint(write_checkpoint(out, step))
        live = (out / f"checkpoint-{step}" / "adapter_model.safetensors").read_bytes()
        assert on_hub(hub, REPO)["adapter_model.safetensors"] == live, "it went on before the checkpoint was there"
    assert beats.is_set()


def test_the_wait_before_the_result_is_no_save(
    publisher: Make, hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer is in the phase of the last upload, which has no limit: a heartbeat would give it that of a save."""
    monkeypatch.setattr("hf_rocm_tune.publish.push._HEARTBEAT_S", 0.01)
    one, beats = publisher("checkpoint"), list[str]()
    one.alive = lambda: beats.append("save")
    one.open()
    hub.fault(COMMIT, first=lambda: time.sleep(0.3))
    one.checkpoint(write_checkpoint(tmp_path / "out", 2))
    one.result(write_run(tmp_path / "out"))
    assert beats == []


def test_a_damaged_checkpoint_is_said_and_not_pushed(
    publisher: Make, hub: LoopbackHub, tmp_path: Path, said: list[str]
) -> None:
    one, folder = publisher(), write_checkpoint(tmp_path / "out", 2)
    content = bytearray((folder / "adapter_model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "adapter_model.safetensors").write_bytes(content)
    one.open()
    one.checkpoint(folder)
    one.wait()
    assert on_hub(hub, REPO) == {} and "the files are not what was trained" in said[-1]


@pytest.mark.parametrize("there", [False, True])
def test_a_token_that_will_not_do_is_an_error_at_the_start(
    publisher: Make, hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    if there:  # upstream takes a refusal for "it is there already"
        hub.store.create(REPO, private=False)
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 34)
    with pytest.raises(UsageError, match=r"refuses the push .*401"):
        publisher().open()
    monkeypatch.setenv("HF_TOKEN", "hf_" + "r" * 34)
    hub.store.readers.add("hf_" + "r" * 34)
    with pytest.raises(UsageError, match=r"refuses the push .*403"):
        publisher().open()
