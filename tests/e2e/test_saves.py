"""Files of checkpoints and results that are harmed between two lines of a save or of a resume.

Whatever ends with code 0 has the undisturbed run's adapter, and nothing whose manifest is in order holds other tensors
than that run's. Each attack is from outside: see `tests.e2e.attacks`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers.trainer_pt_utils import safe_globals

from hf_rocm_tune.survive import manifest
from tests.e2e.command import CommandServer, Result
from tests.e2e.conftest import ADAPTER, Job, MakeJob, report_of, sampled
from tests.simcard.log import Log

STATES = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")
LONG_SEEDS = [pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 10)]


@pytest.fixture(scope="module")
def job(make_job: MakeJob) -> Job:
    return make_job("saves", max_steps=4, lora_dropout=0.1, save_steps=2)


def attacked(job: Job, output: Path, attack: dict[str, Any], **changed: Any) -> Result:
    result = job.run(output, env={"ATTACK": json.dumps(attack)}, **changed)
    assert "attack:" in result.stderr
    return result


def check(job: Job, result: Result, output: Path) -> None:
    """All that an attacked run may leave."""
    assert result.code in (0, 3), result.stderr[-3000:]
    assert "Traceback" not in result.stderr
    if result.code == 0:
        assert manifest.verify(output) == []
        assert (output / ADAPTER).read_bytes() == (job.clean() / ADAPTER).read_bytes()
    else:
        assert len(result.error_lines) == 1
    for checkpoint in output.glob("checkpoint-*"):
        if manifest.verify(checkpoint) == []:
            for name in (ADAPTER, *STATES):
                assert content(checkpoint / name) == content(job.clean() / checkpoint.name / name), name
    assert not [path.name for path in output.iterdir() if path.name.startswith("_staging")]


def content(path: Path) -> Any:
    """What a file says, whatever the bytes between."""
    if path.suffix == ".json":
        state = json.loads(path.read_text())
        losses = [(row["step"], row["loss"]) for row in state["log_history"] if "loss" in row]
        return {"losses": losses, **{name: state[name] for name in ("global_step", "epoch", "max_steps")}}
    if path.suffix == ".safetensors":
        return {name: (str(tensor.dtype), tensor.tolist()) for name, tensor in load_file(path).items()}
    with safe_globals():
        return plain(torch.load(path, map_location="cpu", weights_only=True))


def plain(value: Any) -> Any:
    """Nested state without tensors and arrays."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


@pytest.fixture(scope="module")
def halfway(job: Job, scratch: Path) -> Path:
    """A run that ended after its checkpoint at step 2."""
    output = scratch / "saves" / "halfway"
    result = job.run(output, fault="kind=zero,tensor=labels,stage=batches,first=4,count=1,persist=1")
    assert result.code == 3 and [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-2"], result.stderr
    return output


# ---- a save -------------------------------------------------------------------------------------------------

# A file that is opened the first time has just been written; each later time it has been compared with what is live, or
# digested for the manifest, or not yet.
PLACES = [(ADAPTER, 3), ("optimizer.pt", 1)]
PLACES += [
    pytest.param(file, nth, marks=pytest.mark.long)
    for file in (ADAPTER, *STATES)
    for nth in range(1, 6 if file in (ADAPTER, "trainer_state.json") else 5)  # the others are opened four times
    if (file, nth) not in PLACES
]


@pytest.mark.parametrize("seed", [0, *LONG_SEEDS])
@pytest.mark.parametrize(("file", "nth"), PLACES)
def test_a_bit_that_flips_while_a_checkpoint_is_saved(job: Job, tmp_path: Path, file: str, nth: int, seed: int) -> None:
    output = tmp_path / "out"
    within = {"within": 2000} if file in STATES and seed % 2 == 0 else {}  # what no digest of a tensor covers
    result = attacked(job, output, {"file": file, "nth": nth, "seed": seed, **within})
    check(job, result, output)
    assert result.code == 0


@pytest.mark.parametrize("seed", [0, *LONG_SEEDS])
@pytest.mark.parametrize("file", [ADAPTER, pytest.param("optimizer.pt", marks=pytest.mark.long)])
def test_files_that_are_bad_five_times_are_good_the_sixth(job: Job, tmp_path: Path, file: str, seed: int) -> None:
    output = tmp_path / "out"
    result = attacked(job, output, {"file": file, "nth": 1, "times": 5, "seed": seed})  # each is opened once to be read
    check(job, result, output)
    assert result.code == 0 and result.stderr.count("written again") in range(3, 6)


@pytest.mark.parametrize("file", ["optimizer.pt", pytest.param(ADAPTER, marks=pytest.mark.long)])
def test_files_that_are_always_bad_end_the_run_with_one_line(job: Job, tmp_path: Path, file: str) -> None:
    output = tmp_path / "out"
    result = attacked(job, output, {"file": file, "nth": 1, "times": 10**6})
    check(job, result, output)
    assert result.code == 3 and file in result.error_lines[0] and list(output.glob("checkpoint-*")) == []


@pytest.mark.parametrize("seed", [0, *LONG_SEEDS])
@pytest.mark.parametrize("when", sampled(["README.md", "transfer_report.json"], "transfer_report.json"))
def test_a_bit_that_flips_in_the_result_before_it_is_sealed(job: Job, tmp_path: Path, when: str, seed: int) -> None:
    output = tmp_path / "out"
    attack = {"file": ADAPTER, "when": when, "in": "out", "nth": 1, "seed": seed}
    result = attacked(job, output, attack, save_strategy="no")
    assert f"of {output}/{ADAPTER} flipped" in result.stderr
    check(job, result, output)
    assert result.code == 0 and "changed after it was verified: saved again" in result.stderr


# ---- a resume -----------------------------------------------------------------------------------------------

ONCE, SPLIT = "all weights, tied", "all weights, experts that are split in files"
METHODS = {
    "lora, fused": ("llama3", ["--optim", "adamw_torch_fused"]),
    "all weights, fused": ("llama3", ["--optim", "adamw_torch_fused", "--use_peft", "false"]),
    ONCE: ("qwen3", ["--use_peft", "false"]),
    SPLIT: ("qwen3_moe", ["--use_peft", "false"]),
}


def run_and_resume(
    job: Job, server: CommandServer, model: Path, more: list[str], tmp_path: Path, env: dict[str, str]
) -> Path:
    """Resumes from the checkpoint of an uninterrupted run in another directory; the weights are the same."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    changed = {"model_name_or_path": model, "max_steps": 3, "lora_dropout": 0.0}

    def run(output: Path, env: dict[str, str]) -> None:
        replace(job, server=server).done(output, *more, env=env, **changed)

    run(whole, {})
    resumed.mkdir()
    shutil.copy(whole / "run.json", resumed)
    shutil.copytree(whole / "checkpoint-2", resumed / "checkpoint-2")
    run(resumed, env)
    files = [path.name for path in whole.glob("*.safetensors")]
    assert files and all((whole / name).read_bytes() == (resumed / name).read_bytes() for name in files)
    assert manifest.verify(resumed) == []
    return resumed


@pytest.mark.parametrize("method", [pytest.param(ONCE, marks=pytest.mark.long), SPLIT])
def test_all_weights_are_resumed_through_the_mover(
    job: Job, model_of: Callable[[str], Path], tmp_path: Path, method: str
) -> None:
    """Each of them: faults on their way are found there, and not only afterwards."""
    architecture, more = METHODS[method]
    fault = {"HF_ROCM_TUNE_FAULT": "kind=flip,rate=0.3,stage=adapter"}
    resumed = run_and_resume(job, job.server, model_of(architecture), more, tmp_path, fault)
    report = report_of(resumed)
    assert report["adapter"]["mismatches"] == report["adapter"]["recovered"] > 0
    with safe_open(resumed / "checkpoint-2" / "model.safetensors", framework="pt") as file:
        assert report["adapter"]["tensors"] >= len(file.keys()) / 2


@pytest.mark.long  # a sample of the methods on the card, killed and resumed, is in `test_card_runs`
@pytest.mark.parametrize("method", [name for name in METHODS if "fused" in name])
def test_on_a_card_nothing_that_is_resumed_goes_round_the_engine(
    job: Job, card_server: CommandServer, model_of: Callable[[str], Path], tmp_path: Path, method: str
) -> None:
    architecture, more = METHODS[method]
    log = tmp_path / "copies"
    run_and_resume(job, card_server, model_of(architecture), more, tmp_path, {"SIMCARD_LOG": str(log)})
    # the sum of losses, a float32 that the trainer makes anew
    assert Log(log).others("to_card") == {"transformers/trainer.py:Trainer._inner_training_loop": 4}


@pytest.mark.parametrize("seed", [0, *LONG_SEEDS])
@pytest.mark.parametrize("nth", [pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("file", sampled(["optimizer.pt", "scheduler.pt", "rng_state.pth"], "optimizer.pt"))
def test_a_bit_that_flips_while_a_checkpoint_is_resumed_from(
    job: Job, halfway: Path, tmp_path: Path, file: str, nth: int, seed: int
) -> None:
    """Found when the checkpoint is chosen, before it is loaded, or by what is live after it was loaded."""
    output = tmp_path / "out"
    shutil.copytree(halfway, output)
    result = attacked(job, output, {"file": file, "nth": nth, "seed": seed})
    if result.code == 2:
        assert nth == 2 and f"{file} is changed" in result.error_lines[0]
    else:
        check(job, result, output)
    check(job, job.done(output), output)


def test_a_damaged_checkpoint_of_another_program_is_one_line(job: Job, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-2"
    shutil.copytree(job.clean() / "checkpoint-2", checkpoint)
    (checkpoint / manifest.MANIFEST_NAME).unlink()
    torch.save({"state": {}, "param_groups": []}, checkpoint / "optimizer.pt")
    before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    result = job.run(tmp_path / "out", resume_from_checkpoint=checkpoint)
    assert result.code == 2 and "Traceback" not in result.stderr, result.stderr[-3000:]
    assert len(result.error_lines) == 1 and "optimizer.pt cannot be resumed" in result.error_lines[0]
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == before
