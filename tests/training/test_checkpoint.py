"""Attacks on checkpoints: wrong bytes, full disks and kills, through the real trainers with a tiny model."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from hf_rocm_tune.errors import CorruptionError, UsageError
from hf_rocm_tune.integrity import manifest
from hf_rocm_tune.integrity.atomic import clean_leftovers
from hf_rocm_tune.integrity.manifest import Manifest
from hf_rocm_tune.training.checkpoint import VerifiedCheckpointMixin
from tests import tiny

STEPS = 4

# PEFT 0.21 reads an attribute that transformers 5.23 renamed: https://github.com/huggingface/peft/pull/2817
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


class VerifiedSFT(VerifiedCheckpointMixin, SFTTrainer):  # type: ignore[misc]
    """As a user would define it."""

    run_id = "run-1"


class VerifiedPlain(VerifiedCheckpointMixin, Trainer):  # type: ignore[misc]
    """The mixin in front of the plain trainer."""

    run_id = "run-2"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama on disk."""
    return tiny.build("llama3", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def rows() -> Dataset:
    """Sixteen short texts."""
    return Dataset.from_list([{"text": text[:80]} for text in tiny.training_text()[:16]])


Make = Callable[..., Any]


@pytest.fixture
def make(model_path: Path, rows: Dataset, tmp_path: Path) -> Make:
    """Builds a trainer that writes to ``tmp_path/out``; adapters of another dtype than float32 are cast as TRL does."""

    def build(out: str = "out", *, adapter: torch.dtype = torch.float32, **options: Any) -> VerifiedSFT:
        torch.manual_seed(3)
        kept = {"save_steps": 2, "max_steps": STEPS, "eval_strategy": "no", "learning_rate": 1e-2} | options
        args = SFTConfig(
            output_dir=str(tmp_path / out),
            per_device_train_batch_size=2,
            max_length=32,
            report_to="none",
            use_cpu=True,
            bf16=False,
            activation_checkpointing=False,
            dataloader_pin_memory=False,
            disable_tqdm=True,
            logging_steps=1,
            **kept,
        )
        trainer = VerifiedSFT(
            model=AutoModelForCausalLM.from_pretrained(model_path, dtype=adapter),
            args=args,
            train_dataset=rows,
            eval_dataset=rows.select(range(4)),
            peft_config=LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM"),
        )
        for name, parameter in trainer.model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(adapter)
        return trainer

    return build


def _adapter(trainer: Any) -> dict[str, torch.Tensor]:
    state = get_peft_model_state_dict(trainer.model, save_embedding_layers=False)
    return {name: tensor.clone() for name, tensor in state.items()}


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name.startswith(("checkpoint", "_", "damaged")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_resume_is_bit_equal_to_an_uninterrupted_run(make: Make, tmp_path: Path, dtype: torch.dtype) -> None:
    whole = make(adapter=dtype)
    whole.train()
    out = tmp_path / "out"
    assert _names(out) == ["checkpoint-2", "checkpoint-4"]
    for step in (2, 4):
        found = manifest.inspect(out / f"checkpoint-{step}")
        assert found.problems == [] and found.unlisted == [] and found.manifest is not None
        assert (found.manifest.run_id, found.manifest.step, found.manifest.status) == ("run-1", step, "checkpoint")
        assert found.manifest.extra == {"compared": True} and found.manifest.tensors
        assert {"optimizer.pt", "trainer_state.json", "rng_state.pth"} <= set(found.manifest.files)
    assert (whole.files_verified, whole.file_mismatches) == (4, 0)

    resumed = make("resumed", adapter=dtype)
    placed: list[tuple[str, torch.dtype]] = []
    resumed.place_tensor = lambda tensor, *, name, stage: placed.append((stage, tensor.dtype)) or tensor.clone()
    resumed.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    assert set(placed) == {("adapter", dtype), ("optimizer", dtype)}
    assert _equal(_adapter(resumed), _adapter(whole))
    assert {p.dtype for n, p in resumed.model.named_parameters() if "lora_" in n} == {dtype}


def test_best_checkpoint_is_named_by_its_final_place_and_survives_rotation(make: Make, tmp_path: Path) -> None:
    trainer = make(
        adapter=torch.bfloat16,
        learning_rate=5.0,  # it diverges, so the first checkpoint stays the best
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        save_total_limit=2,
    )
    trainer.train()
    out = tmp_path / "out"
    best = Path(trainer.state.best_model_checkpoint)
    assert best.parent == out and manifest.verify(best) == []
    assert _names(out) == sorted({best.name, f"checkpoint-{STEPS}"}) and best.name != f"checkpoint-{STEPS}"
    for name in _names(out):
        state = json.loads((out / name / "trainer_state.json").read_text())
        assert state["best_model_checkpoint"] == str(best)
    assert _equal(_adapter(trainer), load_file(best / "adapter_model.safetensors")), "the best model was not loaded"


def test_saved_push_rotate_in_that_order(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, bool, list[str]]] = []

    def pushed(self: Any, folder: str) -> None:
        seen.append((Path(folder).name, not manifest.verify(Path(folder)), _names(tmp_path / "out")))

    monkeypatch.setattr(Trainer, "_push_from_checkpoint", pushed)
    trainer = make(save_total_limit=1)
    before: list[int] = []
    trainer.before_save = lambda: before.append(trainer.state.global_step)
    trainer.args.push_to_hub = True
    trainer.train()
    assert seen == [
        ("checkpoint-2", True, ["checkpoint-2"]),
        ("checkpoint-4", True, ["checkpoint-2", "checkpoint-4"]),
    ]
    assert before == [2, 4] and _names(tmp_path / "out") == ["checkpoint-4"]


def _damage(path: Path) -> None:
    tensors = load_file(path)
    first = next(name for name in tensors if "lora_A" in name)
    tensors[first].view(torch.int32).view(-1)[0] ^= 1
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("times", [1, 2])
def test_a_file_that_differs_from_the_live_adapter_is_written_again_once(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    trainer = make(save_total_limit=1)
    trainer.train()
    out, left = tmp_path / "out", [times]
    honest = Trainer._save

    def damaging(self: Any, output_dir: str | None = None, state_dict: Any = None) -> None:
        honest(self, output_dir, state_dict)
        if left[0] > 0:
            left[0] -= 1
            _damage(Path(output_dir or "") / "adapter_model.safetensors")

    monkeypatch.setattr(Trainer, "_save", damaging)
    trainer.state.global_step = 5
    if times == 1:
        trainer._save_checkpoint(trainer.model, None)
        assert _names(out) == ["checkpoint-5"] and manifest.verify(out / "checkpoint-5") == []
    else:
        with pytest.raises(CorruptionError, match=r"step 5 differs.*lora_A"):
            trainer._save_checkpoint(trainer.model, None)
        assert _names(out) == ["checkpoint-4"] and manifest.verify(out / "checkpoint-4") == []
    assert trainer.file_mismatches == times


def test_a_wrong_optimizer_file_is_caught(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make()
    trainer.train()
    honest = torch.save

    def zeroing(value: Any, file: Any, **keywords: Any) -> None:
        if str(file).endswith("optimizer.pt"):
            state = {k: dict(v, exp_avg=torch.zeros_like(v["exp_avg"])) for k, v in value["state"].items()}
            value = dict(value, state=state)
        honest(value, file, **keywords)

    monkeypatch.setattr(torch, "save", zeroing)
    trainer.state.global_step = 5
    with pytest.raises(CorruptionError, match="exp_avg"):
        trainer._save_checkpoint(trainer.model, None)
    assert _names(tmp_path / "out") == ["checkpoint-2", "checkpoint-4"]


def test_result_is_sealed_last_and_a_failed_save_does_not_look_finished(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(max_steps=1)
    trainer.train()
    out = tmp_path / "out"
    trainer.save_model()
    assert not (out / manifest.MANIFEST_NAME).exists(), "finished before the report was written"
    (out / "transfer_report.json").write_text("{}")
    trainer.seal_output(also=["transfer_report.json"])
    sealed = manifest.read(out)
    assert isinstance(sealed, Manifest) and sealed.status == "final" and manifest.verify(out) == []
    wanted = {"adapter_model.safetensors", "adapter_config.json", "README.md", "tokenizer.json", "transfer_report.json"}
    assert wanted <= set(sealed.files) and not any("checkpoint" in name for name in sealed.files)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    trainer.save_model(_internal_call=True)
    assert before == {path.name: path.stat().st_mtime_ns for path in out.iterdir()}, "a push rewrote a sealed result"

    _damage(out / "adapter_model.safetensors")
    monkeypatch.setattr(Trainer, "_save", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(UsageError, match="no space left"):
        trainer.save_model()
    assert manifest.verify(out) != [] and not [name for name in _names(out) if name.startswith("_")]


@pytest.mark.parametrize("writer", ["_save", "_save_optimizer_and_scheduler", "_save_rng_state"])
def test_a_full_disk_is_survived_at_a_checkpoint(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, writer: str
) -> None:
    honest, calls = getattr(Trainer, writer), []

    def sometimes_full(self: Any, *arguments: Any, **keywords: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        honest(self, *arguments, **keywords)

    monkeypatch.setattr(Trainer, writer, sometimes_full)
    trainer = make(save_steps=1, max_steps=3, save_total_limit=1)
    trainer.train()
    said = [record.getMessage() for record in caplog.records if "No space left" in record.getMessage()]
    assert len(said) == 1 and "checkpoint-2 was not saved" in said[0] and "\n" not in said[0]
    assert trainer.state.global_step == 3 and _names(tmp_path / "out") == ["checkpoint-3"]


def test_another_failure_is_not_taken_for_a_full_disk(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(Trainer, "_save_scaler", failing)
    with pytest.raises(RuntimeError, match="something else"):
        make().train()
    assert _names(tmp_path / "out") == []


def test_damaged_checkpoints_are_refused_by_name(make: Make, tmp_path: Path) -> None:
    trainer = make(max_steps=2)
    trainer.train()
    checkpoint = tmp_path / "out" / "checkpoint-2"
    _damage(checkpoint / "adapter_model.safetensors")
    with pytest.raises(UsageError, match=r"adapter_model\.safetensors is changed"):
        make().train(resume_from_checkpoint=str(checkpoint))
    (checkpoint / manifest.MANIFEST_NAME).unlink()  # as plain TRL leaves it
    whole = (checkpoint / "adapter_model.safetensors").read_bytes()
    (checkpoint / "adapter_model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match="cannot be read"):
        make().train(resume_from_checkpoint=str(checkpoint))
    (checkpoint / "adapter_model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"holds no adapter_model\.safetensors"):
        make().train(resume_from_checkpoint=str(checkpoint))


def test_whole_models_and_a_plain_trainer_are_verified_too(model_path: Path, tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6, 7, 8 + n], "labels": [5, 6, 7, 8 + n]} for n in range(8)]

    def build(out: str) -> VerifiedPlain:
        args = TrainingArguments(
            output_dir=str(tmp_path / out), max_steps=2, save_steps=1, report_to="none", use_cpu=True,
            disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(model_path, tie_word_embeddings=True)
        return VerifiedPlain(model=model, args=args, train_dataset=rows)

    whole = build("a")
    whole.train()
    assert whole.file_mismatches == 0 and whole.files_verified == 4
    resumed = build("b")
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-1"))
    assert _equal(dict(whole.model.state_dict()), dict(resumed.model.state_dict()))


def test_every_writer_s_way_of_reporting_a_full_disk_is_understood(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode != 0:
        pytest.skip("no permission to mount a small disk (user namespaces are off)")
    script = f"""
import errno, os, subprocess, sys, torch
from pathlib import Path
from safetensors.torch import save_file
from hf_rocm_tune.training.stage import Stage, drop_stage, is_disk_full
disk = Path({str(tmp_path)!r})
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "small", str(disk)], check=True)
big = torch.zeros(2_000_000)
for write in (
    lambda path: torch.save(big, path),
    lambda path: save_file({{"a": big}}, path),
    lambda path: path.write_bytes(bytes(8 << 20)),
):
    stage = Stage(root=disk)
    stage.attempt(write, disk / "file")
    assert is_disk_full(stage.failure, disk, 8_000_000), repr(stage.failure)
    (disk / "file").unlink(missing_ok=True)
    drop_stage(stage, rank=0)
    assert not is_disk_full(RuntimeError("other"), disk, 2_000_000), "the space was not given back"
"""
    done = subprocess.run(["unshare", "-rm", sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_kills_during_training_always_leave_a_checkpoint_to_resume_from(make: Make, tmp_path: Path) -> None:
    out, newest = tmp_path / "out", 0
    for die_at in (60, 4, 21, 33, 38):  # the first one past the first checkpoint; one save makes about 35 calls
        child = os.fork()
        if child == 0:
            _train_until_killed(make, out, newest, die_at)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        clean_leftovers(out)
        left = _names(out)
        assert all(manifest.verify(out / name) == [] for name in left), left
        assert not (out / manifest.MANIFEST_NAME).exists()
        reached = max(int(name.removeprefix("checkpoint-")) for name in left)
        assert reached >= newest, "an interrupted save lost the checkpoint before it"
        newest = reached
    assert newest > 1


def _train_until_killed(make: Make, out: Path, newest: int, die_at: int) -> None:
    """Train with one checkpoint kept, and die at the n-th flush or rename of the saves: never returns."""
    try:
        calls = [0]
        for name in ("fsync", "rename", "replace"):
            setattr(os, name, _counting(getattr(os, name), calls, die_at))
        trainer = make(save_steps=1, max_steps=40, save_total_limit=1)
        trainer.train(resume_from_checkpoint=str(out / f"checkpoint-{newest}") if newest else None)
    finally:
        os._exit(1)


def _counting(call: Callable[..., Any], calls: list[int], die_at: int) -> Callable[..., Any]:
    def counted(*arguments: Any, **keywords: Any) -> Any:
        calls[0] += 1
        if calls[0] == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **keywords)

    return counted


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_two_ranks_save_together_and_survive_a_full_disk_on_either(model_path: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(2):
        child = os.fork()  # an import of everything takes longer than the test
        if child == 0:
            _run_rank(rank, port, model_path, tmp_path)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    said = [(tmp_path / f"rank{rank}").read_text() for rank in range(2)]
    assert codes == [0, 0], "\n".join(said)
    assert said[0].count("was not saved") == 2 and said[1].count("was not saved") == 0
    out = tmp_path / "out"
    assert _names(out) == ["checkpoint-1", "checkpoint-4"]
    for path in (out, out / "checkpoint-1", out / "checkpoint-4"):
        found = manifest.inspect(path)
        assert found.problems == [] and found.manifest is not None and found.manifest.run_id == "run-2"
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= {path.name for path in (out / "checkpoint-4").iterdir()}
    assert "staging" not in (out / "checkpoint-4" / "trainer_state.json").read_text()


def _run_rank(rank: int, port: int, model_path: Path, tmp_path: Path) -> None:
    """One rank of a CPU job whose disk is full on rank 0 at step 2 and on rank 1 at step 3: never returns."""
    code = 1
    try:
        log = os.open(tmp_path / f"rank{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 2)
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - it lives as long as the process
        logging.basicConfig(force=True)
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in names.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", ACCELERATE_USE_CPU="true")
        AcceleratorState._reset_state(reset_partial_state=True)
        rows = [{"input_ids": [5, 6, 7, 8 + n], "labels": [5, 6, 7, 8 + n]} for n in range(16)]
        args = TrainingArguments(
            output_dir=str(tmp_path / "out"), max_steps=4, save_steps=1, eval_strategy="steps", eval_steps=1,
            per_device_train_batch_size=1, load_best_model_at_end=True, report_to="none", disable_tqdm=True,
            dataloader_pin_memory=False,
        )  # fmt: skip
        assert args.world_size == 2
        _full_disk(Trainer, "_save", lambda trainer: rank == 0 and trainer.state.global_step == 2)
        _full_disk(Trainer, "_save_rng_state", lambda trainer: rank == 1 and trainer.state.global_step == 3)
        model = AutoModelForCausalLM.from_pretrained(model_path)
        trainer = VerifiedPlain(model=model, args=args, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        trainer.save_model()
        trainer.seal_output()
        torch.distributed.destroy_process_group()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _full_disk(owner: type, name: str, when: Callable[[Any], bool]) -> None:
    honest = getattr(owner, name)

    def write(self: Any, *arguments: Any, **keywords: Any) -> None:
        if when(self):
            raise OSError(errno.ENOSPC, "No space left on device")
        honest(self, *arguments, **keywords)

    setattr(owner, name, write)
