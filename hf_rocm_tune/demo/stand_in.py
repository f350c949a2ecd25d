"""The model and the data of a notebook: the real ones, or small substitutes if those cannot be used.

The substitutes are used if torch sees no GPU (a billion parameters would take hours) or if the model is neither on this
disk nor on the Hub. This is decided in a child process: a notebook that starts training processes must not have
touched a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hf_rocm_tune.demo import assets, seeing
from hf_rocm_tune.errors import UsageError

#: Environment variable with a model to use instead of the notebook's, with or without a GPU; ``demo``: the small one.
VARIABLE = "HF_ROCM_TUNE_NOTEBOOK_MODEL"
DEMO = "demo"
RECIPE = assets.BaseRecipe(steps=120)


class NotebookModel(NamedTuple):
    """What a notebook trains: Hub ids or directories, and whether they are the small substitutes."""

    model: str
    data: str
    small: bool


def choose(
    model: str, data: str, *, folder: str | os.PathLike[str] = "notebook-runs", words: Sequence[str] = ()
) -> NotebookModel:
    """Choose the model and the data, and create the small ones if they are needed.

    ``words``: the texts of data with pictures; the small model then reads pictures, and ``data`` stays as it is.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted and wanted != DEMO:
        print(f"{VARIABLE} is set: {wanted} instead of {model}")
        return NotebookModel(wanted, data, False)
    command = [sys.executable, "-m", __name__, DEMO if wanted else model, str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UsageError(f"the small model could not be created: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    *lines, last = done.stdout.splitlines()
    print(*lines, sep="\n")
    where = json.loads(last)
    if not where:
        return NotebookModel(model, data, False)
    return NotebookModel(where["model"], where["data"] or data, True)


def _why_not(model: str) -> str | None:
    """Why a model cannot be trained here; None if it can."""
    import torch

    from hf_rocm_tune.models.factory import ModelSource, read_config

    if model == DEMO:
        return f"{VARIABLE}={DEMO}"
    if not torch.cuda.is_available():
        return f"torch sees no GPU here, so this is not {model}"
    try:
        read_config(ModelSource(name=model))
    except UsageError as error:
        return str(error)
    return None


def main() -> None:
    """Decide; print the reason and, as the last line, the paths of the small model and its data as JSON, or null."""
    model, folder, *words = sys.argv[1:]
    made = None
    reason = _why_not(model)
    if reason:
        what = "a small model with random weights stands in" if words else "a small model and its data stand in"
        print(f"{reason}: {what}, made on this machine")
        if words:
            print(json.dumps({"model": str(seeing.prepare(Path(folder) / "seeing", words)), "data": None}))
            return
        try:
            made = assets.prepare(Path(folder) / "assets", recipe=RECIPE, say=print)
        except UsageError as error:
            sys.exit(str(error))
    else:
        print(f"model: {model}")
    print(json.dumps(made and {"model": str(made.model), "data": str(made.data)}))


if __name__ == "__main__":
    main()
