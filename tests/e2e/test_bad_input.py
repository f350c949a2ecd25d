"""Bad input: one line that says what is wrong and what to do, exit code 2, and nothing overwritten."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GPTNeoXJapaneseConfig, GPTNeoXJapaneseForCausalLM

from tests import tiny
from tests.e2e.command import CommandServer, Result
from tests.e2e.conftest import flags

LINE = "hf-rocm-tune: error:"
ROW = json.dumps({"text": "some words to learn"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """A place to spoil things in, and the command that would work if nothing were spoilt.

    Args:
        server: runs the command.
        model, untemplated, sharded: model directories; no test may change them.
        data: a data directory; likewise.
        room: an empty directory of this test.
    """

    server: CommandServer
    model: Path
    untemplated: Path
    sharded: Path
    data: Path
    room: Path

    @property
    def output(self) -> Path:
        """The output directory, unless a test names another."""
        return self.room / "out"

    def argv(self, *more: str, **changed: Any) -> list[str]:
        """The command line; None takes a flag away."""
        settings = {
            "model_name_or_path": self.model,
            "dataset_name": self.data,
            "output_dir": self.output,
            "max_steps": 1,
            "per_device_train_batch_size": 2,
            "max_length": 64,
            "disable_tqdm": True,
        } | changed
        return [*flags(**{name: value for name, value in settings.items() if value is not None}), *more]

    def refused(self, *more: str, env: dict[str, str] | None = None, **changed: Any) -> str:
        """Runs the command, which must be refused in the proper way. Returns the line without its beginning."""
        before = fingerprint(self.room)
        line = the_line(self.server.run(*self.argv(*more, **changed), env=env, cwd=self.room))
        after = fingerprint(self.room)
        assert {name: after.get(name) for name in before} == before
        assert after.keys() == before.keys(), "a refused start leaves nothing"
        return line

    def file(self, name: str, content: str | bytes) -> Path:
        """A file in the room."""
        path = self.room / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def copy_of(self, model: Path) -> Path:
        """A model to spoil."""
        return Path(shutil.copytree(model, self.room / "model"))


@pytest.fixture
def bench(server: CommandServer, scratch: Path, tmp_path: Path) -> Bench:
    """See :class:`Bench`."""
    models = scratch / "models"
    return Bench(
        server=server,
        model=tiny.build("llama3", models),
        untemplated=tiny.build("llama3", models, chat_template=False),
        sharded=tiny.build("llama3", models, shards=3),
        data=tiny.write_dataset_dir(scratch / "bad-input", train=8, test=4),
        room=tmp_path,
    )


def fingerprint(directory: Path) -> dict[str, str]:
    """SHA-256 of every file in a directory, and the directories."""
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in directory.rglob("*")
    }


def the_line(result: Result) -> str:
    """Asserts that the command was refused with one line of ours; returns what it says."""
    assert result.code == 2, result.stderr[-3000:]
    assert "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if LINE in line]
    assert len(lines) == 1 and result.stderr.splitlines()[-1] == lines[0]
    return lines[0].removeprefix(LINE).strip()


# ---- flags and recipes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--learning_rat", "1"], "unknown flag --learning_rat; did you mean --learning_rate?"),
        (["--max_steps", "many"], "--max_steps must be 1 or more, or -1 for no limit, got many"),
        (
            ["--load_in_4bit", "--use_peft", "false"],
            "--load_in_4bit is not supported with --use_peft false (quantised weights are not",
        ),
        (["--report_to", "nobody"], "--report_to nobody: unknown or not installed"),
        (["--lora_target_modules", "no_such"], "no_such match no module of LlamaForCausalLM; it has q_proj, k_proj"),
        (["--lora_modules_to_save", "lm_heads"], "--lora_modules_to_save: lm_heads match no module of LlamaFor"),
        (
            ["--gradient_checkpointing_kwargs", '{"offload": true}'],
            "its `offload` is not supported with --gradient_checkpointing_kwargs (it is not listed",
        ),
        (["--resume_from_checkpoint", "true"], "holds no intact checkpoint of this run; leave the flag out"),
        (["--use_liger_kernel"], "--use_liger_kernel needs"),
        (["--tensor_parallel"], "it takes 2 processes, and there are 1"),
        (["--auto_fit", "plan", "--auto_find_batch_size"], "both choose the micro-batch"),
        (["--recompute_layers", "1,7"], "--recompute_layers 1,7 needs 8 layers, and this model can recompute 2"),
        (["--split_layers", "2"], "does not fit a model of 2 layers"),
        (["--split_layers", "auto", "--torch_compile"], "does not work with --torch_compile"),
        (["--init_lora_weights", "loftq"], "loftq makes an adapter that does not fit"),
        (["--init_lora_weights", "pissa", "--lora_modules_to_save", "lm_head"], "the saved adapter would lack it"),
        (["--adapter_name_or_path", "/no/such/adapter"], "/no/such/adapter is not a directory"),
        (["--adapter_name_or_path", "x", "--lora_r", "8"], "has its own --lora_r"),
        (["--optim", "galore_adamw"], "galore"),
    ],
)
def test_a_flag_that_cannot_be(bench: Bench, more: list[str], says: str) -> None:
    assert says in bench.refused(*more)


EVALUATED = ["--eval_strategy", "steps", "--eval_steps", "1"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--assistant_only_loss", "--max_length", "8"], "no training rows remain: with --max_length 8"),
        (["--dataloader_drop_last", "--per_device_train_batch_size", "64"], "no batch could be made"),
        (["--embedding_learning_rate", "1e-3"], "neither embeddings nor output head are trained"),
        (["--optim", "muon"], "muon"),
        (["--eos_token", "nowhere"], "vocabulary"),
        (["--attn_implementation", "nonsense"], "nonsense"),
        ([*EVALUATED, "--metric_for_best_model", "nothere"], "set to 'eval_nothere', which is not found"),
    ],
)
def test_a_flag_that_fits_neither_the_rows_nor_another(bench: Bench, more: list[str], says: str) -> None:
    """Found when the trainer is built or later: the directory holds a record of the run."""
    result = bench.server.run(*bench.argv(*more, save_strategy="no"))
    assert says in the_line(result)
    assert not (bench.output / "integrity.json").exists()


def test_a_run_without_a_step_has_no_result(bench: Bench) -> None:
    more = ["--dataset_streaming", "--assistant_only_loss"]
    line = the_line(bench.server.run(*bench.argv(*more, max_length=8)))
    assert "nothing was trained" in line and not (bench.output / "adapter_model.safetensors").exists()


def test_a_recipe_or_a_fault_that_cannot_be(bench: Bench) -> None:
    recipe = bench.file("recipe.yaml", "learning_rte: 0.1\n")
    line = bench.refused("--config", str(recipe))
    assert "unknown key learning_rte; did you mean learning_rate?" in line and str(recipe) in line
    line = bench.refused(env={"HF_ROCM_TUNE_FAULT": "kind=zero,rate=2"})
    assert line.startswith("HF_ROCM_TUNE_FAULT:") and "expected a number from 0 to 1" in line


@pytest.mark.parametrize(
    ("flag", "name", "says"),
    [
        ("model_name_or_path", "nobody/nothing", "check the spelling, the network and HF_HUB_OFFLINE"),
        ("model_name_or_path", "/nowhere/model", "does not exist: give a model directory or a Hub id"),
        ("model_name_or_path", None, "no model: give --model (--model_name_or_path)"),
        ("dataset_name", "/nowhere/rows.jsonl", "no such file or folder: '/nowhere/rows.jsonl'"),
        ("dataset_name", "nobody/nothing", "no dataset 'nobody/nothing'"),
        ("model_name_or_path", "~nobody-of-this-name/x", "~nobody-of-this-name/x does not exist"),
        ("dataset_name", "x" * 300, "could not be read"),
        ("datasets", "~nobody-of-this-name/x", "'~nobody-of-this-name/x' could not be read"),
    ],
)
def test_a_model_or_data_that_is_not_there(bench: Bench, flag: str, name: str | None, says: str) -> None:
    assert says in bench.refused(**{flag: name})


# ---- the model ----------------------------------------------------------------------------------------------


def _replace(old: bytes, new: bytes) -> Callable[[Path], None]:
    def spoil(file: Path) -> None:
        content = file.read_bytes()
        assert old in content[:4096] and len(old) == len(new)
        file.write_bytes(content.replace(old, new, 1))

    return spoil


WEIGHTS = "model.safetensors"
AWQ = '{"quantization_config": {"quant_method": "awq"},'
SPOILS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "truncated": (WEIGHTS, lambda file: os.truncate(file, file.stat().st_size - 100), "truncated"),
    "header text": (WEIGHTS, lambda file: file.write_bytes(file.read_bytes()[:8] + b"{" * 9999), "damaged"),
    "header dtype": (WEIGHTS, _replace(b'"F32"', b'"Q32"'), "damaged or truncated"),
    "broken config": ("config.json", lambda file: file.write_text('{"model_type":'), "cannot be read as JSON"),
    "unknown type": ("config.json", lambda file: file.write_text('{"model_type": "no_such"}'), "no_such"),
    "other config": ("config.json", _replace(b'"hidden_size": 64', b'"hidden_size": 32'), "other shapes"),
    "quantised by AWQ": ("config.json", lambda file: file.write_text(AWQ + file.read_text()[1:]),
                         "its weights are quantised by awq, which cannot be trained here"),
    "broken tokenizer": ("tokenizer.json", lambda file: file.write_text("{"), "tokenizer of"),
    "no tokenizer": ("tokenizer.json", lambda file: [file.unlink(), (file.parent / "tokenizer_config.json").unlink()],
                     "needs tokenizer.json and tokenizer_config.json"),
}  # fmt: skip


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_spoilt_model_directory(bench: Bench, spoil: str) -> None:
    name, harm, says = SPOILS[spoil]
    model = bench.copy_of(bench.model)
    harm(model / name)
    line = bench.refused(model_name_or_path=model)
    assert says in line
    if name == WEIGHTS and (model / name).exists():
        assert str(model / name) in line


def test_a_missing_shard_is_named(bench: Bench) -> None:
    model = bench.copy_of(bench.sharded)
    shard = sorted(model.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert f"lacks {shard.name}, which model.safetensors.index.json names" in bench.refused(model_name_or_path=model)


def test_conversations_without_a_chat_template(bench: Bench) -> None:
    line = bench.refused(model_name_or_path=bench.untemplated)
    assert str(bench.untemplated) in line and "--chat_template_path" in line
    assert "has no chat template either" in bench.refused(chat_template_path=bench.untemplated)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "does not exist"),
        ("{% for %}", "the chat template is not valid: Expected an expression"),
        (" \n", "is empty"),
    ],
)
def test_a_chat_template_that_does_not_work(bench: Bench, content: str | None, says: str) -> None:
    template = bench.room / "template.jinja"
    if content is not None:
        template.write_text(content)
    line = bench.refused(chat_template_path=template)
    assert says in line and "chat" in line


# ---- the data -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is empty (0 bytes)"),
        (f'{ROW}\n{ROW}\n{{"text": "cut\n{ROW}\n', "rows.jsonl, line 3, column"),
        ('{"a": "a", "b": "b"}\n', "found 'a', 'b'; accepted 'messages'"),
        (f'{ROW}\n{{"text": null}}\n', "row 2 of the 'train' split: column 'text' holds nothing (null), not text"),
        (b'{"text": "caf\xe9"}\n', "is not UTF-8"),
        ('{"input_ids": [1, 2, 99999]}\n', "has the token id 99999; ids are from 0 to 511"),
        (
            json.dumps({"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}]}),
            "row 1 of the 'train' split: the chat template cannot render it: can only concatenate list",
        ),
    ],
)
def test_rows_that_cannot_be_trained_on(bench: Bench, content: str | bytes, says: str) -> None:
    assert says in bench.refused(dataset_name=bench.file("rows.jsonl", content))


def test_an_evaluation_without_rows_to_evaluate(bench: Bench) -> None:
    line = bench.refused(dataset_name=bench.file("rows.jsonl", f"{ROW}\n" * 4), eval_strategy="steps")
    assert "has no split 'test'" in line and "--eval_split_size" in line


# ---- the output directory -----------------------------------------------------------------------------------


def test_an_output_directory_that_cannot_be_one(bench: Bench) -> None:
    output = bench.file("taken", "not a directory") / "deeper/still"
    line = bench.refused(output_dir=output)
    assert str(output) in line and "Not a directory" in line
    assert "--output_dir /proc/nowhere/out cannot be written" in bench.refused(output_dir="/proc/nowhere/out")


@contextmanager
def _mounted(directory: Path, options: str) -> Iterator[Path]:
    """A small file system in memory; skips where the system does not let us mount one."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)]
    try:
        made = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command here")
    if made.returncode:
        pytest.skip(f"mounting is not allowed here: {made.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def test_a_full_output_directory(bench: Bench) -> None:
    with _mounted(bench.room / "small", "size=64k") as directory:
        (directory / "filler").write_bytes(b"x" * (60 << 10))
        assert "No space left" in bench.refused(output_dir=directory / "out")


def test_an_output_directory_that_fills_up_while_training(bench: Bench) -> None:
    with _mounted(bench.room / "small", "size=128k") as directory:
        line = the_line(bench.server.run(*bench.argv(output_dir=directory / "out", save_strategy="no")))
        assert "no space left" in line and "start the same command again" in line
        assert not (directory / "out" / "integrity.json").exists()
        assert not (directory / "out" / "adapter_model.safetensors").exists()


def test_an_output_directory_that_holds_another_run(bench: Bench) -> None:
    first = bench.server.run(*bench.argv(learning_rate=0.001))
    assert first.code == 0, first.stderr[-2000:]
    line = bench.refused(learning_rate=0.002)
    assert "learning_rate 0.001 -> 0.002" in line and "--overwrite_output_dir" in line
    replaced = bench.server.run(*bench.argv("--overwrite_output_dir", learning_rate=0.002))
    assert replaced.code == 0, replaced.stderr[-2000:]


def test_an_output_directory_that_holds_a_foreign_adapter(bench: Bench) -> None:
    bench.output.mkdir()
    (bench.output / "adapter_model.safetensors").write_bytes(b"precious")
    (bench.output / "adapter_config.json").write_text("{}")
    for more in ([], ["--overwrite_output_dir"]):
        line = bench.refused(*more)
        assert "adapter_model.safetensors" in line and "choose another --output_dir" in line


# ---- the launch ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "says"), [("2", "WORLD_SIZE is 2"), ("two", "WORLD_SIZE is 'two'")])
def test_a_world_size_that_no_launcher_made(bench: Bench, size: str, says: str) -> None:
    line = bench.refused(env={"WORLD_SIZE": size})
    assert says in line and "unset" in line


def _real(argv: list[str], cwd: Path, **environment: str) -> Result:
    """Runs a command in a process of its own, without the zygote."""
    done = subprocess.run(
        [sys.executable, "-m", *argv],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **environment},
        check=False,
    )
    return Result(code=done.returncode, stdout=done.stdout, stderr=done.stderr)


def test_four_bit_where_bitsandbytes_cannot_be_imported(bench: Bench) -> None:
    broken = bench.room / "shadow" / "bitsandbytes"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text('raise OSError("libhipblas.so.2: cannot open shared object file")\n')
    path = os.pathsep.join([str(broken.parent), os.environ["PYTHONPATH"]])
    line = the_line(_real(["hf_rocm_tune.sft", *bench.argv("--load_in_4bit")], bench.room, PYTHONPATH=path))
    assert "--load_in_4bit" in line and "bitsandbytes" in line and "install" in line
    assert fingerprint(bench.output) == {}


def in_4_bits(model: Path, directory: Path) -> Path:
    """A copy whose files are quantised."""
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    shutil.copytree(model, directory)
    AutoModelForCausalLM.from_pretrained(model, quantization_config=settings).save_pretrained(directory)
    return directory


def test_widths_that_bitsandbytes_dequantises_wrongly_on_a_cpu_stay_in_16_bits_or_are_refused(
    bench: Bench, scratch: Path
) -> None:
    """Refused where the files are quantised."""
    model = tiny.build("llama3", scratch / "models", intermediate_size=208)
    trained = bench.server.run(*bench.argv("--load_in_4bit", model_name_or_path=model, save_strategy="no"))
    assert trained.code == 0 and "not in 4 bits: down_proj, whose rows" in trained.stdout, trained.stderr
    shutil.rmtree(bench.output)
    line = bench.refused(model_name_or_path=in_4_bits(model, scratch / "quantised 208"))
    assert "down_proj.weight" in line and "208" in line and "use a GPU, or give the model" in line


def test_of_narrow_rows_more_than_the_first_are_looked_at(bench: Bench, scratch: Path) -> None:
    """The first ones are right by chance: all their blocks have one scale."""
    model = shutil.copytree(tiny.build("llama3", scratch / "models", intermediate_size=16), scratch / "one scale")
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("down_proj.weight"):
            tensor[:8] = 1.0
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    line = bench.refused(model_name_or_path=in_4_bits(model, scratch / "one scale in 4 bits"))
    assert "down_proj.weight wrongly, whose rows of 16 values" in line


def test_a_model_without_gradient_checkpointing_trains_without_it_and_the_flag_is_refused(
    bench: Bench, scratch: Path
) -> None:
    config = GPTNeoXJapaneseConfig(vocab_size=512, hidden_size=64, num_hidden_layers=1, num_attention_heads=2)
    model, tokenizer = scratch / "models" / "japanese", tiny.build_tokenizer()
    config.pad_token_id = tokenizer.pad_token_id
    GPTNeoXJapaneseForCausalLM(config).save_pretrained(model)
    tokenizer.save_pretrained(model)
    line = bench.refused("--gradient_checkpointing", model_name_or_path=model)
    assert line == "--gradient_checkpointing: GPTNeoXJapaneseForCausalLM does not support it: leave it out"
    trained = bench.server.run(*bench.argv(model_name_or_path=model, save_strategy="no"))
    assert trained.code == 0 and "does not support gradient checkpointing: activations are kept" in trained.stdout
