"""Every recipe trains at small scale through the real command line, verified, and a fault put in on purpose is caught.

Only size is overridden: model, data, steps, row length, and a micro-batch for rows this short. Method, adapters,
schedule and checkpointing are the recipe's. Not covered: the full-size models, which need the card.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_rocm_tune.configs import RECIPES as recipes
from hf_rocm_tune.configs import start_of
from tests import pictures, tiny
from tests.e2e.command import TIMEOUT, CommandServer
from tests.e2e.conftest import flags, report_of, sampled

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
import small_versions

ADAPTER = "adapter_model.safetensors"
SINGLE = [name for name in recipes.names() if "dual" not in name]
DUAL = [name for name in recipes.names() if "dual" in name]


@pytest.fixture
def small(model_of: Callable[[str], Path], scratch: Path) -> Callable[[str], list[str]]:
    """The command line for a recipe: the recipe by name, and what makes it small."""

    def command(name: str) -> list[str]:
        data = scratch / f"rows-of-{kind_of(name)}"
        data.mkdir(exist_ok=True)
        for split, count in (("train", 16), ("test", 4)):
            own_file(data, kind_of(name), count).rename(data / f"{split}.jsonl")
        size = flags(model=tiny_version(name, model_of, scratch), dataset=data, max_steps=2, disable_tqdm=True)
        size += flags(eval_steps=2) if method_of(name) != "grpo" else []
        return ["--config", name, *size, *length_of(name), *flags(logging_steps=1, save_steps=2, warmup_steps=0)]

    return command


@pytest.mark.parametrize("name", sampled(SINGLE, "qwen_8b_dpo_qlora"))
def test_trains_and_recovers_from_faults_with_the_same_adapter(
    name: str, small: Callable[[str], list[str]], server: CommandServer, tmp_path: Path
) -> None:
    clean, harmed = tmp_path / "clean", tmp_path / "harmed"
    method = {"METHOD": method_of(name)}
    done = server.run(*small(name), *flags(output_dir=clean), env=method)
    assert done.code == 0, done.stderr[-3000:]
    report = report_of(clean)
    assert report["coverage"]["verified_bytes"] == report["coverage"]["device_bytes"] > 0
    fault = "kind=zero_range,rate=0.2,seed=3,persist=0"
    done = server.run(*small(name), *flags(output_dir=harmed), env={"HF_ROCM_TUNE_FAULT": fault, **method})
    assert done.code == 0, done.stderr[-3000:]
    report = report_of(harmed)
    found = sum(report[stage]["mismatches"] for stage in ("weights", "batches"))
    assert found == sum(report[stage]["recovered"] for stage in ("weights", "batches")) > 0
    assert report["incidents"] and report["fault_injection"] is not None
    assert (harmed / ADAPTER).read_bytes() == (clean / ADAPTER).read_bytes()
    config = json.loads((clean / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (16, 32)


ROWS: dict[str, Callable[[int], dict[str, object]]] = {
    "chats": lambda n: {"messages": [_turn("user", f"What is {n} and {n}?"), _turn("assistant", f"It is {n + n}.")]},
    "text": lambda n: {
        "text": f"{n} and {n} is {n + n}. A longer line follows it, so that there is something to learn."
    },
    "alpaca": lambda n: {"instruction": f"Add {n} and {n}.", "output": f"It is {n + n}."},
    "pairs": lambda n: {
        "prompt": [_turn("user", f"What is {n} and {n}?")],
        "chosen": [_turn("assistant", f"It is {n + n}.")],
        "rejected": [_turn("assistant", f"It is {n * n + 1}.")],
    },
    "labels": lambda n: {
        "prompt": [_turn("user", f"What is {n} and {n}?")],
        "completion": [_turn("assistant", f"It is {n + n + n % 2}.")],
        "label": n % 2 == 0,
    },
    "prompts": lambda n: {"prompt": [_turn("user", f"What is {n} and {n}?")], "solution": f"{n + n}"},
}
"""A newcomer's own rows, of one file without splits."""
KINDS = {"dpo": "pairs", "kto": "labels", "grpo": "prompts"}
#: By recipe the architecture, of `tests.tiny` or, with the kind of its auto class, of transformers.
ARCHITECTURES: dict[str, tuple[str, ...]] = {
    "gpt_oss_20b_lora": ("gpt_oss",),
    "qwen_30b_a3b_qlora": ("qwen3_moe",),
    "qwen35_9b_qlora": ("qwen3_5_text", "causal"),
    "qwen36_27b_qlora_streamed": ("qwen3_5_text", "causal"),
    "qwen3_vl_8b_qlora": ("llava", "pictures"),  # Qwen's processor needs torchvision
    "gemma4_12b_qlora": ("gemma4_unified_text", "causal"),
    "ministral3_8b_qlora": ("ministral3", "causal"),
    "glm47_flash_qlora": ("glm4_moe_lite", "causal"),
}
COUNTED = {
    "chats": "messages (conversational): the assistant's answers count",
    "text": "text: all tokens count",
    "alpaca": "prompt/completion (conversational): completions count",
}


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def own_file(place: Path, kind: str, count: int = 200) -> Path:
    file = place / f"{kind}.jsonl"
    file.write_text("".join(json.dumps(ROWS[kind](number)) + "\n" for number in range(count)))
    return file


def method_of(name: str) -> str:
    return start_of(recipes.path(name).read_text(encoding="utf-8")).split()[1]


def kind_of(name: str) -> str:
    """The kind of rows that a recipe takes."""
    return KINDS.get(method_of(name), "chats")


def length_of(name: str) -> list[str]:
    """What makes rows short; the reward is one that needs no other package."""
    if method_of(name) == "grpo":
        return flags(max_completion_length=8, reward_funcs="think_format_reward")
    return flags(max_length=64)


def tiny_version(name: str, model_of: Callable[[str], Path], scratch: Path) -> Path:
    """A tiny model of the architecture of a recipe's model."""
    usual = {"llama": "llama3", "gemma": "gemma3", "mistral": "mistral"}.get(name.split("_")[0], "qwen3")
    architecture, *kinds = ARCHITECTURES.get(name, (usual,))
    if not kinds:
        return model_of(architecture)
    folder = scratch / f"small-{architecture}"
    if not folder.is_dir() and architecture == "llava":
        pictures.build_llava(folder)
    elif not folder.is_dir():
        small_versions.build(architecture, kinds[0], folder, tiny.build_tokenizer())
    return folder


OWN = [
    *(pytest.param(name, kind_of(name), id=f"{name}-chats") for name in SINGLE),
    *(pytest.param("llama_1b_lora", kind, id=f"llama_1b_lora-{kind}") for kind in ("text", "alpaca")),
]
OFTEN = {"qwen_8b_dpo_qlora-chats", "llama_1b_lora-text"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [pytest.param(*one.values, id=one.id, marks=() if one.id in OFTEN else pytest.mark.long) for one in OWN],
)
def test_a_file_of_200_own_rows_takes_the_place_of_a_recipe_s_data(
    name: str, kind: str, model_of: Callable[[str], Path], scratch: Path, server: CommandServer, tmp_path: Path
) -> None:
    """Nothing else is overridden but the model and, for a tiny one, the length."""
    data = own_file(tmp_path, kind)
    words = flags(model=tiny_version(name, model_of, scratch), dataset=data, output_dir=tmp_path / "out")
    words += flags(max_steps=2) if method_of(name) == "grpo" else []
    done = server.run("--config", name, *words, *length_of(name), env={"METHOD": method_of(name)})
    assert done.code == 0, done.stderr[-3000:]
    report = report_of(tmp_path / "out")
    assert report["coverage"]["verified_bytes"] == report["coverage"]["device_bytes"] > 0
    if method_of(name) == "grpo":  # generating for every row takes long, and this recipe does not evaluate
        return
    assert "training on 190 rows, evaluation on 10 rows (split off from 'train')" in done.stdout
    assert "pictures" in ARCHITECTURES.get(name, ()) or COUNTED.get(kind, "") in done.stdout
    state = json.loads(next((tmp_path / "out").glob("checkpoint-*/trainer_state.json")).read_text())
    rates = [entry["learning_rate"] for entry in state["log_history"] if "learning_rate" in entry]
    evaluations = [entry for entry in state["log_history"] if "eval_loss" in entry]
    assert state["global_step"] == 12 and len(evaluations) >= 5
    assert rates and min(rates) < 0.9 * json_rate(tmp_path / "out")


def json_rate(output: Path) -> float:
    """The learning rate that a run was given."""
    rate: float = json.loads((output / "run.json").read_text())["settings"]["learning_rate"]
    return rate


@pytest.mark.long
@pytest.mark.parametrize("name", DUAL)
def test_a_file_of_200_own_rows_takes_the_place_of_the_data_of_a_recipe_for_two_cards(
    name: str, model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    words = flags(model=model_of("qwen3"), dataset=own_file(tmp_path, "chats"), output_dir=tmp_path / "out")
    command = [sys.executable, "-m", "hf_rocm_tune", "sft", "--accelerate_config", "cpu_dual", "--config", name, *words]
    done = subprocess.run(
        [*command, "--max_length", "64"], capture_output=True, text=True, check=False, timeout=TIMEOUT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "evaluation on 10 rows (split off from 'train')" in done.stdout and COUNTED["chats"] in done.stdout


def test_the_flag_itself_is_still_refused_for_rows_without_answers(
    model_of: Callable[[str], Path], server: CommandServer, tmp_path: Path
) -> None:
    words = flags(model=model_of("gemma3"), dataset=own_file(tmp_path, "text"), assistant_only_loss=True)
    done = server.run("--config", "gemma_1b_lora", *words, *flags(output_dir=tmp_path / "out", max_length=64))
    assert done.code == 2 and "--assistant_only_loss needs conversations" in done.error_lines[0]


@pytest.mark.parametrize("name", SINGLE[:1])
def test_a_fault_that_stays_ends_the_run_with_code_3(
    name: str, small: Callable[[str], list[str]], server: CommandServer, tmp_path: Path
) -> None:
    fault = "kind=zero,stage=batches,persist=1"
    done = server.run(*small(name), *flags(output_dir=tmp_path / "out"), env={"HF_ROCM_TUNE_FAULT": fault})
    assert done.code == 3 and len(done.error_lines) == 1
    assert not (tmp_path / "out" / ADAPTER).exists()


@pytest.mark.long
@pytest.mark.parametrize("name", DUAL)
def test_two_processes_catch_a_wrong_average_of_gradients(
    name: str, small: Callable[[str], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ROCM_TUNE_FAULT", "kind=zero,stage=gradients,count=1,seed=1")
    command = [sys.executable, "-m", "hf_rocm_tune", "sft", "--accelerate_config", "cpu_dual", *small(name)]
    command += flags(output_dir=tmp_path / "out", gradient_accumulation_steps=2)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr[-3000:]
    report = report_of(tmp_path / "out")
    assert report["ranks"] == 2
    assert report["gradients"]["mismatches"] == report["gradients"]["recovered"] > 0
    assert report["coverage"]["verified_bytes"] == report["coverage"]["device_bytes"] > 0
