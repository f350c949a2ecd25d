"""Vision-language models: trained on pictures with every byte verified, as TRL trains them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from hf_rocm_tune.settings.arguments import RanksArguments, TuneArguments
from tests import pictures as pictures_of
from tests.e2e.command import CommandServer, Result
from tests.e2e.conftest import ADAPTER, done, flags, losses_of, report_of


@pytest.fixture(scope="module")
def model(scratch: Path) -> Path:
    return pictures_of.build_llava(scratch / "llava")


@pytest.fixture(scope="module")
def pictures(scratch: Path) -> Path:
    """A directory with a Parquet file of conversations about pictures."""
    return pictures_of.write_rows(scratch / "pictures")


Train = Callable[..., Result]


@pytest.fixture
def train(server: CommandServer, model: Path, pictures: Path, base_flags: list[str], tmp_path: Path) -> Train:
    """Runs a small job into ``tmp_path / output``."""

    def run(output: str, *more: str, env: dict[str, str] | None = None) -> Result:
        given = {"model_name_or_path": model, "dataset_name": pictures, "output_dir": tmp_path / output}
        settings = flags(**given, save_strategy="steps", save_steps=2, learning_rate=1e-3)
        return server.run(*base_flags, *settings, *more, env=env)

    return run


def test_pictures_are_trained_on_verified_and_as_stock_trl_does(train: Train, tmp_path: Path) -> None:
    """And harmed pixels are found, a killed run goes on."""
    done(train("ours"))
    report = report_of(tmp_path / "ours")
    assert report["coverage"]["unverified"] == [] and report["incidents"] == []
    assert report["coverage"]["verified_bytes"] == report["coverage"]["device_bytes"]
    assert report["batches"]["bytes"] > 4 * 2 * 3 * 28 * 28 * 4  # the pixels of 4 batches of 2, in float32
    weights = load_file(tmp_path / "ours" / ADAPTER)
    assert {name.split(".")[3] for name in weights} == {"language_model"}

    fault = {"HF_ROCM_TUNE_FAULT": "kind=zero,tensor=pixel_values,persist=0,count=2"}
    assert train("harmed", env={**fault, "HF_ROCM_TUNE_CRASH": "step=4,kind=kill"}).code < 0
    done(train("harmed", env=fault))
    counts = report_of(tmp_path / "harmed")["batches"]
    assert counts["mismatches"] == counts["recovered"] == 2
    assert {row["tensor"] for row in report_of(tmp_path / "harmed")["incidents"]} == {"pixel_values"}
    assert (tmp_path / "ours" / ADAPTER).read_bytes() == (tmp_path / "harmed" / ADAPTER).read_bytes()

    as_trl = ("--loss_on_picture_tokens", "true", "--train_vision_tower", "lora", "--train_projector", "lora")
    done(train("as trl", *as_trl))
    settings = yaml.safe_load(done(train("trl", "--print_config")).stdout)
    for own in (*dataclasses.fields(TuneArguments), *dataclasses.fields(RanksArguments)):
        settings.pop(own.name, None)
    (tmp_path / "trl.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "trl.scripts.sft", "--config", str(tmp_path / "trl.yaml")]
    stock = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert stock.returncode == 0, stock.stderr[-3000:]
    assert losses_of(tmp_path / "as trl") == losses_of(tmp_path / "trl") != losses_of(tmp_path / "ours")
    weights = load_file(tmp_path / "as trl" / ADAPTER)
    assert {name.split(".")[3] for name in weights} == {"vision_tower", "multi_modal_projector", "language_model"}
    for name, tensor in load_file(tmp_path / "trl" / ADAPTER).items():
        assert torch.equal(tensor, weights[name]), name


def test_the_plan_says_that_pictures_are_not_counted(server: CommandServer, model: Path) -> None:
    result = done(server.run("--model", str(model), "--seq", "128", "--json", env={"VERB": "plan"}))
    assert any("only text is counted, not vision input" in note for note in json.loads(result.stdout)["notes"])


TEXT_LINES = 13
"""What a run of text of one step prints; the closing line is the last. Nothing of it is about pictures."""
STOCK_FIRST = """
import io, sys
import matplotlib.figure, trl.scripts.sft
from trl import SFTTrainer
matplotlib.figure.Figure().savefig(io.BytesIO())  # the curve of the loss, which every run draws
SEEING = ("image", "video", "processing", "processor", "audio", "picture", "vision")
MEDIA = ("PIL", "torchvision", "torchcodec", "num2words", "cv2", "av", "soundfile")

def seeing():
    names = [name for name in sys.modules if name.startswith(("transformers.", "trl.", "datasets.", "hf_rocm_tune."))]
    named = {name for name in names if any(word in name.rpartition(".")[2] for word in SEEING)}
    return named | {name for name in sys.modules if name.partition(".")[0] in MEDIA}

stock = seeing()
from hf_rocm_tune import sft
code = sft.main(sys.argv[1:])
print("beyond TRL's:", sorted(seeing() - stock))
sys.exit(code)
"""


def test_a_run_of_text_imports_and_prints_nothing_for_pictures(
    model_of: Callable[[str], Path], base_flags: list[str]
) -> None:
    """In a process of its own, which has nothing but what TRL and matplotlib import themselves."""
    argv = [*base_flags, *flags(model_name_or_path=model_of("llama3"), max_steps=1, doctor="off")]
    command = [sys.executable, "-c", STOCK_FIRST, *argv]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    *lines, imported = ran.stdout.splitlines()
    assert imported == "beyond TRL's: ['hf_rocm_tune.machine.torchvision']"
    assert len(lines) == TEXT_LINES, ran.stdout
    assert lines[-1].startswith("hf-rocm-tune: integrity: VERIFIED") and "picture" not in ran.stdout


def test_pictures_for_a_model_of_text_are_one_line(
    train: Train, model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    refused = train("out", "--model_name_or_path", str(model_of("llama3")))
    assert refused.code == 2 and refused.stderr.count("\n") == 1, refused.stderr[-2000:]
    assert "vision" in refused.stderr
    assert not (tmp_path / "out" / "integrity.json").exists()
