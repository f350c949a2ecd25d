"""Commands start and end without the garbage collector, and planning without torch's compiler; nothing else changes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def _python(code: str, *words: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", code, *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False, env=environ)


def test_the_collector_rests_while_a_process_of_ours_imports() -> None:
    done = _python(_OURSELVES)
    assert done.stdout.strip() == "False\nTrue True", done.stderr


def test_planning_loads_no_compiler_and_collects_nothing_at_its_end() -> None:
    words = ["plan", "--model", "meta-llama/Llama-3.2-1B", "--seq", "64", "--vram", "20", "--desktop_gib", "0"]
    done = _python(_COMMAND, *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "compiler False frozen True"


def test_a_user_s_process_keeps_its_collector_as_it_was() -> None:
    done = _python(_TRAINING)
    assert done.stdout.splitlines()[-1] == "2 True False", done.stderr


def test_a_broken_bitsandbytes_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "bitsandbytes.py").write_text("raise OSError('libbitsandbytes.so: cannot open')\n")
    paths = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    done = _python(_COMMAND, "plan", "--model", "meta-llama/Llama-3.2-1B", environ={**os.environ, "PYTHONPATH": paths})
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert all(word in done.stderr for word in ("bitsandbytes", "install", "libbitsandbytes.so"))
