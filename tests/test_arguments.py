"""The command line: every flag of ``trl sft`` works, the order of precedence holds, wrong input is one message."""

from __future__ import annotations

import dataclasses
import json
import os
import typing
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import yaml
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser
from trl.scripts._hf_argparser import string_to_bool

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.models import recompute
from hf_rocm_tune.settings import arguments as command_line
from hf_rocm_tune.settings.arguments import Arguments, RanksArguments, TuneArguments, build_parser, parse

OUR_TYPES = (TuneArguments, RanksArguments)
TRL_TYPES = (ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig)
REQUIRED = ["--model_name_or_path", "a-model", "--dataset_name", "some-data"]


@pytest.fixture
def base(tmp_path: Path) -> list[str]:
    return [*REQUIRED, "--output_dir", str(tmp_path / "out")]


def read(*argv: str, accelerator: bool = False, bf16: bool = False) -> Arguments:
    return parse(argv, accelerator=accelerator, bf16_supported=bf16)


def refused(*argv: str, accelerator: bool = False) -> str:
    with pytest.raises(UsageError) as caught:
        read(*argv, accelerator=accelerator)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What a flag needs beside a valid value of its type, and values that their names alone do not tell.
VALUES: dict[str, list[str]] = {
    "accelerator_config": ['{"even_batches": false}'],
    "datasets": ["some-data"],
    "dataloader_prefetch_factor": ["2", "--dataloader_num_workers", "1"],
    "debug": ["underflow_overflow"],
    "deepspeed": ["config.json"],
    "ddp_backend": ["gloo"],
    "eval_strategy": ["steps"],
    "fp16": ["false"],  # needs a GPU
    "fsdp": ["full_shard"],
    "fsdp_config": ["none"],
    "include_for_metrics": ["inputs"],
    "include_num_input_tokens_seen": ["no"],
    "liger_kernel_config": ["none"],
    "adam_beta1": ["0.5"],
    "adam_beta2": ["0.5"],
    "lora_dropout": ["0.5"],
    "load_best_model_at_end": ["true", "--eval_strategy", "steps", "--eval_steps", "500"],
    "lr_scheduler_kwargs": ["{}"],
    "lr_scheduler_type": ["cosine"],
    "parallelism_config": ["none"],
    "report_to": ["none"],
    "tf32": ["false"],
    "torch_compile": ["false"],
    "torch_compile_backend": ["none"],
    "torch_compile_mode": ["none"],
}
# Upstream builds nothing from these here: one needs several processes, the other an extra package.
ONLY_READ = {"ddp_backend", "deepspeed"}


def valid_value(field: dataclasses.Field[Any], hint: Any, choices: Any) -> list[str]:
    if field.name in VALUES:
        return VALUES[field.name]
    if choices:
        return [str(next(iter(choices)))]
    members = set(typing.get_args(hint)) or {hint}
    if bool in members:
        return ["true"]
    if members & {dict} or any(typing.get_origin(member) is dict for member in members):
        return ["{}"]
    for enum in members:
        if isinstance(enum, type) and issubclass(enum, Enum):
            return [next(iter(enum)).value]
    return ["1"]


def cases() -> list[tuple[str, list[str]]]:
    actions = {action.dest: action for action in build_parser()._actions}
    return [
        (field.name, valid_value(field, typing.get_type_hints(owner)[field.name], actions[field.name].choices))
        for owner in TRL_TYPES
        for field in dataclasses.fields(owner)
        if field.init
    ]


@pytest.mark.parametrize(("name", "value"), cases())
@pytest.mark.filterwarnings("ignore:.*deprecated.*:FutureWarning")  # upstream's word on its own flags
def test_every_flag_of_trl_is_accepted_and_means_the_same(name: str, value: list[str], base: list[str]) -> None:
    without = [base[i : i + 2] for i in range(0, len(base), 2) if base[i] != f"--{name}"]
    argv = [each for pair in without for each in pair] + [f"--{name}", *value]
    if name in ONLY_READ:
        namespace, unknown = build_parser().parse_known_args(argv)
        assert (getattr(namespace, name), unknown) == (value[0], [])
        return
    ours = read(*argv)
    assert name in ours.given
    same = ["--use_cpu", "--bf16", "false", *argv]
    theirs = TrlParser(TRL_TYPES).parse_args_and_config(same)
    parts = (ours.script, ours.training, ours.model, ours.mixture)
    found, expected = (next(getattr(part, name) for part in side if hasattr(part, name)) for side in (parts, theirs))
    assert found == expected or (name == "accelerator_config" and found.to_dict() == expected.to_dict())


def test_both_spellings_and_bare_booleans_are_accepted(base: list[str]) -> None:
    bare = read(*base, "--use-peft", "--packing", "--bf16", "--no_dataloader_pin_memory", "--completion-only-loss")
    assert bare.model.use_peft
    assert bare.training.packing
    assert bare.training.bf16
    assert bare.training.completion_only_loss
    assert {"use_peft", "packing", "bf16", "dataloader_pin_memory", "completion_only_loss"} <= bare.given
    assert not read(*base, "--use_peft", "false").model.use_peft
    assert all(action.nargs == "?" for action in build_parser()._actions if action.type is string_to_bool)


def test_precedence_is_command_line_recipe_our_default_trls(base: list[str], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("learning_rate: 3e-4\nmax_length: 77\nlora-r: 3\n")
    both = read(*base, "--config", str(recipe), "--max_length", "99")
    assert (both.training.learning_rate, both.training.max_length, both.model.lora_r) == (3e-4, 99, 3)
    assert {"learning_rate", "max_length", "lora_r"} <= both.given
    ours = read(*base)
    assert ours.training.learning_rate == 2e-4 != SFTConfig.learning_rate
    assert ours.training.max_length == SFTConfig.max_length
    assert ours.given == {"model_name_or_path", "dataset_name", "output_dir"}
    # A value that equals TRL's default is still the user's, and beats ours.
    assert read(*base, "--learning_rate", "2e-5").training.learning_rate == 2e-5
    recipe.write_text("use_peft: false\n")
    assert not read(*base, f"--config={recipe}").model.use_peft
    assert read(*base, "--config", str(recipe), "--use_peft").model.use_peft


def test_defaults_on_a_machine_without_a_gpu(base: list[str]) -> None:
    found = read(*base)
    assert found.training.device.type == "cpu"
    assert (found.training.use_cpu, found.training.bf16, found.model.dtype) == (True, False, "float32")
    assert (found.model.use_peft, found.model.lora_r, found.model.lora_alpha) == (True, 16, 32)
    assert found.model.lora_target_modules == "all-linear"
    assert found.training.report_to == []
    assert not found.training.dataloader_pin_memory
    assert found.training.gradient_checkpointing is getattr(found.training, recompute.SETTING) is True
    assert found.training.seed == SFTConfig.seed
    assert read(*base, "--dtype", "bfloat16", "--bf16", "true").training.bf16


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"bf16": True, "dtype": "bfloat16", "learning_rate": 2e-4}),
        ({"fp16": True}, {"bf16": False, "dtype": "float32"}),
        ({"use_peft": False}, {"bf16": True, "dtype": "float32", "learning_rate": 2e-5, "lora_target_modules": None}),
        ({"load_in_4bit": True}, {"use_bnb_nested_quant": True, "bnb_4bit_quant_type": "nf4", "dtype": "bfloat16"}),
        ({"load_in_4bit": True, "use_bnb_nested_quant": False}, {"use_bnb_nested_quant": False}),
        ({"lora_target_modules": ["q_proj"]}, {"lora_target_modules": ["q_proj"]}),
        ({"lora_target_parameters": ["experts"]}, {"lora_target_modules": None}),
        ({"dataloader_pin_memory": True}, {"dataloader_pin_memory": True}),
        ({"dtype": "float16", "bf16": False}, {"dtype": "float16", "bf16": False}),
    ],
)
def test_defaults_on_a_card_with_bf16(given: dict[str, Any], expected: dict[str, Any]) -> None:
    trl = {field.name: field.default for owner in TRL_TYPES for field in dataclasses.fields(owner)}
    different = command_line.differences(given, accelerator=True, bf16_supported=True)
    assert not {each.name for each in different} & given.keys(), "what the user set is no default of ours"
    values = trl | {"bf16": not given.get("fp16", False)} | {each.name: each.ours for each in different} | given
    assert {name: values[name] for name in expected} == expected
    assert all(each.trl != each.ours and each.reason for each in different)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")  # TRL's own default
def test_every_difference_from_trl_is_told(base: list[str]) -> None:
    """What TRL builds from the same command line differs from ours in the told flags only."""
    ours = read(*base)
    theirs = TrlParser(TRL_TYPES).parse_args_and_config([*base, "--use_cpu"])
    told = {each.name for each in ours.differences}
    parts = (ours.script, ours.training, ours.model, ours.mixture)
    for part, other in zip(parts, theirs, strict=True):
        for field in dataclasses.fields(part):
            if field.init and field.name not in told | {"accelerator_config"}:
                assert getattr(part, field.name) == getattr(other, field.name), field.name


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")  # TRL's own default
def test_the_printed_configuration_gives_the_same_job_to_us_and_to_trl(base: list[str], tmp_path: Path) -> None:
    extra = ["--eos_token", "<|im_end|>", "--eval_strategy", "steps", "--load_in_4bit", "--hub_token", "hf_secret"]
    first = read(*base, *extra, "--model_init_kwargs", '{"low_cpu_mem_usage": true}', "--verify", "sample")
    assert "hf_secret" not in first.to_yaml()
    assert first.resolved()["eos_token"] == "<|im_end|>"
    assert json.loads(json.dumps(first.resolved())) == first.resolved()
    recipe = tmp_path / "printed.yaml"
    recipe.write_text(first.to_yaml())
    assert read("--config", str(recipe)).resolved() == first.resolved()

    going_on = read(*base, "--adapter_name_or_path", "an-adapter")
    recipe.write_text(going_on.to_yaml())
    assert read("--config", str(recipe)).resolved() == going_on.resolved()

    own = {field.name for part in OUR_TYPES for field in dataclasses.fields(part)}
    recipe.write_text(yaml.safe_dump({k: v for k, v in yaml.safe_load(first.to_yaml()).items() if k not in own}))
    theirs = TrlParser(TRL_TYPES).parse_args_and_config(["--config", str(recipe)])
    parts = (first.script, first.training, first.model, first.mixture)
    for part, other in zip(parts, theirs, strict=True):
        for field in dataclasses.fields(part):
            if field.init and field.name not in {"accelerator_config", "hub_token"}:
                assert getattr(part, field.name) == getattr(other, field.name), field.name


def test_recipe_values_have_the_types_of_the_flags(base: list[str], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "learning_rate: 1e-4\nwarmup_steps: 5\neval_strategy: no\nreport_to: [none]\neos_token: '--x = y'\n"
        "lora_target_modules: [q_proj, v_proj]\nmodel_init_kwargs: {low_cpu_mem_usage: true}\nmax_length: null\n"
        "datasets:\n  - path: one\n    split: train[:5]\n  - {path: two}\nmax_steps: -1\n"
    )
    found = read(*base, "--config", str(recipe))
    assert (found.training.learning_rate, found.training.warmup_steps, found.training.max_steps) == (1e-4, 5, -1)
    assert found.training.eval_strategy == "no"
    assert found.training.report_to == []
    assert found.training.eos_token == "--x = y"
    assert found.training.max_length is None
    assert found.model.lora_target_modules == ["q_proj", "v_proj"]
    assert found.training.model_init_kwargs == {"low_cpu_mem_usage": True}
    assert [each.path for each in found.mixture.datasets] == ["one", "two"]
    assert found.mixture.datasets[0].split == "train[:5]"


def test_recipe_environment_yields_to_the_users_and_is_told(
    base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "mine")
    monkeypatch.setenv("NCCL_ALGO", "")
    monkeypatch.delenv("NCCL_ALGO")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("env: {NCCL_DEBUG: INFO, NCCL_ALGO: Ring}\n")
    read(*base, "--config", str(recipe))
    assert (os.environ["NCCL_DEBUG"], os.environ["NCCL_ALGO"]) == ("mine", "Ring")
    assert capsys.readouterr().out == f"# hf-rocm-tune: recipe {recipe} sets NCCL_ALGO=Ring\n"


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--learning_rat", "1e-4"], ["--learning_rat", "--learning_rate"]),
        (["--learn", "1"], ["--learn"]),
        (["--num_processes", "2"], ["--num_processes", "hf-rocm-tune sft"]),
        (["--learning_rate"], ["--learning_rate"]),
        (["--verify", "most"], ["--verify", "most", "sample"]),
        (["--load_in_4bit", "--load_in_8bit"], ["--load_in_4bit", "--load_in_8bit"]),
        (["--per_device_train_batch_size", "0", "--max_steps", "-3"], ["train_batch_size", "0", "max_steps", "-3"]),
        (["--eval_split_size", "1.5"], ["--eval_split_size", "1.5"]),
        (["--early_stopping_patience", "0"], ["--early_stopping_patience"]),
        (["--sample_every", "5"], ["--sample_every and --sample_prompts belong together"]),
        (
            ["--sample_every", "5", "--sample_prompts", "a", "b", "c", "--sample_images", "a.png", "b.png"],
            ["--sample_images: 2 pictures for 3 prompts"],
        ),
        (["--num_train_epochs", "inf"], ["--num_train_epochs must be more than 0, and finite, got inf"]),
        (["--eval_split_size", "inf"], ["--eval_split_size", "got inf"]),
        (["--pad_to_multiple_of", "0"], ["--pad_to_multiple_of must be 1 or more, or auto, got 0"]),
        (["--model_init_kwargs", "{broken"], []),
        (["--load_best_model_at_end"], ["--load_best_model_at_end"]),
        (["--fp16"], ["--fp16", "GPU"]),
        (["--accelerator_config", '{"even": true}'], ["even"]),
        (["--config"], ["--config"]),
        (["--config", "missing.yaml"], ["missing.yaml"]),
    ],
)
def test_wrong_flags_are_one_message_that_names_them(argv: list[str], named: list[str], base: list[str]) -> None:
    message = refused(*base, *argv)
    assert all(name in message for name in named), message


def test_everything_that_is_missing_is_named_at_once() -> None:
    message = refused("--output_dir", "x", "--lora_r", "0")
    assert all(name in message for name in ("--model_name_or_path", "--dataset_name", "--lora_r"))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("learning_rte: 1\nlora_rr: 2\n", ["learning_rte", "learning_rate", "lora_rr", "lora_r"]),
        ("learning_rate: [1, 2]\nmax_length: {a: 1}\n", ["--learning_rate", "--max_length"]),
        ("seed: null\n", ["--seed"]),
        ("use_peft: 7\n", ["--use_peft", "7"]),
        ("a: 1\nb: [\n", ["line 3"]),
        ("seed: 1\nseed: 2\n", ["line 2", "seed", "twice"]),
        ("- seed\n", ["mapping", "list"]),
        ("", ["mapping", "empty"]),
        ("env: [1]\n", ["env"]),
        ("env: {LD_PRELOAD: x.so, NCCL_DEBUG: INFO, HF_ENDPOINT: x}\n", ["not LD_PRELOAD, HF_ENDPOINT"]),
        ("num_processes: 2\n", ["num_processes", "launcher"]),
        ("lora_target_modules: [1, 2]\n", ["--lora_target_modules: expected a list of text, got 1"]),
    ],
)
def test_wrong_recipes_are_one_message_that_names_the_place(
    text: str, named: list[str], base: list[str], tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    message = refused(*base, "--config", str(recipe))
    assert all(name in message for name in [*named, "recipe.yaml"]), message


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("datasets:\n  - {path: one, pth: one}\n", "pth"),
        ("datasets: [{path: 5}]\n", "part 1: expected a path, and a fraction above 0 if any, got {'path': 5}"),
        ("datasets: [{path: F}, {path: G, fraction: x}]\n", "part 2: expected a path, and a fraction"),
        ("datasets: [5]\n", "part 1: expected a path"),
        ("datasets: [{path: F, fraction: .nan}]\n", "part 1: expected a path"),
        ("model_init_kwargs: x\n", "--model_init_kwargs must be a mapping"),
        ("gradient_checkpointing_kwargs: x\n", "--gradient_checkpointing_kwargs must be a mapping"),
        ("dataset_num_proc: -1\n", "--dataset_num_proc must be 0 or more"),
        ("neftune_noise_alpha: .nan\n", "--neftune_noise_alpha must be 0 or more, and finite, got nan"),
    ],
)
def test_wrong_values_of_a_recipe_are_one_message_that_names_them(
    text: str, named: str, base: list[str], tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    assert named in refused(*base, "--config", str(recipe))


def test_a_recipe_that_is_no_text_is_refused(base: list[str], tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert "binary" in refused(*base, "--config", str(tmp_path / "binary"))
    assert "cannot be read" in refused(*base, "--config", str(tmp_path))


def test_no_name_belongs_to_two() -> None:
    names = [field.name for owner in (*OUR_TYPES, *TRL_TYPES) for field in dataclasses.fields(owner) if field.init]
    assert len(names) == len(set(names))
