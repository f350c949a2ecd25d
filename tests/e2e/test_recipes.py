"""Every recipe trains at small scale through the real command line, verified, and a fault put in on purpose is caught.

Only size is overridden: model, data, steps, row length, and a micro-batch for rows this short. Method, adapters,
schedule and checkpointing are the recipe's. Not covered: the full-size models, which need the card.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from hf_rocm_tune.configs import RECIPES as recipes
from tests.e2e.command import TIMEOUT, CommandServer
from tests.e2e.conftest import flags, report_of, sampled

ADAPTER = "adapter_model.safetensors"
SINGLE = [name for name in recipes.names() if "dual" not in name]
DUAL = [name for name in recipes.names() if "dual" in name]


@pytest.fixture
def small(model_of: Callable[[str], Path], messages: Path) -> Callable[[str], list[str]]:
    """The command line for a recipe: the recipe by name, and what makes it small."""

    def command(name: str) -> list[str]:
        model = model_of(of_its_kind(name))
        data = messages.parent / "pairs"
        for split in ("train", "test") if "dpo" in name else ():
            chats = [json.loads(row)["messages"] for row in (messages / f"{split}.jsonl").read_text().splitlines()]
            rows = [{"prompt": one[:1], "chosen": one[1:], "rejected": two[1:]} for one, two in pairwise(chats)]
            data.mkdir(exist_ok=True)
            (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        size = flags(
            model_name_or_path=model,
            dataset_name=data if "dpo" in name else messages,
            max_steps=2,
            max_length=64,
            eval_steps=2,
            disable_tqdm=True,
        )
        return ["--config", name, *size, *flags(logging_steps=1, save_steps=2, warmup_steps=0)]

    return command


@pytest.mark.parametrize("name", sampled(SINGLE, "qwen_8b_dpo_qlora"))
def test_trains_and_recovers_from_faults_with_the_same_adapter(
    name: str, small: Callable[[str], list[str]], server: CommandServer, tmp_path: Path
) -> None:
    clean, harmed = tmp_path / "clean", tmp_path / "harmed"
    method = {"METHOD": "dpo"} if "dpo" in name else {}
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
}
"""A newcomer's own rows, of one file without splits."""
COUNTED = {
    "chats": "messages (conversational): the assistant's answers count",
    "text": "text: all tokens count",
    "alpaca": "prompt/completion (conversational): completions count",
}


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def own_file(place: Path, kind: str) -> Path:
    file = place / f"{kind}.jsonl"
    file.write_text("".join(json.dumps(ROWS[kind](number)) + "\n" for number in range(200)))
    return file


def of_its_kind(name: str) -> str:
    return {"llama": "llama3", "gemma": "gemma3", "mistral": "mistral"}.get(name.split("_")[0], "qwen3")


OWN = [
    *(pytest.param(name, "pairs" if "dpo" in name else "chats", id=f"{name}-chats") for name in SINGLE),
    *(pytest.param(SINGLE[0], kind, id=f"{SINGLE[0]}-{kind}") for kind in ("text", "alpaca")),
]
OFTEN = {"qwen_8b_qlora-chats", "qwen_8b_dpo_qlora-chats", f"{SINGLE[0]}-text"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [pytest.param(*one.values, id=one.id, marks=() if one.id in OFTEN else pytest.mark.long) for one in OWN],
)
def test_a_file_of_200_own_rows_takes_the_place_of_a_recipe_s_data(
    name: str, kind: str, model_of: Callable[[str], Path], server: CommandServer, tmp_path: Path
) -> None:
    """Nothing else is overridden but the model and, for a tiny one, the length."""
    data = own_file(tmp_path, kind)
    words = flags(model=model_of(of_its_kind(name)), dataset=data, output_dir=tmp_path / "out", max_length=64)
    method = {"METHOD": "dpo"} if "dpo" in name else {}
    done = server.run("--config", name, *words, env=method)
    assert done.code == 0, done.stderr[-3000:]
    assert "training on 190 rows, evaluation on 10 rows (split off from 'train')" in done.stdout
    assert COUNTED.get(kind, "") in done.stdout
    state = json.loads(next((tmp_path / "out").glob("checkpoint-*/trainer_state.json")).read_text())
    rates = [entry["learning_rate"] for entry in state["log_history"] if "learning_rate" in entry]
    evaluations = [entry for entry in state["log_history"] if "eval_loss" in entry]
    assert state["global_step"] == 12 and len(evaluations) >= 5
    assert rates and min(rates) < 0.9 * json_rate(tmp_path / "out")
    report = report_of(tmp_path / "out")
    assert report["coverage"]["verified_bytes"] == report["coverage"]["device_bytes"] > 0


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
