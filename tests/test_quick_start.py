"""Commands start and end without the garbage collector, and planning without torch's compiler; nothing else changes."""

from __future__ import annotations

import subprocess
import sys

import pytest

_OURSELVES = """
import gc
from hf_rocm_tune.sft import uncollected
try:
    with uncollected():
        print(gc.isenabled())
        import torch
        raise ZeroDivisionError
except ZeroDivisionError:
    print(gc.isenabled(), gc.get_freeze_count() > 100_000)
"""
_TRAINING = """
import gc
from hf_rocm_tune.sft import main
print(main(["--print_config"]), gc.isenabled(), gc.get_freeze_count() > 100_000)
"""
_COMMAND = """
import gc, sys
from hf_rocm_tune.cli import main
code = main(sys.argv[1:])
print("compiler", "torch._inductor.compile_fx" in sys.modules, "frozen", gc.get_freeze_count() > 100_000)
sys.exit(code)
"""


def _python(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", code, *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)


def test_the_collector_rests_while_a_process_of_ours_imports() -> None:
    done = _python(_OURSELVES)
    assert done.stdout.strip() == "False\nTrue True", done.stderr


def test_planning_loads_no_compiler_and_collects_nothing_at_its_end() -> None:
    words = ["plan", "--model", "meta-llama/Llama-3.2-1B", "--seq", "64", "--vram", "20", "--desktop_gib", "0"]
    done = _python(_COMMAND, *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "compiler False frozen True"


@pytest.mark.long
def test_a_user_s_process_keeps_its_collector_as_it_was() -> None:
    done = _python(_TRAINING)
    assert done.stdout.splitlines()[-1] == "2 True False", done.stderr
