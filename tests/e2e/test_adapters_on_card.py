"""Every PEFT method's fresh adapters reach the card through the engine, whichever class of PEFT places them.

The methods are PEFT's own list, so one that upstream adds is tried too. What crosses is counted by the simulated
card's driver, not by us.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

from tests import tiny
from tests.conftest import ROOT
from tests.e2e.adapters_on_card import VARIANTS
from tests.simcard import card

TYPES = [kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING]
SAMPLE = ["LORA", *VARIANTS, "UNILORA", "FROD", "LOHA", "TRAINABLE_TOKENS"]
REFUSED_UPSTREAM = {"ADAMSS", "ADAPTION_PROMPT", "XLORA"}
"""Want another package, another architecture, or a model without a cache."""
INDICES = {f"trainable_tokens/layer.py:TrainableTokensLayer.{name}" for name in ("update_layer", "get_merged_weights")}
"""Index the embedding with a few token numbers, which torch sends by itself."""


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(SAMPLE, id="sample"),
        pytest.param([name for name in TYPES if name not in SAMPLE], id="all", marks=pytest.mark.long),
    ],
)
def test_fresh_adapters_cross_through_the_engine_alone(names: list[str], tmp_path: Path) -> None:
    try:
        card.library()
    except card.NoCompiler as reason:
        pytest.skip(str(reason))
    model, log = tiny.build("qwen3_moe", tmp_path), tmp_path / "copies"
    environment = {**os.environ, "SIMCARD": "1", "SIMCARD_LOG": str(log)}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "simcard" / "boot")])
    command = [sys.executable, "-m", "tests.e2e.adapters_on_card", str(model), str(log), *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, Any]] = {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert list(found) == names
    if "flipped copy" in found:
        assert found.pop("flipped copy")["refused"].startswith("CorruptionError: the device's copy of")
    for name, row in found.items():
        assert ("refused" in row) == (name in REFUSED_UPSTREAM), row
        assert not row.get("unverified") and row.get("trainable") != 0, row
        assert set(row["stray"]) <= INDICES, row
