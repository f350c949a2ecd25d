"""How an adapter begins, goes on and learns: the result is plain PEFT whatever the way, each refusal one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.e2e.command import CommandServer, Result
from tests.e2e.conftest import flags, losses_of, report_of
from tests.e2e.probe import logits

ADAPTER = "adapter_model.safetensors"
FAST = {"learning_rate": 5e-3, "save_strategy": "steps", "save_steps": 2}


@pytest.fixture
def train(
    server: CommandServer, model_of: Callable[[str], Path], base_flags: list[str], tmp_path: Path
) -> Callable[..., Result]:
    """Runs a small job into ``tmp_path / output``."""

    def run(output: str = "out", *, env: dict[str, str] | None = None, **settings: Any) -> Result:
        rank = {} if "adapter_name_or_path" in settings else {"lora_r": 4}
        common = base_flags if rank else [part for part in base_flags if part not in ("--lora_dropout", "0.0")]
        argv = [*common, *flags(model_name_or_path=model_of("llama3"), **FAST, **rank)]
        return server.run(*argv, *flags(output_dir=tmp_path / output, **settings), env=env)

    return run


def done(result: Result) -> Result:
    assert result.code == 0, result.stderr[-3000:]
    return result


def assert_clean(output: Path) -> None:
    report = report_of(output)
    assert report["incidents"] == [] and report["frozen"]["mismatches"] == 0 < report["frozen"]["passes"]
    assert report["coverage"]["verified_bytes"] == report["coverage"]["device_bytes"]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's own use of it
@pytest.mark.parametrize("scheme", ["pissa", "olora"])
def test_what_begins_with_a_part_of_the_weights_ends_as_plain_lora_for_the_original_ones(
    train: Callable[..., Result], model_of: Callable[[str], Path], tmp_path: Path, scheme: str
) -> None:
    done(train("out", init_lora_weights=scheme, env={"DUMP_LOGITS": str(tmp_path / "logits")}))
    assert_clean(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["init_lora_weights"], config["r"], config["lora_alpha"]) == (True, 8, 64)
    base = AutoModelForCausalLM.from_pretrained(model_of("llama3"), dtype=torch.float32)
    original = logits(base)
    found = logits(PeftModel.from_pretrained(base, tmp_path / "out"))
    trained = torch.load(tmp_path / "logits", weights_only=True)
    assert (found - trained).abs().max() < 1e-4 < 1e-2 < (found - original).abs().max()

    killed = train("again", init_lora_weights=scheme, env={"HF_ROCM_TUNE_CRASH": "step=4,kind=kill"})
    assert killed.code < 0 and (tmp_path / "again" / "checkpoint-2").is_dir()
    done(train("again", init_lora_weights=scheme))
    assert losses_of(tmp_path / "again") == losses_of(tmp_path / "out")
    assert (tmp_path / "again" / ADAPTER).read_bytes() == (tmp_path / "out" / ADAPTER).read_bytes()


def rates(output: Path) -> dict[int, float]:
    """The learning rate with which each trained parameter began, by its number."""
    state = torch.load(output / "checkpoint-4" / "optimizer.pt", weights_only=False)
    return {number: group["initial_lr"] for group in state["param_groups"] for number in group["params"]}


def test_matrices_and_embeddings_learn_at_rates_of_their_own(train: Callable[..., Result], tmp_path: Path) -> None:
    own = {"loraplus_lr_ratio": 16, "embedding_learning_rate": 1e-4}
    settings = {"lora_modules_to_save": "embed_tokens", "lora_target_modules": "q_proj"}
    done(train("own", **own, **settings))
    done(train("same", **settings))
    assert_clean(tmp_path / "own")
    found = sorted(rates(tmp_path / "own").values())
    assert found == pytest.approx([1e-4, 5e-3, 5e-3, 8e-2, 8e-2])
    assert set(rates(tmp_path / "same").values()) == {5e-3}
    first, second = (load_file(tmp_path / each / ADAPTER) for each in ("own", "same"))
    moved = {name: (tensor - second[name]).abs().max() > 0 for name, tensor in first.items()}
    assert all(moved.values()) and len(moved) >= 5


def test_an_adapter_is_trained_on_from_where_it_was(train: Callable[..., Result], tmp_path: Path) -> None:
    done(train("first", lora_target_modules="q_proj"))
    again = done(train("second", adapter_name_or_path=tmp_path / "first", learning_rate=0.0))
    assert_clean(tmp_path / "second")
    kept, begun = (load_file(tmp_path / each / ADAPTER) for each in ("first", "second"))
    assert kept.keys() == begun.keys() and all(torch.equal(kept[name], begun[name]) for name in kept)
    assert "LORA, r=4" in again.stdout
    done(train("third", adapter_name_or_path=tmp_path / "first"))
    further = load_file(tmp_path / "third" / ADAPTER)
    assert all(not torch.equal(kept[name], further[name]) for name in kept)

    shutil.copytree(tmp_path / "first", tmp_path / "harmed")
    weights = load_file(tmp_path / "harmed" / ADAPTER)
    next(iter(weights.values())).view(-1)[0] += 1
    save_file(weights, tmp_path / "harmed" / ADAPTER)
    refused = train("fourth", adapter_name_or_path=tmp_path / "harmed")
    assert refused.code == 2 and "differs from what its run wrote" in refused.stderr


def test_magnitudes_are_trained_on_in_float32_on_a_quantised_base(train: Callable[..., Result], tmp_path: Path) -> None:
    done(train("first", use_dora=True, load_in_4bit=True))
    done(train("second", adapter_name_or_path=tmp_path / "first", load_in_4bit=True, learning_rate=1e-5))
    kept, further = (load_file(tmp_path / each / ADAPTER) for each in ("first", "second"))
    magnitudes = [name for name in kept if "magnitude" in name]
    assert magnitudes and {further[name].dtype for name in magnitudes} == {torch.float32}
    moved = [(further[name] - kept[name]).abs().max() for name in magnitudes]
    assert all(0 < each < 1e-3 for each in moved)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"init_lora_weights": "loftq"}, "loftq makes an adapter that does not fit"),
        ({"init_lora_weights": "pissa", "load_in_4bit": True}, "needs full-precision weights"),
        ({"init_lora_weights": "olora", "use_dora": True}, "does not work with --use_dora"),
        (
            {"init_lora_weights": "pissa", "lora_modules_to_save": "lm_head"},
            "--lora_modules_to_save, which the saved adapter would lack",
        ),
        ({"use_peft": False, "loraplus_lr_ratio": 4}, "--loraplus_lr_ratio needs LoRA"),
        ({"loraplus_lr_ratio": 0}, "--loraplus_lr_ratio must be more than 0"),
        ({"embedding_learning_rate": 1e-3}, "neither embeddings nor output head are trained"),
        ({"adapter_name_or_path": "/no/such/adapter"}, "/no/such/adapter is not a directory"),
        ({"adapter_name_or_path": "x", "lora_r": 8}, "has its own --lora_r"),
        ({"optim": "galore_adamw"}, "galore"),
        ({"optim": "apollo_adamw"}, "apollo"),
        ({"optim": "muon"}, "muon"),
    ],
)
def test_what_cannot_be_is_one_line(
    server: CommandServer,
    model_of: Callable[[str], Path],
    base_flags: list[str],
    settings: dict[str, Any],
    said: str,
) -> None:
    common = [part for part in base_flags if part not in ("--lora_dropout", "0.0")]  # an adapter brings its own
    result = server.run(*common, *flags(model_name_or_path=model_of("llama3"), **settings))
    assert result.code == 2, result.stderr[-2000:]
    assert result.stderr.count("\n") == 1 and said in result.stderr, result.stderr
