"""Training from a notebook on several cards, with Accelerate's ``notebook_launcher``.

    from accelerate import notebook_launcher
    from hf_rocm_tune import notebook

    notebook_launcher(notebook.train, args=(["--config", "qwen_8b_lora_dual"],), num_processes=2)

On ROCm the launcher spawns its processes, so the function must be importable: one defined in a cell is not, this one
is. Give all settings as flags, as to ``hf-rocm-tune sft``.

Set ``HF_ROCM_TUNE_SPLIT=1`` before the notebook imports ``hf_rocm_tune``: otherwise the notebook and the processes that
it starts see one card. Create no GPU tensor, trainer or ``Accelerator`` in the notebook before: the launcher would
refuse (accelerate 1.15, ``launchers.py``).
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
    """Runs one training process with flags, as to ``hf-rocm-tune sft``; the function to give to ``notebook_launcher``.

    Raises:
        TrainingFailed: the job did not end with 0. The launcher discards return values, so a failure is raised.
    """
    code = sft.main(argv)
    if code:
        failure = TrainingFailed(f"the training job ended with exit code {code}; its own line is above")
        failure.exit_code = code  # on the instance: pickle keeps it between processes
        raise failure
