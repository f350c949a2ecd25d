"""A QLoRA training through the real command line, its kernels executed as the machine code of a gfx1100: those of
bitsandbytes' own ROCm library, and Triton's through its own launcher."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import simcard
from tests.e2e.command import CommandServer
from tests.e2e.conftest import flags, losses_of, report_of
from tests.e2e.test_card_runs import ADAPTER, KILLED, Method, assert_covered, command_line, weights
from tests.gfx1100.hip import ran

QLORA = Method(settings={"load_in_4bit": True, "optim": "adamw_8bit"}, tolerance=1e-2)
KERNELS = {
    "kQuantizeBlockwise", "kQuantizeBlockwiseSmall", "kDequantizeBlockwise", "kOptimizer32bit2State",
    "_forward_kernel", "_backward_kernel",
}  # fmt: skip
"""Linear layers are quantised, their statistics too; Adam's small states stay in 32 bits; the last two are the loss."""


@pytest.fixture(scope="module")
def gfx_server(scratch: Path) -> Iterator[CommandServer]:
    """Runs commands on the simulated card, its kernels being gfx1100 machine code."""
    try:
        environment = simcard.environment(gfx1100=True)
    except simcard.NoCompiler as missing:
        pytest.skip(str(missing))
    started = CommandServer(scratch / "gfx1100", environment)
    yield started
    started.close()


@pytest.mark.parametrize("steps", [5, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.long
def test_qlora_trains_as_on_the_cpu_and_goes_on_after_a_kill(
    steps: int,
    gfx_server: CommandServer,
    server: CommandServer,
    model_of: Callable[[str], Path],
    messages: Path,
    tmp_path: Path,
) -> None:
    def run(by: CommandServer, name: str, expected: int = 0, **env: str) -> Path:
        output = tmp_path / name
        argv = [*command_line(QLORA, model_of("llama3"), messages, output), *flags(max_steps=steps)]
        done = by.run(*argv, env=env)
        assert done.code == expected, done.stderr[-3000:]
        return output

    log = tmp_path / "kernels"
    card, cpu = run(gfx_server, "card", SIMCARD_GFX1100_LOG=str(log)), run(server, "cpu")
    assert len(losses_of(card)) == steps
    assert losses_of(card) == pytest.approx(losses_of(cpu), rel=QLORA.tolerance)
    report = report_of(card)
    assert_covered(report)
    assert report["digest"]["device"]["name"] == "triton"
    assert (report["device"]["type"], report["device"]["arch"]) == ("hip", "gfx1100")
    kernels = Counter(re.sub(r"^_Z\d+([A-Za-z0-9]+?)I.*", r"\1", each.name) for each in ran(log))
    assert min(kernels[name] for name in KERNELS) >= steps and kernels["digest_kernel"] > steps, kernels
    run(gfx_server, "again", -9, **KILLED)
    assert not (tmp_path / "again" / ADAPTER).exists()
    again = run(gfx_server, "again", **KILLED)
    assert losses_of(again) == losses_of(card)
    assert weights(again) == weights(card)
