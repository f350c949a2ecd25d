"""What a model's own code raises in the first step is one line; an error of a device, of ours or of later is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.train.arithmetic.attention import WatchedChoices
from hf_rocm_tune.train.refusals import first_step_as_usage_error

CODE = "transformers.models.doge.modeling_doge"
WRITES = "a leaf Variable that requires grad is being used in an in-place operation."


def train(trainer: Any, error: Exception, module: str, step: int) -> None:
    """Comes to a step, and to a function of a module that raises."""
    space: dict[str, Any] = {"__name__": module, "error": error}
    exec("def call():\n    raise error", space)
    with first_step_as_usage_error(trainer):
        trainer.state.global_step = step
        space["call"]()


@pytest.mark.parametrize(
    ("error", "module", "step", "said"),
    [
        (IndexError("tuple index out of range"), CODE, 0, "IndexError: tuple"),
        (RuntimeError(WRITES), "transformers_modules.theirs", 0, "give --gradient_checkpointing false"),
        (RuntimeError("expected scalar type Float but found BFloat16"), CODE, 0, "give --bf16 true"),
        (
            RuntimeError("Input type (float) and bias type (c10::BFloat16) should be the same"),
            CODE,
            0,
            "give --bf16 true",
        ),
        (
            RuntimeError("m1 and m2 to have the same dtype, but got: float != c10::BFloat16"),
            CODE,
            0,
            "give --bf16 true",
        ),
        (
            ValueError(
                "If training, sequence length 96 has to be a multiple of least common multiple chunk_length 64."
            ),
            CODE,
            0,
            "give --pad_to_multiple_of 64",
        ),
        (RuntimeError("The size of tensor a (5) must match"), "trl.kernels.chunked_logprob", 0, "TRL's loss fails"),
        (
            RuntimeError("element 0 of tensors does not require grad and does not have a grad_fn"),
            "torch.autograd",
            0,
            "its loss depends on no weight that is trained",
        ),
        (RuntimeError("HIP error: an illegal memory access"), CODE, 0, None),
        (IndexError("tuple index out of range"), CODE, 3, None),
        (IndexError("tuple index out of range"), "hf_rocm_tune.transfer.mover", 0, None),
    ],
)
def test_only_the_models_code_in_the_first_step_is_the_models(
    error: Exception, module: str, step: int, said: str | None
) -> None:
    args = SimpleNamespace(activation_checkpointing=True, gradient_checkpointing=True, bf16=False, fp16=False)
    trainer: Any = SimpleNamespace(state=SimpleNamespace(global_step=0), model=object(), args=args)
    with pytest.raises(UsageError if said else type(error)) as caught:
        train(trainer, error, module, step)
    assert said is None or said in str(caught.value)


def test_an_operation_that_passes_a_mode_of_ours_is_the_models_all_the_same() -> None:
    """The choices of experts are watched by such a mode: it stands between the model and each operation that raises."""
    trainer: Any = SimpleNamespace(
        state=SimpleNamespace(global_step=0), model=object(), args=SimpleNamespace(bf16=True)
    )
    space: dict[str, Any] = {"__name__": CODE, "torch": torch}
    exec("def call():\n    torch.cat([torch.ones(1, 2), torch.ones(2, 3)])", space)
    with (
        pytest.raises(UsageError, match=r"its own code fails in the first step with RuntimeError: Sizes"),
        first_step_as_usage_error(trainer),
        WatchedChoices(lambda _: None),
    ):
        space["call"]()
