"""The census: nothing of the model or of a batch goes round the mover, from loading to a resumed run.

On a CPU every tensor is on "cpu", so "moved" is defined by storage and not by device. In a run of LoRA and of QLoRA
with an evaluation, and in the same run resumed in mid-epoch:

1. each tensor that reaches ``forward`` as an input has crossed through the mover and has its verdict;
2. no tensor reaches the guard in `_verified_inputs` unknown: the loaders have sent everything, the guard is idle;
3. each parameter, buffer and quantisation table is transferred or derived at every ``forward``;
4. no storage that is part of the model or of a batch came from a *move* outside the mover: ``to`` or ``cuda`` with a
   device that gave other memory, ``torch.tensor`` and its like with a device, or a ``copy_`` into it from memory that
   the mover does not know.

The code tables of 4-bit weights are made by bitsandbytes itself; on a card they pass the mover (`transfer.redirect`).
Each rule is shown to fail, or the run to stop, where one seam is given back to upstream.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

from hf_rocm_tune.errors import CorruptionError, MemoryFaultError
from hf_rocm_tune.models import recompute
from hf_rocm_tune.models.factory import ModelSource, load_model
from hf_rocm_tune.models.tensors import tensors_of
from hf_rocm_tune.train.trainer import VerifiedSFTTrainer
from hf_rocm_tune.transfer import Mover, tree_tensors
from tests import tiny

# PEFT 0.21 reads an attribute that transformers 5.23 renamed: https://github.com/huggingface/peft/pull/2817
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

MOVES = (Tensor.to, Tensor.cuda)
MAKERS = (torch.tensor, torch.as_tensor, torch.asarray)
INSIDE = "hf_rocm_tune/transfer/"


class Census(TorchFunctionMode):
    """Notes every move that happens outside the mover, and judges what reaches ``forward``.

    Attributes:
        found: what broke a rule, in words.
        forwards: how many calls of ``forward`` were judged.
        calls: how many watched calls were seen, moves or not.
    """

    def __init__(self, mover: Mover) -> None:
        super().__init__()
        self.mover = mover
        self.found: set[str] = set()
        self.forwards = self.calls = 0
        self._outside: dict[int, tuple[Tensor, str]] = {}  # the tensor is kept, so that its address stays its own

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is Tensor.copy_:
            self.calls += 1
            if self.mover.provenance(args[1]) is None and not _inside_mover():
                self._note(args[0], "copy_ from unknown memory")
        elif func in MOVES or func in MAKERS:
            self.calls += 1
            if _names_device(args[1:], kwargs) or func is Tensor.cuda:
                fresh = func in MAKERS or result.untyped_storage()._cdata != args[0].untyped_storage()._cdata
                if fresh and not _inside_mover():
                    self._note(result, func.__name__)
        return result

    def _note(self, tensor: Tensor, what: str) -> None:
        self._outside[tensor.untyped_storage()._cdata] = (tensor, what)

    def judge(self, model: nn.Module, inputs: Any) -> None:
        """Applies the rules to the model and to the inputs of one ``forward``."""
        self.forwards += 1
        for tensor in tree_tensors(inputs):
            if self.mover.is_pending(tensor) or self.mover.provenance(tensor) != "transferred":
                self.found.add("an input of forward has no verdict")
            self._judge_storage("an input of forward", tensor)
        for name, tensor in tensors_of(model):
            if not self.mover.was_verified(tensor):
                self.found.add(f"{name} did not come through the mover")
            if not name.endswith(".code"):  # see the module's description
                self._judge_storage(name, tensor)

    def _judge_storage(self, name: str, tensor: Tensor) -> None:
        known = self._outside.get(tensor.untyped_storage()._cdata)
        if known is not None:
            self.found.add(f"{name} was written by {known[1]} outside the mover")


def _inside_mover() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if INSIDE in frame.f_code.co_filename:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _names_device(arguments: Any, keywords: Any) -> bool:
    values = [*arguments, keywords.get("device")]
    return any(isinstance(value, (torch.device, str, Tensor)) for value in values)


@contextmanager
def counted(trainer: Any, census: Census) -> Iterator[None]:
    """Judges every ``forward`` of the trainer's model, and every batch that reaches its guard."""

    def before_forward(module: nn.Module, args: Any, kwargs: Any) -> None:
        census.judge(trainer.model, [args, {k: v for k, v in kwargs.items() if k in ("input_ids", "labels")}])

    guard = trainer._verified_inputs

    def prepare_inputs(inputs: Any) -> Any:
        if any(census.mover.provenance(tensor) is None for tensor in tree_tensors(inputs)):
            census.found.add("a batch reached the guard unknown to the mover")
        return guard(inputs)

    trainer._verified_inputs = prepare_inputs
    hook = trainer.model.register_forward_pre_hook(before_forward, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama on disk."""
    return tiny.build("llama3", tmp_path_factory.mktemp("models"))


@pytest.fixture
def run(model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Census]:
    """Loads, trains and evaluates under the census; with ``resume`` it continues from step 2 of the run before."""
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # the mode sees this thread only
    rows = Dataset.from_list([{"text": text[:80]} for text in tiny.training_text()[:16]])

    def go(trainer_class: Any = VerifiedSFTTrainer, *, four_bit: bool = False, resume: bool = False) -> Census:
        source = ModelSource(
            name=str(model_path),
            init={"dtype": torch.bfloat16 if four_bit else torch.float32},
            quantization=_nf4() if four_bit else None,
        )
        mover = Mover(torch.device("cpu"))
        with mover, Census(mover) as census:
            torch.manual_seed(3)
            trainer = trainer_class(
                model=load_model(source, mover)[0],
                args=_arguments(tmp_path / "out"),
                train_dataset=rows,
                eval_dataset=rows.select(range(5)),
                peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
                mover=mover,
            )
            with counted(trainer, census):
                trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2") if resume else None)
        assert census.calls > 100
        twice = trainer_class is VerifiedSFTTrainer  # in the third step a micro-batch is computed twice
        assert census.forwards == (5 if resume else 10 + twice)
        return census

    return go


def _nf4() -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def _arguments(output: Path) -> SFTConfig:
    return SFTConfig(
        output_dir=str(output),
        per_device_train_batch_size=2,
        max_length=32,
        max_steps=4,
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=2,
        report_to="none",
        use_cpu=True,
        bf16=False,
        **{recompute.SETTING: False},
        disable_tqdm=True,
    )


@pytest.mark.parametrize("four_bit", [False, True], ids=["lora", "qlora"])
def test_nothing_goes_round_the_mover(run: Callable[..., Census], four_bit: bool) -> None:
    assert run(four_bit=four_bit).found == set()
    assert run(four_bit=four_bit, resume=True).found == set()


class StockLoaders(VerifiedSFTTrainer):
    """Takes its loaders from upstream."""

    get_train_dataloader = SFTTrainer.get_train_dataloader
    get_eval_dataloader = SFTTrainer.get_eval_dataloader


class StockPlacement(VerifiedSFTTrainer):
    """Lets Accelerate place the model."""

    def create_accelerator_and_postprocess(self) -> None:
        """As upstream: `prepare_model` stays Accelerate's."""
        SFTTrainer.create_accelerator_and_postprocess(self)
        self.strategy.attach(self.accelerator, self.mover)

    def create_optimizer(self, *arguments: Any, **keywords: Any) -> Any:
        """Places it, as `prepare_model` does on a device that is not the model's."""
        self.accelerator.prepare_model(self.model, device_placement=True)
        self.model.to("cpu:0")
        return super().create_optimizer(*arguments, **keywords)


class StockResume(VerifiedSFTTrainer):
    """Reads the adapter back as upstream does."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        SFTTrainer._load_from_checkpoint(self, str(self._checkpoints.resumed), model)


def test_the_census_sees_loaders_that_send_nothing(run: Callable[..., Census]) -> None:
    assert "a batch reached the guard unknown to the mover" in run(StockLoaders).found


def test_a_model_that_accelerate_places_stops_the_run(run: Callable[..., Census]) -> None:
    with pytest.raises(CorruptionError, match="reached the device without passing the mover"):
        run(StockPlacement)


def test_an_adapter_that_is_read_back_by_upstream_stops_the_run(run: Callable[..., Census]) -> None:
    run()
    with pytest.raises(MemoryFaultError, match="between the load and the first step"):
        run(StockResume, resume=True)
