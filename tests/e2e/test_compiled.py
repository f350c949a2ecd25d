"""``--torch_compile`` trains as without it, every byte verified; kernels that cannot run are refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import CommandServer
from tests.e2e.conftest import flags, losses_of, report_of


@pytest.mark.long
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_layers_train_as_those_that_are_not(
    server: CommandServer, model_of: Callable[[str], Path], base_flags: list[str], tmp_path: Path, checkpointing: bool
) -> None:
    settings: dict[str, Any] = {"model_name_or_path": model_of("llama3"), "logging_steps": 1, "lora_dropout": 0.0}
    settings |= {"gradient_checkpointing": checkpointing, "save_strategy": "steps", "save_steps": 4}
    for name, more in (("plain", {}), ("compiled", {"torch_compile": True})):
        result = server.run(*base_flags, *flags(**settings, **more, output_dir=tmp_path / name))
        assert result.code == 0, result.stderr[-3000:]
    assert losses_of(tmp_path / "compiled") == pytest.approx(losses_of(tmp_path / "plain"), rel=1e-5)
    report = report_of(tmp_path / "compiled")
    assert report["coverage"]["verified_bytes"] == report["coverage"]["device_bytes"] > 0
    assert report["coverage"]["unverified"] == []
