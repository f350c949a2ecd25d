"""The accelerate configurations: they load, they launch what they say, and copying one overwrites nothing."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_rocm_tune import configs
from hf_rocm_tune.errors import UsageError

NAMES = [
    "cpu",
    "cpu_dual",
    "cpu_dual_fsdp2",
    "dual_rx7900xt",
    "dual_rx7900xt_fsdp2",
    "dual_rx7900xt_zero2",
    "multi_node",
    "single_rx7900xt",
]
PAIRS = [name for name in NAMES if "dual" in name or name == "multi_node"]

# What each process of a launched job finds; rank r contributes r + 1 to the sum.
WORKER = """
import json, sys, torch
from accelerate import Accelerator
state = Accelerator().state
value = torch.tensor([state.process_index + 1.0])
torch.distributed.all_reduce(value)
found = {"processes": state.num_processes, "device": state.device.type, "sum": value.item(),
         "precision": state.mixed_precision}
open(f"{sys.argv[1]}/rank{state.process_index}.json", "w").write(json.dumps(found))
torch.distributed.destroy_process_group()
"""


def launch_arguments(name: str) -> Any:
    """What accelerate's launcher makes of a configuration, without starting anything."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    parsed = launch_command_parser().parse_args(["--config_file", str(configs.path(name)), "script.py"])
    return _validate_launch_command(parsed)[0]


def test_all_are_listed_and_nothing_else() -> None:
    assert configs.CONFIGS.names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_accelerate_loads_the_file(name: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    loaded = load_config_from_file(str(configs.path(name)))
    assert loaded.num_processes == (2 if name in PAIRS else 1)
    assert loaded.mixed_precision == "no"


@pytest.mark.parametrize("name", NAMES)
def test_launcher_accepts_the_file_without_a_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        arguments = launch_arguments(name)
    assert not caplog.records, "the launcher had to guess a value that the file should give"
    assert arguments.num_processes == (2 if name in PAIRS else 1)
    ways = {"use_fsdp": "fsdp2" in name, "use_deepspeed": "zero2" in name}
    ways["multi_gpu"] = name in PAIRS and not any(ways.values())
    assert {way: bool(getattr(arguments, way)) for way in ways} == ways
    assert bool(arguments.use_cpu) == (name == "cpu")


@pytest.mark.parametrize("name", [name for name in NAMES if "fsdp2" in name])
def test_what_fsdp2_is_told_passes_our_own_refusals(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    from hf_rocm_tune.cards.fsdp import check_plugin
    from hf_rocm_tune.cards.way import is_on

    environment = prepare_multi_gpu_env(launch_arguments(name))
    assert is_on("ACCELERATE_USE_FSDP", environment)
    for variable, value in environment.items():
        if variable.startswith("FSDP_"):
            monkeypatch.setenv(variable, value)
    plugin = FullyShardedDataParallelPlugin()
    check_plugin(plugin)
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is True


def test_rehearsal_of_fsdp2_shards_as_the_cards_do() -> None:
    import yaml

    cpu, cards = (yaml.safe_load(configs.path(f"{where}_fsdp2").read_text()) for where in ("cpu_dual", "dual_rx7900xt"))
    assert cpu == cards


def test_zero2_without_deepspeed_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_rocm_tune import launch

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "deepspeed" else find(name))
    with pytest.raises(UsageError, match="needs DeepSpeed, which is not installed"):
        launch.launch("hf_rocm_tune.sft", [], accelerate_config="dual_rx7900xt_zero2", extra=[])


def test_zero2_moves_nothing_to_the_host_and_says_that_it_gains_nothing_for_lora() -> None:
    arguments = launch_arguments("dual_rx7900xt_zero2")
    assert (arguments.zero_stage, arguments.offload_optimizer_device, arguments.offload_param_device) == (
        2,
        "none",
        "none",
    )
    text = configs.path("dual_rx7900xt_zero2").read_text()
    assert "anything from it for LoRA" in text and "--consent_unverified" in text


def test_single_card_leaves_the_choice_of_the_card_to_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    _, environment = prepare_simple_launcher_cmd_env(launch_arguments("single_rx7900xt"))
    assert "CUDA_VISIBLE_DEVICES" not in environment, "the launcher would choose by index, an integrated GPU perhaps"
    assert environment["HIP_VISIBLE_DEVICES"] == "1"


@pytest.mark.parametrize("name", NAMES)
def test_opening_comment_says_what_for_what_it_needs_and_how_to_start(name: str) -> None:
    comment = [line for line in configs.path(name).read_text().split("\n\n")[0].splitlines() if line.startswith("#")]
    text = "\n".join(comment)
    for part in ("Needs:", "Start:", f"--config_file accelerate_configs/{name}.yaml", "Do not expect:"):
        assert part in text
    assert configs.CONFIGS.describe(name) == comment[0].removeprefix("# ")


def test_cpu_dual_is_two_processes_that_know_of_each_other(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(configs.path("cpu_dual"))]
    done = subprocess.run(
        [*command, str(worker), str(tmp_path)],
        env={**os.environ, "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("rank*.json"))]
    assert found == [{"processes": 2, "device": "cpu", "sum": 3.0, "precision": "no"}] * 2


@pytest.mark.parametrize(
    ("name", "nearest"), [("single_rx7900", "single_rx7900xt"), ("cpu_duel", "cpu_dual"), ("../cpu", "cpu")]
)
def test_unknown_name_gets_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean {nearest}\\?"):
        configs.path(name)


def test_name_may_carry_its_suffix() -> None:
    assert configs.path("cpu.yaml") == configs.path("cpu")


def test_copy_onto_itself_does_not_empty_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = configs.CONFIGS.copy("cpu", tmp_path)
    before = file.read_bytes()
    monkeypatch.setattr(configs, "_directory", lambda: tmp_path)
    assert configs.CONFIGS.copy("cpu", file, overwrite=True).read_bytes() == before


def test_copy_to_where_nothing_can_be_written_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write"):
        configs.CONFIGS.copy("cpu", tmp_path / "no such directory" / "cpu.yaml")
