"""Trainings through the real command line in which every product of matrices is AMD's own code: rocBLAS's kernels and
hipBLASLt's, executed as a gfx1100 would, beside bitsandbytes' and Triton's. Skipped where they were not fetched."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import simcard
from tests.e2e.command import CommandServer, Result
from tests.e2e.conftest import flags, losses_of, report_of
from tests.e2e.test_card_runs import ADAPTER, Method, assert_covered, command_line, weights
from tests.gfx1100 import rocm_libs
from tests.gfx1100.hip import ran

METHODS = {
    "lora": Method(settings={"bf16": True, "optim": "adamw_torch"}, tolerance=1e-2),
    "qlora": Method(settings={"load_in_4bit": True, "optim": "adamw_8bit"}, tolerance=1e-2),
}
CHECKED = {"check_arithmetic": "every"}


@pytest.fixture(scope="module")
def amd_server(scratch: Path) -> Iterator[CommandServer]:
    """Runs commands on the simulated card, with AMD's libraries for its products."""
    try:
        environment = {**simcard.environment(gfx1100=True), **rocm_libs.environment()}
    except (simcard.NoCompiler, rocm_libs.Missing) as missing:
        pytest.skip(str(missing))
    started = CommandServer(scratch / "amd", environment, rocm_libs.command)
    yield started
    started.close()


Run = Callable[..., tuple[Path, Result]]


@pytest.fixture
def run(
    amd_server: CommandServer, server: CommandServer, model_of: Callable[[str], Path], messages: Path, tmp_path: Path
) -> Run:
    """Trains a small Llama; its directory and what the command said."""

    def trained(
        method: str, name: str, *, steps: int, code: int = 0, cpu: bool = False, **env: str
    ) -> tuple[Path, Result]:
        output = tmp_path / name
        argv = command_line(METHODS[method], model_of("llama3"), messages, output)
        by = server if cpu else amd_server
        started = by.start(*argv, *flags(max_steps=steps, **CHECKED), env=env)
        done = started.wait(3000)
        assert done.code == code, done.stderr[-3000:]
        return output, done

    return trained


def kernels(log: Path) -> Counter[str]:
    """How often each kind of kernel ran: of AMD's libraries, and the others by name."""
    return Counter(
        "product" if each.name.startswith("Cijk_") else re.sub(r"^_Z\d+([A-Za-z0-9]+?)I.*", r"\1", each.name)
        for each in ran(log)
    )


pytestmark = pytest.mark.long  # minutes each; `tests/gfx1100/test_amd_blas.py` is the sample


@pytest.mark.parametrize(("method", "steps"), [("lora", 2), ("qlora", 2), ("lora", 20), ("qlora", 20)])
def test_a_training_whose_products_are_amds_is_that_of_the_cpu(
    method: str, steps: int, run: Run, tmp_path: Path
) -> None:
    """Losses, coverage, and no false alarm of the checks of every product."""
    log = tmp_path / "kernels"
    card, _ = run(method, "card", steps=steps, SIMCARD_GFX1100_LOG=str(log))
    cpu, _ = run(method, "cpu", steps=steps, cpu=True)
    assert len(losses_of(card)) == steps
    assert losses_of(card) == pytest.approx(losses_of(cpu), rel=METHODS[method].tolerance)
    report = report_of(card)
    assert_covered(report)
    assert report["arithmetic"]["checked"] > 0 and report["arithmetic"]["disagreements"] == 0, report["arithmetic"]
    found = kernels(log)
    assert found["product"] > 20 * steps and found["digest_kernel"] > steps, found
    if method == "qlora":
        assert min(found["kQuantizeBlockwise"], found["kDequantizeBlockwise"]) > 0, found
    print(method, steps, losses_of(card), losses_of(cpu), report["arithmetic"], found)


def test_a_training_goes_on_after_a_kill_where_it_was(run: Run) -> None:
    """Products in bfloat16 have no sums in changing order: the adapter is bit for bit that of an uninterrupted run."""
    whole, _ = run("lora", "whole", steps=3)
    killed = {"HF_ROCM_TUNE_CRASH": "step=2,kind=kill"}
    again, _ = run("lora", "again", steps=3, code=-9, **killed)
    assert not (again / ADAPTER).exists()
    again, _ = run("lora", "again", steps=3, **killed)
    assert losses_of(again) == losses_of(whole)
    assert weights(again) == weights(whole)


MUTANTS = {"rocBLAS": "^Cijk_Alik_Bljk_BBS_BH_MT=v_wmma=3", "both": "^Cijk_Alik_Bljk_BBS_BH=v_wmma=3"}
"""One matrix instruction less, in the kernels of forward products."""


@pytest.mark.parametrize("wrong", MUTANTS)
def test_what_a_kernel_without_one_matrix_instruction_computes_is_not_used(wrong: str, run: Run) -> None:
    """What one library computes wrong is left to the other; what both do ends the run before its first update."""
    mutants = {"SIMCARD_GFX1100_MUTANTS": MUTANTS[wrong]}
    if wrong == "both":
        output, said = run("lora", wrong, steps=2, code=3, **mutants)
        (line,) = said.error_lines
        assert "step 1: the forward product of" in line and "is wrong" in line, line
        assert not (output / ADAPTER).exists()
        return
    output, said = run("lora", wrong, steps=2, **mutants)
    found = report_of(output)["arithmetic"]
    assert found["disagreements"] == found["recovered"] > 0 and found["library"] == "hipBLASLt", found
    assert "rocBLAS computes it wrong" in said.stderr or "hipBLASLt is used from now on" in said.stderr, said.stderr
    print(said.stderr[-1500:], found, losses_of(output))
