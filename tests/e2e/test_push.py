"""``--push_to_hub`` through the real command line: with local paths, through failures, and never a false success."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from hf_rocm_tune.survive import manifest
from tests.e2e.command import CommandServer, Result, log_rows
from tests.e2e.conftest import flags
from tests.publish.hub_server import TOKEN, USER, LoopbackHub, loopback_hub, on_hub

COMMIT = "POST .*/commit/"
_names = iter(f"run-{number}" for number in range(1000))


@pytest.fixture(scope="module")
def the_hub() -> Iterator[LoopbackHub]:
    """One Hub for all commands: its address must be known before they import anything."""
    with loopback_hub() as server:
        yield server


@pytest.fixture(scope="module")
def pushing(the_hub: LoopbackHub, scratch: Path) -> Iterator[CommandServer]:
    """Runs commands that know the Hub and have no token of their own."""
    place = scratch / "pushing"
    place.mkdir()
    variables = {"HF_ENDPOINT": the_hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": ""}
    started = CommandServer(place, variables)
    yield started
    started.close()


class Run:
    """One fine-tuning job with a directory and a repository of its own."""

    def __init__(self, server: CommandServer, hub: LoopbackHub, out: Path, shared: list[str]) -> None:
        self.hub, self.out = hub, out
        self.name = next(_names)
        self.repo = f"{USER}/{self.name}"
        self._server, self._shared = server, shared

    def __call__(self, token: str = TOKEN, **more: Any) -> Result:
        own = flags(output_dir=self.out, hub_model_id=self.name, hub_token=token, **more)
        return self._server.run(*self._shared, *own, "--push_to_hub")

    def there(self) -> dict[str, bytes]:
        """What is in the repository."""
        return on_hub(self.hub, self.repo)


@pytest.fixture
def run(
    pushing: CommandServer, the_hub: LoopbackHub, model_of: Callable[[str], Path], messages: Path, tmp_path: Path
) -> Iterator[Run]:
    shared = flags(
        model_name_or_path=model_of("llama3"),
        dataset_name=messages,
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=2,
        max_length=64,
        disable_tqdm=True,
        doctor="off",
    )
    yield Run(pushing, the_hub, tmp_path / "planted-place" / "out", shared)
    the_hub.faults.clear()


def check_result(run: Run) -> None:
    """The repository holds the result, and its manifest fits."""
    there = run.there()
    assert there["adapter_model.safetensors"] == (run.out / "adapter_model.safetensors").read_bytes()
    for path, content in there.items():
        file = run.out.parent / "pulled" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    found = manifest.inspect(run.out.parent / "pulled")
    assert found.problems == [] and found.manifest is not None and found.manifest.status == "final"
    assert manifest.verify(run.out) == []


def leaks(run: Run, *planted: str) -> list[tuple[str, str]]:
    return [(path, word) for path, content in run.there().items() for word in planted if word.encode() in content]


def test_local_base_and_data_are_pushed_and_nothing_local_gets_out(run: Run, scratch: Path, messages: Path) -> None:
    """Stock TRL: 400 and a traceback (huggingface/trl#1873)."""
    done = run(hub_strategy="all_checkpoints", hub_private_repo=True)
    assert done.code == 0, done.stderr
    check_result(run)
    there = run.there()
    assert {path.split("/")[0] for path in there if "/" in path} == {"checkpoint-2", "checkpoint-4"}
    assert there["checkpoint-2/optimizer.pt"] == (run.out / "checkpoint-2" / "optimizer.pt").read_bytes()
    assert not [path for path in there if path.endswith("training_args.bin")]
    assert leaks(run, "planted-place", str(scratch), str(messages), TOKEN) == []
    assert run.hub.store.repos[run.repo].private
    ModelCard(there["README.md"].decode())
    assert json.loads(there["adapter_config.json"])["base_model_name_or_path"].startswith("llama3-")
    written = [p for folder in (run.out, scratch) for p in folder.rglob("*") if p.is_file()]
    assert [p for p in written if TOKEN.encode() in p.read_bytes()] == [], "the token was stored"
    assert TOKEN not in done.stdout + done.stderr
    assert "all hashes on the Hub are correct" in done.stdout


def test_checkpoint_pushes_that_fail_are_said_and_the_run_ends_well_all_the_same(run: Run) -> None:
    run.hub.fault(COMMIT, status=500)
    done = run(hub_strategy="checkpoint", hub_always_push=True)
    assert done.code == 0, done.stderr
    check_result(run)
    assert "the push of checkpoint-2 failed: the Hub answers 500" in done.stdout
    assert run.there()["last-checkpoint/optimizer.pt"] == (run.out / "checkpoint-4" / "optimizer.pt").read_bytes()


def test_a_push_that_fails_is_no_success_and_the_same_command_again_finishes_it(run: Run) -> None:
    """Stock TRL with ``all_checkpoints``: the pushes fail in the background, and the run exits 0."""
    run.hub.fault(COMMIT, status=403, times=None)
    done = run(hub_strategy="all_checkpoints")
    assert done.code == 2 and len(done.error_lines) == 1 and "Traceback" not in done.stderr
    assert "the push failed: the Hub refuses the push to" in done.error_lines[0]
    assert "the push of checkpoint-" in done.stdout
    assert manifest.verify(run.out) == [], "the result must be as it was sealed"
    assert run.there() == {}
    run.hub.faults.clear()
    again = run(hub_strategy="all_checkpoints")
    assert again.code == 0 and "already holds this finished run" in again.stdout and not log_rows(again.stdout)
    check_result(run)
    assert {path.split("/")[0] for path in run.there() if "/" in path} == {"checkpoint-2", "checkpoint-4"}
    commits = len(run.hub.lines(COMMIT))
    third = run(hub_strategy="all_checkpoints")
    assert third.code == 0 and len(run.hub.lines(COMMIT)) == commits


def test_what_can_be_refused_is_refused_before_anything_is_loaded(run: Run) -> None:
    run.hub.fault("POST /api/repos/create", status=401, times=None)
    done = run()
    assert done.code == 2 and len(done.error_lines) == 1 and "the Hub refuses the push to" in done.error_lines[0]
    assert "Traceback" not in done.stderr and "Loading weights" not in done.stderr
    assert not (run.out / "run.json").exists()


def test_a_hub_that_is_away_at_the_start_does_not_keep_the_run_from_training(run: Run) -> None:
    run.hub.fault("POST /api/repos/create", status=503)
    done = run(hub_strategy="end", hub_base_model_id="org/the-base")
    assert done.code == 0 and "Training starts nevertheless" in done.stdout
    check_result(run)
    there = run.there()
    assert json.loads(there["adapter_config.json"])["base_model_name_or_path"] == "org/the-base"
    assert ModelCard(there["README.md"].decode()).data.base_model == "org/the-base"
