"""Checkpoints and results: what they hold is what was live, in the right order, and what was harmed is refused."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_rocm_tune.errors import CorruptionError, UsageError
from hf_rocm_tune.survive import manifest
from hf_rocm_tune.survive.manifest import Manifest
from tests.train.trainers import Make, VerifiedPlain, files, names


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


class Recorder:
    """A publisher that only notes what it is given, and in what state it found it."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.checkpoints: list[tuple[str, bool, list[str]]] = []
        self.results: list[bool] = []

    def checkpoint(self, directory: Path) -> None:
        self.checkpoints.append((directory.name, not manifest.verify(directory), names(self.out)))

    def result(self, directory: Path) -> None:
        found = manifest.read(directory)
        self.results.append(isinstance(found, manifest.Manifest) and found.status == "final")


def test_saved_push_rotate_in_that_order(saver: Make, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "out")
    trainer = saver(save_total_limit=1, ours={"publisher": recorder})
    before: list[int] = []
    trainer.before_save = lambda: before.append(trainer.state.global_step)
    trainer.args.push_to_hub = True
    trainer.train()
    assert recorder.checkpoints == [
        ("checkpoint-2", True, ["checkpoint-2"]),
        ("checkpoint-4", True, ["checkpoint-2", "checkpoint-4"]),
    ]
    assert before == [2, 4] and names(tmp_path / "out") == ["checkpoint-4"]


def test_a_push_is_of_a_sealed_result_and_needs_a_publisher(saver: Make, tmp_path: Path) -> None:
    trainer = saver(save_strategy="no")
    trainer.args.push_to_hub = True
    with pytest.raises(UsageError, match="needs a publisher"):
        trainer.train()
    recorder = Recorder(tmp_path / "out")
    trainer = saver(save_strategy="no", ours={"publisher": recorder})
    trainer.args.push_to_hub = True
    trainer.train()
    trainer.save_model()
    assert recorder.results == [], "a save alone publishes nothing"
    trainer.push_to_hub()
    trainer.push_to_hub(commit_message="again")
    assert recorder.results == [True, True] and manifest.verify(tmp_path / "out") == []


def test_the_best_checkpoint_survives_when_it_was_evaluated_after_its_save(saver: Make, tmp_path: Path) -> None:
    """Saved in mid-epoch, found to be the best at the end of the epoch: only the next save can protect it."""
    kept = {"save_steps": 4, "save_total_limit": 1, "eval_strategy": "epoch", "metric_for_best_model": "loss"}
    saver(max_steps=-1, num_train_epochs=1.5, **kept).train()
    (left,) = (tmp_path / "out").glob("checkpoint-*")  # at the end upstream itself deletes the newest
    assert left.name == "checkpoint-8" and manifest.verify(left) == []


def _damage(path: Path) -> None:
    tensors = load_file(path)
    first = next(name for name in tensors if "lora_A" in name)
    tensors[first].view(torch.int32).view(-1)[0] ^= 1
    save_file(tensors, path, metadata={"format": "pt"})


def test_the_model_card_has_the_name_of_the_run_not_of_the_directory_it_is_written_in(
    saver: Make, tmp_path: Path
) -> None:
    saver("my-run").train()
    card = (tmp_path / "my-run" / "README.md").read_text()
    assert card.count("# Model Card for my-run\n") == 1
    assert not list((tmp_path / "my-run").glob("*/README.md.*")) and "-2" not in card.splitlines()[0]


def test_what_begins_with_an_epoch_has_the_random_state_of_then(saver: Make, tmp_path: Path) -> None:
    """Rows are drawn as an epoch begins, and dropout's masks in it: those of the run that was not interrupted."""
    whole = saver("whole", max_steps=10, save_steps=8)
    whole.train()
    shutil.copytree(tmp_path / "whole" / "checkpoint-8", tmp_path / "again" / "checkpoint-8")
    again = saver("again", max_steps=10, save_steps=8)
    torch.rand(5)
    again.train(resume_from_checkpoint=str(tmp_path / "again" / "checkpoint-8"))
    losses = [[row["loss"] for row in each.state.log_history if "loss" in row][-2:] for each in (whole, again)]
    assert losses[0] == losses[1]
    assert _equal(*({n: p.detach() for n, p in each.model.named_parameters()} for each in (whole, again)))


def test_result_is_sealed_last_and_a_failed_save_does_not_look_finished(
    saver: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = saver(max_steps=1)
    trainer.train()
    out = tmp_path / "out"
    with monkeypatch.context() as broken:
        broken.setattr(json, "dumps", lambda *_, **__: (_ for _ in ()).throw(OSError("no report")))
        with pytest.raises(OSError, match="no report"):
            trainer.save_model()
    assert not (out / manifest.MANIFEST_NAME).exists(), "finished before the report was written"
    trainer.save_model()
    assert json.loads((out / "transfer_report.json").read_text())["coverage"]["unverified"] == []
    sealed = manifest.read(out)
    assert isinstance(sealed, Manifest) and sealed.status == "final" and manifest.verify(out) == []
    wanted = {"adapter_model.safetensors", "adapter_config.json", "README.md", "tokenizer.json", "transfer_report.json"}
    assert wanted <= set(sealed.files) and not any("checkpoint" in name for name in sealed.files)
    _damage(out / "adapter_model.safetensors")
    monkeypatch.setattr(Trainer, "_save", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(UsageError, match="no space left"):
        trainer.save_model()
    assert manifest.verify(out) != [] and not [name for name in names(out) if name.startswith("_")]


FOREIGN: tuple[tuple[str, Callable[[Path], Any], str], ...] = (
    ("optimizer.pt", Path.unlink, "has no optimizer.pt"),
    ("scheduler.pt", Path.unlink, "has no scheduler.pt"),
    ("rng_state.pth", Path.unlink, r"has no rng_state\*\.pth"),
    ("trainer_state.json", lambda path: path.write_bytes(path.read_bytes()[:50]), "trainer_state.json cannot be read"),
    ("trainer_state.json", lambda path: path.write_text("[]"), "trainer_state.json cannot be read"),
    ("optimizer.pt", lambda path: path.write_bytes(path.read_bytes()[:-1000]), "optimizer.pt: cannot be read"),
    ("scheduler.pt", lambda path: path.write_bytes(b"not a scheduler"), "scheduler.pt: cannot be read"),
    ("scheduler.pt", lambda path: torch.save([1], path), "scheduler.pt cannot be resumed"),
    ("rng_state.pth", lambda path: torch.save({"cpu": 1}, path), "rng_state.pth cannot be resumed"),
    ("adapter_model.safetensors", lambda path: path.write_bytes(b"{}"), "cannot be read"),
    ("adapter_model.safetensors", Path.unlink, r"holds no adapter_model\.safetensors"),
)


def test_a_checkpoint_of_another_program_that_is_damaged_or_lacks_a_part_is_refused(
    saver: Make, tmp_path: Path
) -> None:
    saver(max_steps=2).train()
    for number, (file, harm, said) in enumerate(FOREIGN):
        checkpoint = tmp_path / str(number) / "checkpoint-2"
        shutil.copytree(tmp_path / "out" / "checkpoint-2", checkpoint)
        (checkpoint / manifest.MANIFEST_NAME).unlink()
        harm(checkpoint / file)
        with pytest.raises(UsageError, match=said):
            saver().train(resume_from_checkpoint=str(checkpoint))


def test_whole_models_and_a_plain_trainer_are_verified_too(model_path: Path, tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6, 7, 8 + n], "labels": [5, 6, 7, 8 + n]} for n in range(8)]

    def build(out: str) -> VerifiedPlain:
        args = TrainingArguments(
            output_dir=str(tmp_path / out), max_steps=2, save_steps=1, report_to="none", use_cpu=True,
            disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(model_path, tie_word_embeddings=True)
        return VerifiedPlain(model=model, args=args, train_dataset=rows, run_id="run-2")

    whole = build("a")
    whole.train()
    assert files(whole) == (10, 0)
    checkpoint = tmp_path / "a" / "checkpoint-1"
    for form in ("one file", "shards"):
        resumed = build(form)
        placed: list[str] = []
        resumed.place_tensor = lambda tensor, *, name, stage, to=placed, place=resumed.place_tensor: (
            to.append(name) or place(tensor, name=name, stage=stage)
        )
        resumed.train(resume_from_checkpoint=str(checkpoint))
        assert _equal(dict(whole.model.state_dict()), dict(resumed.model.state_dict()))
        assert set(resumed.model.state_dict()) <= set(placed)
        if form == "one file":
            tensors = load_file(checkpoint / "model.safetensors")
            for number in (1, 2):
                part = dict(sorted(tensors.items())[number - 1 :: 2])
                save_file(part, checkpoint / f"model-0000{number}-of-00002.safetensors", metadata={"format": "pt"})
            (checkpoint / "model.safetensors").unlink()
            (checkpoint / manifest.MANIFEST_NAME).unlink()
    del part[next(iter(part))]
    save_file(part, checkpoint / "model-00002-of-00002.safetensors", metadata={"format": "pt"})
    with pytest.raises(CorruptionError, match=r"values differ from .* after loading"):
        build("lacks one").train(resume_from_checkpoint=str(checkpoint))
