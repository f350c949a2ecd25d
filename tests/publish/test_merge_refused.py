"""Wrong input to ``merge``: one line that names what is wrong, code 2, and nothing is made."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LNTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file

from hf_rocm_tune import cli
from hf_rocm_tune.survive import manifest
from tests import tiny
from tests.publish.merge_cases import load_base, lora, write_adapter

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``base`` (a llama), ``other`` (another architecture), ``adapter`` for the base, sealed."""
    scratch = tmp_path_factory.mktemp("refused")
    shutil.copytree(tiny.build("llama3", scratch / "models"), scratch / "base")
    shutil.copytree(tiny.build("phi3", scratch / "models"), scratch / "other")
    write_adapter(lora("llama3"), scratch / "base", scratch / "adapter")
    manifest.write(scratch / "adapter", run_id="run", step=1, status="final")
    return scratch


@pytest.fixture
def here(made: Path, tmp_path: Path) -> Path:
    """Copies that a test may harm."""
    for name in ("base", "other", "adapter"):
        shutil.copytree(made / name, tmp_path / name)
    return tmp_path


def refusal(capsys: pytest.CaptureFixture[str], here: Path, *argv: str) -> str:
    """The one line of a merge that is refused."""
    out = here / "out"
    there = out.exists()
    before = sorted(here.iterdir())
    code = cli.main(["merge", *argv])
    printed = capsys.readouterr()
    errors = [line for line in printed.err.splitlines() if line.startswith("hf-rocm-tune: error:")]
    assert (code, len(errors), printed.out) == (2, 1, ""), printed.err
    assert "Traceback" not in printed.err
    assert out.exists() == there and sorted(here.iterdir()) == before
    return errors[0]


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def unseal(here: Path) -> None:
    (here / "adapter" / "integrity.json").unlink()


def flip(here: Path) -> None:
    file = here / "adapter" / WEIGHTS
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 1
    file.write_bytes(raw)


def with_config(config: Callable[[], object]) -> Callable[[Path], None]:
    def change(here: Path) -> None:
        shutil.rmtree(here / "adapter")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # stock PEFT's
            get_peft_model(load_base(here / "base"), config()).save_pretrained(here / "adapter")

    return change


def not_finite(here: Path) -> None:
    unseal(here)
    tensors = load_file(here / "adapter" / WEIGHTS)
    first = sorted(name for name in tensors if "lora_A" in name)[0]
    tensors[first][0, 0] = float("nan")
    save_file(tensors, here / "adapter" / WEIGHTS)


def too_large_for_float16(here: Path) -> None:
    unseal(here)
    tensors = load_file(here / "adapter" / WEIGHTS)
    save_file({name: tensor * 1e4 for name, tensor in tensors.items()}, here / "adapter" / WEIGHTS)


def without(part: str) -> Callable[[Path], None]:
    def change(here: Path) -> None:
        unseal(here)
        tensors = load_file(here / "adapter" / WEIGHTS)
        save_file({name: tensor for name, tensor in tensors.items() if part not in name}, here / "adapter" / WEIGHTS)

    return change


def pickle_with_code(here: Path) -> None:
    (here / "base" / "model.safetensors").unlink()

    class Runs:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
            return os.system, (f"touch {here / 'it ran'}",)

    torch.save({"model.norm.weight": Runs()}, here / "base" / "pytorch_model.bin")


def half_of_a_pickle(here: Path) -> None:
    tensors = load_file(here / "base" / "model.safetensors")
    (here / "base" / "model.safetensors").unlink()
    file = here / "base" / "pytorch_model.bin"
    torch.save(tensors, file)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def base_without(name: str) -> Callable[[Path], None]:
    def change(here: Path) -> None:
        tensors = load_file(here / "base" / "model.safetensors")
        del tensors[name]
        save_file(tensors, here / "base" / "model.safetensors", metadata={"format": "pt"})

    return change


HARMED: dict[str, tuple[Callable[[Path], object], list[str], list[str]]] = {
    "a flipped bit in the adapter": (flip, [], [WEIGHTS, "changed", "differs from what its run wrote"]),
    "weights that the manifest does not list": (
        lambda here: manifest.write(
            here / "adapter", run_id="run", step=1, status="final", files=["adapter_config.json"]
        ),
        [],
        [WEIGHTS, "not in its integrity.json"],
    ),
    "a truncated file": (
        lambda here: (unseal(here), (here / "adapter" / WEIGHTS).write_bytes(b"x" * 99)), [], ["damaged or truncated"]
    ),
    "half of an adapter": (without("layers.1.self_attn.q_proj.lora_B"), [], ["lacks", "layers.1.self_attn.q_proj"]),
    "values that are not finite": (not_finite, [], ["not finite", "layers.0"]),
    "values beyond float16": (too_large_for_float16, ["--dtype", "float16"], ["not finite", "--dtype bfloat16"]),
    "another method": (
        with_config(lambda: LNTuningConfig(task_type="CAUSAL_LM", target_modules=["input_layernorm"])),
        [],
        ["LN_TUNING", "LORA"],
    ),
    "a quantised base": (
        lambda here: edit(here / "base" / "config.json", quantization_config={"quant_method": "bitsandbytes"}),
        [],
        ["is quantised", "--base"],
    ),
    "a pickle that is none": (
        lambda here: (here / "base" / "model.safetensors").rename(here / "base" / "pytorch_model.bin"),
        [],
        ["pytorch_model.bin is damaged"],
    ),
    "a pickle that runs code": (pickle_with_code, [], ["more than tensors, which is not run"]),
    "half of a pickle": (half_of_a_pickle, [], ["pytorch_model.bin is damaged"]),
    "a base that lacks a tensor": (
        base_without("model.layers.1.self_attn.v_proj.weight"), [], ["lack", "model.layers.1.self_attn.v_proj.weight"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMED)
def test_harmed_input_is_refused_by_name(
    name: str, here: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    harm, flags, named = HARMED[name]
    harm(here)
    capsys.readouterr()
    line = refusal(capsys, here, str(here / "adapter"), str(here / "out"), "--base", str(here / "base"), *flags)
    assert all(part in line for part in named), line


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["nowhere/at/all", "out"], ["nowhere/at/all", "not found on the Hub"]),
        (["~nobody-of-this-name/x", "out"], ["~nobody-of-this-name/x is not a directory"]),
        (["base", "out"], ["base is a whole model"]),
        (["adapter", "out", "--base", "other"], ["does not fit Phi3ForCausalLM", "--base"]),
        (["adapter", "out", "--base", "./gone"], ["./gone does not exist", "--base"]),
        (["adapter", "out", "--base", "owner/model"], ["owner/model cannot be downloaded", "--base"]),
        (["adapter", "base"], ["base exists and is not empty"]),
        (["adapter", "x" * 240, "--base", "base"], ["File name too long"]),
        (["adapter", "out", "--dtype", "float8"], ["--dtype", "float8", "bfloat16"]),
        (["adapter", "out", "--max_shard_size", "5 elephants"], ["--max_shard_size", "5GB"]),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_by_name(
    argv: list[str],
    named: list[str],
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(here)
    line = refusal(capsys, here, *argv)
    assert all(part in line for part in named), line


def test_a_link_to_an_empty_directory_is_followed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "adapter" / "README.md").write_text("mine")  # no damage
    (here / "link").symlink_to("out")
    (here / "out").mkdir()
    before = sorted(here.iterdir())
    assert cli.main(["merge", str(here / "adapter"), str(here / "link"), "--base", str(here / "base")]) == 0
    assert capsys.readouterr().out == f"{here / 'out'}\n" and (here / "out" / "config.json").is_file()
    assert sorted(here.iterdir()) == before and (here / "link").is_symlink()


def test_an_unfinished_run_names_its_newest_checkpoint(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "run").mkdir()
    for step in (9, 10):
        shutil.copytree(here / "adapter", here / "run" / f"checkpoint-{step}")
    line = refusal(capsys, here, str(here / "run"), str(here / "out"))
    assert str(here / "run" / "checkpoint-10") in line


def test_a_lora_bias_without_a_bias_to_add_to_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(here / "adapter")
    write_adapter(lora("llama3", lora_bias=True), here / "base", here / "adapter")
    line = refusal(capsys, here, str(here / "adapter"), str(here / "out"), "--base", str(here / "base"))
    assert "has no bias" in line
