"""A command that only works something out leaves out the garbage collector and torch's compiler, and nothing else."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_rocm_tune.short_process import short_process

_PLAN_AND_LIST = """
import gc, sys
from hf_rocm_tune.cli import main
code = main(sys.argv[1:])
print("compiler", "torch._inductor.compile_fx" in sys.modules, "frozen", gc.get_freeze_count() > 100_000)
sys.exit(code)
"""


@pytest.mark.parametrize("before", [None, "0", "1"])
def test_what_was_set_is_set_again(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    if before is not None:
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", before)

    @short_process()
    def fail() -> None:
        assert (gc.isenabled(), os.environ["TORCHDYNAMO_DISABLE"]) == (False, "1")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (gc.isenabled(), os.environ.get("TORCHDYNAMO_DISABLE")) == (True, before)


def test_planning_loads_no_compiler_and_collects_nothing_at_the_end() -> None:
    words = ["plan", "--model", "meta-llama/Llama-3.2-1B", "--seq", "64", "--vram", "20", "--desktop_gib", "0"]
    done = subprocess.run(
        [sys.executable, "-c", _PLAN_AND_LIST, *words], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "compiler False frozen True"


def test_a_broken_bitsandbytes_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "bitsandbytes.py").write_text("raise OSError('libbitsandbytes.so: cannot open')\n")
    paths = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-m", "hf_rocm_tune", "plan", "--model", "meta-llama/Llama-3.2-1B"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "bitsandbytes" in done.stderr and "install" in done.stderr and "libbitsandbytes.so" in done.stderr
