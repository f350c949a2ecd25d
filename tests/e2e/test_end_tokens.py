"""A model trained with another end than its base's stops: in plain transformers and PEFT, merged, and in `generate`.

The base is a pretrained one: its end token is not the one with which its chat template ends a turn.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer, GenerationConfig

from hf_rocm_tune.survive import manifest
from tests.e2e.command import CommandServer
from tests.e2e.conftest import done, flags

LIMIT = 24
QUESTION, ANSWER = "What is a lantern?", "A small light."
MEMORISED = {"max_steps": 60, "learning_rate": 0.01, "lr_scheduler_type": "constant", "per_device_train_batch_size": 4}
MEMORISED |= {"warmup_steps": 0, "save_strategy": "no", "doctor": "off", "lora_target_modules": "all-linear"}
RUNS = {
    "full": {"use_peft": "false", "learning_rate": 0.003},
    "full, eos_token": {"use_peft": "false", "learning_rate": 0.003, "eos_token": "<|im_end|>"},
    "adapter": {"learning_rate": 0.01, "lora_modules_to_save": "lm_head"},
}
PLAIN = f"""
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
messages = [{{"role": "user", "content": {QUESTION!r}}}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
made = model.generate(**inputs, max_new_tokens={LIMIT}, do_sample=False)[0, inputs["input_ids"].shape[1]:]
assert not any(name.startswith("hf_rocm_tune") for name in sys.modules)
print(len(made), repr(tokenizer.decode(made)))
"""


@pytest.fixture(scope="module")
def place(model_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``base``, laid out as published ones are, and ``rows.jsonl``."""
    place = tmp_path_factory.mktemp("ends")
    base = shutil.copytree(model_of("llama3"), place / "base")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.eos_token = tokenizer.unk_token
    tokenizer.save_pretrained(base)
    for name in ("config.json", "generation_config.json"):
        content = json.loads((base / name).read_text())
        (base / name).write_text(json.dumps(content | {"eos_token_id": tokenizer.unk_token_id}))
    content = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps(content | {"published": True}))
    (base / "tokenizer.model").write_bytes(b"pieces")
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    (place / "rows.jsonl").write_text(json.dumps({"messages": turns}) + "\n" + json.dumps({"messages": turns}) + "\n")
    return place


@pytest.fixture(
    scope="module", params=[pytest.param("full", marks=pytest.mark.long), *(name for name in RUNS if name != "full")]
)
def run(request: pytest.FixtureRequest, server: CommandServer, place: Path) -> Path:
    out = place / request.param.replace(", ", "-")
    argv = flags(model="base", dataset="rows.jsonl", output_dir=out, **MEMORISED | RUNS[request.param])
    done(server.run(*argv, cwd=place))
    return out


SCRIPTS = """
import json, os, sys
for code, argument, directory in json.load(sys.stdin):
    os.chdir(directory)
    sys.argv = ["-c", argument]
    exec(code, {"__name__": "__main__"})
    print("ENDED")
"""


def plain(*scripts: tuple[str, str, Path]) -> list[tuple[int, str]]:
    """How many tokens plain libraries generate in each script, and which: the last line that it printed. All run in one
    process, each with an argument and in a directory."""
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    given = json.dumps([(code, argument, str(directory)) for code, argument, directory in scripts])
    command = [sys.executable, "-c", SCRIPTS]
    finished = subprocess.run(command, input=given, env=environ, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr[-2000:]
    printed = finished.stdout.split("ENDED\n")[:-1]
    assert len(printed) == len(scripts)
    lines = [text.splitlines()[-1].partition(" ") for text in printed]
    return [(int(count), text) for count, _, text in lines]


def code_of_the_card(out: Path) -> str:
    """The card's own code, with the question of the training and without sampling."""
    blocks = re.findall(r"^```python\n(.*?)\n^```$", (out / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    asked = blocks[1].replace("What is a checksum?", QUESTION).replace("max_new_tokens=64", f"max_new_tokens={LIMIT}")
    shown = 'made = generated[0, inputs["input_ids"].shape[1]:]\nprint(len(made), repr(tokenizer.decode(made)))'
    return "\n".join([blocks[0], asked.replace("generate(", "generate(do_sample=False, "), shown])


def test_it_stops_wherever_it_is_used(run: Path, place: Path, server: CommandServer) -> None:
    tokenizer = AutoTokenizer.from_pretrained(run)
    wanted = len(tokenizer(ANSWER)["input_ids"]) + 1
    assert wanted < LIMIT
    ask = ("--prompt", QUESTION, "--temperature", "0", "--max_new_tokens", str(LIMIT), "--json")
    ours = json.loads(done(server.run(str(run), *ask, env={"VERB": "generate"}, cwd=place)).stdout.splitlines()[-1])
    assert (ours["completion"], ours["tokens"], ours["complete"]) == (ANSWER, wanted, True)
    assert set(GenerationConfig.from_pretrained(run).eos_token_id) == {tokenizer.unk_token_id, 3}
    sealed = manifest.inspect(run)
    assert sealed.manifest and not sealed.problems and "generation_config.json" in sealed.manifest.files
    if "full" not in run.name:
        (run / "base").symlink_to(place / "base")  # the card names the base, not where it lies
    code, whole = code_of_the_card(run), run
    scripts = [(code, "", run)]
    if "full" not in run.name:  # the card says why it has that line
        (line,) = [line for line in code.splitlines() if line.startswith("model.generation_config = ")]
        scripts.append((code.replace(line, ""), "", run))
        whole = place / "merged"
        done(server.run(str(run), str(whole), env={"VERB": "merge"}, cwd=place))
    answered, *without_line, merged = plain(*scripts, (PLAIN, str(whole), place))
    (run / "base").unlink(missing_ok=True)
    assert answered == merged == (wanted, repr(f"{ANSWER}<|im_end|>"))
    assert all(count == LIMIT for count, _ in without_line)
    config = json.loads((whole / "config.json").read_text())
    assert config["eos_token_id"] == (3 if "eos" in run.name else tokenizer.unk_token_id)
    # What other programs read of the base is there as it was, with the special token that the run changed.
    assert (whole / "tokenizer.model").read_bytes() == b"pieces"
    content = json.loads((whole / "tokenizer_config.json").read_text())
    assert content["published"] and content["eos_token"] == ("<|im_end|>" if "eos" in run.name else "<|unk|>")


@pytest.mark.long
def test_the_code_of_the_card_loads_a_run_that_added_tokens(server: CommandServer, place: Path) -> None:
    """The template of another model, whose turns are tokens that the base has not."""
    other = AutoTokenizer.from_pretrained(place / "base")
    turns = {"additional_special_tokens": ["<turn>", "</turn>"]}
    other.add_special_tokens(turns, replace_extra_special_tokens=False)
    other.chat_template = (
        "{% for m in messages %}{{ '<turn>' + m['role'] + ': ' + m['content'] + '</turn>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<turn>assistant: ' }}{% endif %}"
    )
    other.save_pretrained(place / "other")
    out = place / "more-tokens"
    argv = flags(model="base", dataset="rows.jsonl", output_dir=out, chat_template_path="other", **MEMORISED)
    done(server.run(*argv, cwd=place))
    (out / "base").symlink_to(place / "base")
    done(server.run(str(out), str(place / "merged-more"), env={"VERB": "merge"}, cwd=place))
    answered, merged = plain((code_of_the_card(out), "", out), (PLAIN, str(place / "merged-more"), place))
    wanted = len(AutoTokenizer.from_pretrained(out)(ANSWER)["input_ids"]) + 1
    assert answered == merged == (wanted, repr(f"{ANSWER}</turn>"))
