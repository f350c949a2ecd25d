"""The accelerate configurations: they load, they launch what they say, and copying one overwrites nothing."""

from __future__ import annotations

import importlib.util
import logging
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


def launch_arguments(name: str) -> Any:
    """What accelerate's launcher makes of a configuration, without starting anything."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    parsed = launch_command_parser().parse_args(["--config_file", str(configs.path(name)), "script.py"])
    return _validate_launch_command(parsed)[0]


def test_all_are_listed_and_nothing_else() -> None:
    assert configs.CONFIGS.names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_launcher_accepts_the_file_without_a_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        arguments = launch_arguments(name)
    assert not caplog.records, "the launcher had to guess a value that the file should give"
    assert arguments.num_processes == (2 if name in PAIRS else 1) and arguments.mixed_precision == "no"
    ways = {"use_fsdp": "fsdp2" in name, "use_deepspeed": "zero2" in name}
    ways["multi_gpu"] = name in PAIRS and not any(ways.values())
    assert {way: bool(getattr(arguments, way)) for way in ways} == ways
    assert bool(arguments.use_cpu) == (name == "cpu")


@pytest.mark.parametrize("name", [name for name in NAMES if "fsdp2" in name])
def test_what_fsdp2_is_told_passes_our_own_refusals(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    from hf_rocm_tune.cards.fsdp import check_plugin
    from hf_rocm_tune.cards.strategy import is_on

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
    from hf_rocm_tune.lifecycle import launch

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "deepspeed" else find(name))
    with pytest.raises(UsageError, match="needs DeepSpeed, which is not installed"):
        launch.launch("hf_rocm_tune.sft", [], accelerate_config="dual_rx7900xt_zero2", extra=[])


def test_zero2_moves_nothing_to_the_host() -> None:
    arguments = launch_arguments("dual_rx7900xt_zero2")
    found = (arguments.zero_stage, arguments.offload_optimizer_device, arguments.offload_param_device)
    assert found == (2, "none", "none")


def test_single_card_leaves_the_choice_of_the_card_to_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    _, environment = prepare_simple_launcher_cmd_env(launch_arguments("single_rx7900xt"))
    assert "CUDA_VISIBLE_DEVICES" not in environment, "the launcher would choose by index, an integrated GPU perhaps"
    assert environment["HIP_VISIBLE_DEVICES"] == "1"


@pytest.mark.parametrize(
    ("name", "nearest"), [("single_rx7900", "single_rx7900xt"), ("cpu_duel", "cpu_dual"), ("../cpu", "cpu")]
)
def test_unknown_name_gets_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean {nearest}\\?"):
        configs.path(name)
