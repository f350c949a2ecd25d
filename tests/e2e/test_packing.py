"""Packed examples do not see each other on plain SDPA: each token's loss is that of its example trained alone.

transformers 5.23 derives the block-diagonal mask from `position_ids` when there is no attention mask and no cache
(`masking_utils._preprocess_mask_arguments`); FlashAttention is not needed. TRL passes `use_cache=False` to the model in
`compute_loss`, which is what this test calls: our trainer, real rows, the loss that is trained on, before any step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_rocm_tune.data.sources import load_source
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.models.factory import ModelSource, load_model, load_tokenizer
from hf_rocm_tune.settings import arguments as command_line
from hf_rocm_tune.train.trainer import VerifiedSFTTrainer
from hf_rocm_tune.transfer import Mover, TransferSettings
from tests import tiny
from tests.e2e.conftest import flags, sampled

SLIDING_WINDOW = 64  # of tiny's Gemma 3 and Mistral
LENGTH = 224
TOLERANCE = 1e-5

Example = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Losses:
    """What one pass over the rows gave: each example's token losses, and how many examples shared a sequence."""

    of: dict[Example, torch.Tensor]
    shared: int


@pytest.fixture
def losses_of(model_of: Callable[[str], Path], messages: Path, tmp_path: Path) -> Callable[..., Losses]:
    """Token losses of the training rows of a model, packed or one by one."""

    def measure(arch: str, *, packing: bool, isolated: bool = True) -> Losses:
        settings = command_line.parse(
            flags(
                model_name_or_path=model_of(arch),
                dataset_name=messages,
                output_dir=tmp_path / f"{arch}-{packing}",
                per_device_train_batch_size=2 if packing else 1,
                max_length=LENGTH,
                packing=packing,
                use_peft=False,  # a fresh adapter adds nothing
                disable_tqdm=True,
            )
        )
        with Mover(settings.training.device, settings=TransferSettings()) as mover:
            source = ModelSource(name=str(model_of(arch)))
            trainer = VerifiedSFTTrainer(
                model=load_model(source, mover)[0],
                args=settings.training,
                train_dataset=load_source(str(messages)).train,
                processing_class=load_tokenizer(source),
                mover=mover,
            )
            return _measure(trainer, isolated=isolated)

    return measure


def _measure(trainer: VerifiedSFTTrainer, *, isolated: bool) -> Losses:
    of: dict[Example, torch.Tensor] = {}
    sequences = 0
    outputs: list[Any] = []
    trainer.model.register_forward_hook(lambda _module, _arguments, output: outputs.append(output))
    for batch in trainer.get_train_dataloader():
        inputs = trainer._verified_inputs(batch)
        if not isolated:
            inputs["position_ids"] = torch.arange(inputs["input_ids"].shape[1])[None]
        with torch.no_grad():
            trainer.compute_loss(trainer.model, inputs)
        assert trainer.model.config._attn_implementation == "sdpa"
        tokens, losses = inputs["input_ids"][0], -outputs.pop().log_probs[0]
        starts = _starts(batch, len(tokens))
        sequences += 1
        for begin, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
            # the loss at a position is that of the token after it, and an example's first token has none
            of[tuple(tokens[begin:end].tolist())] = losses[begin : end - 1].clone()
    return Losses(of=of, shared=len(of) - sequences)


def _starts(batch: dict[str, Any], length: int) -> list[int]:
    if "cu_seq_lens_q" not in batch:
        return [0]
    return [begin for begin in batch["cu_seq_lens_q"].tolist() if begin < length]


def _largest_difference(packed: Losses, alone: Losses) -> float:
    assert packed.of.keys() == alone.of.keys()
    return max((losses - alone.of[example]).abs().max().item() for example, losses in packed.of.items())


ISOLATED = [arch for arch in tiny.ARCHITECTURES if arch != "gpt_oss"]


@pytest.mark.parametrize("arch", sampled(ISOLATED, "llama3", "gemma3", "qwen3_moe"))
def test_each_token_has_the_loss_that_it_has_alone(arch: str, losses_of: Callable[..., Losses]) -> None:
    packed, alone = losses_of(arch, packing=True), losses_of(arch, packing=False)
    assert packed.shared > len(packed.of) // 2 and alone.shared == 0
    assert max(len(example) for example in packed.of) > SLIDING_WINDOW + 8  # or a sliding window would not be met
    assert all(losses.gt(0).any() for losses in alone.of.values())
    assert _largest_difference(packed, alone) < TOLERANCE


def test_the_comparison_sees_examples_that_are_not_isolated(losses_of: Callable[..., Losses]) -> None:
    blurred = losses_of("llama3", packing=True, isolated=False)
    assert _largest_difference(blurred, losses_of("llama3", packing=False)) > 1000 * TOLERANCE


def test_a_model_whose_masks_ignore_where_an_example_begins_is_refused(losses_of: Callable[..., Losses]) -> None:
    with pytest.raises(
        UsageError, match=r"packed examples attend to each other in GptOssForCausalLM .* --packing false"
    ):
        losses_of("gpt_oss", packing=True)
