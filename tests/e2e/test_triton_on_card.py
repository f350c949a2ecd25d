"""A machine without Python's headers: Triton can be imported, and its driver does not compile at the first launch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.command import CommandServer
from tests.e2e.conftest import flags, report_of


@pytest.mark.parametrize(
    "one_pass",
    [pytest.param(False, id="fused head"), pytest.param(True, id="one-pass loss", marks=pytest.mark.long)],
)
def test_a_run_goes_on_without_triton_and_says_so_in_one_line(
    card_server: CommandServer, model_of: Callable[[str], Path], base_flags: list[str], tmp_path: Path, one_pass: bool
) -> None:
    job = [*flags(model_name_or_path=model_of("llama3"), one_pass_loss=one_pass), *base_flags]
    result = card_server.run(*job)
    assert result.code == 0, result.stderr[-2000:]
    (said,) = (line for line in result.stdout.splitlines() if "Triton" in line)
    assert "Triton cannot run a kernel: " in said and "CalledProcessError" in said and said.count("exit status 1") == 1
    assert report_of(tmp_path / "out")["digest"]["device"]["name"] == "torch"


def test_torch_compile_is_refused_with_the_reason(
    card_server: CommandServer, model_of: Callable[[str], Path], base_flags: list[str]
) -> None:
    result = card_server.run(*flags(model_name_or_path=model_of("llama3"), torch_compile=True), *base_flags)
    assert result.code == 2
    (line,) = result.error_lines
    assert line.startswith("hf-rocm-tune: error: --torch_compile needs Triton") and "exit status 1" in line
