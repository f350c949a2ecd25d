"""The model and the data of a notebook: the real ones, or small ones that stand in where those cannot be had.

They stand in where torch sees no GPU (a billion parameters would take hours there) or where the model is neither on
this disk nor on the Hub. All of it happens in a process of its own: a notebook that is to start training processes must
not have touched a GPU, and is better off without the threads of a training run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from hf_rocm_tune.demo import assets
from hf_rocm_tune.errors import UsageError

#: Names a model in place of the notebook's, GPU or not; ``demo`` asks for the small one.
VARIABLE = "HF_ROCM_TUNE_NOTEBOOK_MODEL"
DEMO = "demo"
RECIPE = assets.BaseRecipe(steps=120)


class NotebookModel(NamedTuple):
    """What a notebook trains: Hub ids or directories, and whether the small ones stand in."""

    model: str
    data: str
    small: bool


def choose(model: str, data: str, *, folder: str | os.PathLike[str] = "notebook-runs") -> NotebookModel:
    """Choose, and make the small model where it is needed.

    Raises:
        UsageError: the small model could not be made.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted and wanted != DEMO:
        print(f"{VARIABLE} is set: {wanted} instead of {model}")
        return NotebookModel(wanted, data, False)
    command = [sys.executable, "-m", __name__, DEMO if wanted else model, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UsageError(f"the small model could not be made: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    *told, found = done.stdout.splitlines()
    print(*told, sep="\n")
    where = json.loads(found)
    return NotebookModel(where["model"], where["data"], True) if where else NotebookModel(model, data, False)


def _why_not(model: str) -> str | None:
    """Why a model cannot be trained here, or None where it can."""
    import torch

    from hf_rocm_tune.plan import load_config

    if model == DEMO:
        return f"{VARIABLE}={DEMO}"
    if not torch.cuda.is_available():
        return f"torch sees no GPU here, so this is not {model}"
    try:
        load_config(model)
    except UsageError as error:
        return str(error)
    return None


def main() -> int:
    """Decide, and print the reason and, as the last line, the paths of the small model and its data, or null."""
    model, folder = sys.argv[1:]
    reason = _why_not(model)
    if reason is None:
        print(f"model: {model}")
        print(json.dumps(None))
        return 0
    print(f"{reason}: a small model and its data stand in, made on this machine")
    try:
        made = assets.prepare(Path(folder) / "assets", recipe=RECIPE, say=print)
    except UsageError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(json.dumps({"model": str(made.model), "data": str(made.data)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
