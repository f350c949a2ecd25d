"""A process that is to split a model sees all discrete cards, decided before torch is imported."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hf_rocm_tune.settings.recipes import asks_for_split

# Two cards and the processor's own GPU, as the kernel's driver lists them.
PROGRAM = """
import json, os, sys
import hf_rocm_tune
from hf_rocm_tune.settings import start as split_start
from hf_rocm_tune.machine import gpus
assert "torch" not in sys.modules
node = lambda index, arch, gib: gpus.GpuNode(
    **{name: None for name in gpus.GpuNode.__dataclass_fields__}
    | dict(index=index, arch=arch, vram_bytes=gib << 30, has_cpu=False)
)
nodes = (node(0, "gfx1036", 1), node(1, "gfx1100", 20), node(2, "gfx1100", 20))
topology = gpus.Topology(nodes=nodes, reasons=(), complete=True)
from hf_rocm_tune.machine import variables
gpus.read_topology = lambda: topology
split_start.variables.read_facts = lambda *_: type("Facts", (), {"is_rocm": True})
variables = json.loads(sys.argv[1])
for given in sys.argv[2:]:
    split_start.show_all_cards(given.split(), variables)
print(json.dumps(variables))
"""


def shown(variables: dict[str, str], *command_lines: str) -> dict[str, str]:
    """The variables after a start, without our mark."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(variables), *command_lines],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return {name: value for name, value in found.items() if name != "HF_ROCM_TUNE_VISIBLE_SET"}


def test_all_discrete_cards_are_seen_instead_of_one() -> None:
    narrowed = {"HIP_VISIBLE_DEVICES": "1", "HF_ROCM_TUNE_VISIBLE_SET": "HIP_VISIBLE_DEVICES=1"}
    split = {"HIP_VISIBLE_DEVICES": "1,2", "HF_ROCM_TUNE_SPLIT": "1"}
    assert shown(narrowed, "--split_layers auto") == split
    assert shown(narrowed, "--split_layers auto", "--split-layers=18") == split


def test_a_job_that_splits_nothing_and_a_users_own_filter_stay() -> None:
    assert shown({"HIP_VISIBLE_DEVICES": "2"}, "--max_steps 3") == {"HIP_VISIBLE_DEVICES": "2"}
    users = shown({"HIP_VISIBLE_DEVICES": "2"}, "--split_layers 18")
    assert users == {"HIP_VISIBLE_DEVICES": "2", "HF_ROCM_TUNE_SPLIT": "1"}


@pytest.mark.parametrize(
    ("argv", "asked"),
    [
        (["--split_layers", "18"], True),
        (["--config", "qwen_14b_lora_split"], True),
        (["--config", "llama_1b_lora"], False),
    ],
)
def test_asked_by_flag_or_by_recipe(argv: list[str], asked: bool) -> None:
    assert asks_for_split(argv) == asked
