"""Training from a notebook on several cards, with Accelerate's ``notebook_launcher``.

    from accelerate import notebook_launcher
    from hf_rocm_tune import notebook

    notebook_launcher(notebook.train, args=(["--config", "qwen_8b_lora_dual"],), num_processes=2)

On ROCm the launcher starts its processes by spawn, so what it runs must be importable: a function that is defined in a
cell is not, this one is. Give all settings as flags, as to ``hf-rocm-tune sft``.

Set ``HF_ROCM_TUNE_SPLIT=1`` before the notebook imports ``hf_rocm_tune``: without it the notebook's process, and with
it all that it starts, is shown one card. Make no tensor on a GPU, no trainer and no ``Accelerator`` in the notebook
before: the launcher refuses then (accelerate 1.15, ``launchers.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from hf_rocm_tune import sft
from hf_rocm_tune.errors import TuneError


class TrainingFailed(TuneError):
    """The job of this process ended with an exit code other than 0.

    Attributes:
        exit_code: that code; `train` sets it.
    """


def train(argv: Sequence[str]) -> None:
    """Runs one training process with flags, as to ``hf-rocm-tune sft``; what ``notebook_launcher`` is given.

    Raises:
        TrainingFailed: the job did not end with 0. The launcher drops what a function returns, so a failure has to be
            raised to be seen.
    """
    code = sft.main(argv)
    if code:
        failure = TrainingFailed(f"the training job ended with exit code {code}; its own line is above")
        failure.exit_code = code  # an attribute of its own: pickle keeps it, whatever process this is raised in
        raise failure
