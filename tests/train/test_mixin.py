"""Whatever trainer stands behind the mixin, nothing reaches `forward` without a verdict, and its numbers stay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    DefaultFlowCallback,
    Trainer,
    TrainingArguments,
    get_cosine_schedule_with_warmup,
)
from trl import SFTConfig, SFTTrainer

from hf_rocm_tune import was_verified
from hf_rocm_tune.errors import CorruptionError, MemoryFaultError, UsageError
from hf_rocm_tune.models import recompute
from hf_rocm_tune.models.trainer_parts import OwningTrainer
from hf_rocm_tune.train.telemetry import NotebookCallback
from hf_rocm_tune.transfer import FaultSpec, Mover, tree_tensors
from tests.train.trainers import Make, VerifiedPlain, VerifiedSFT

STEPS = 3


@pytest.fixture
def make(make: Make) -> Make:
    return lambda kind=VerifiedPlain, **options: make(
        kind, **{"per_device_eval_batch_size": 2, "max_steps": STEPS, **options}
    )


@contextmanager
def judged(trainer: Any) -> Iterator[list[bool]]:
    """Whether each tensor that reached a ``forward`` in the block had been verified."""
    verdicts: list[bool] = []

    def before_forward(module: nn.Module, args: Any, kwargs: Any) -> None:
        given = {name: value for name, value in kwargs.items() if name in ("input_ids", "labels", "attention_mask")}
        found = [was_verified(tensor) for tensor in tree_tensors([args, given])]
        assert found
        verdicts.extend(found)

    hook = trainer.model.register_forward_pre_hook(before_forward, with_kwargs=True)
    try:
        yield verdicts
    finally:
        hook.remove()


def losses(trainer: Any) -> list[float]:
    return [row[key] for row in trainer.state.log_history for key in ("loss", "grad_norm", "eval_loss") if key in row]


def test_a_trainer_has_all_that_its_parts_ask_of_it(make: Make) -> None:
    """Type checkers cannot tell: transformers' ``Trainer`` is of any type to them."""
    trainer = make(VerifiedPlain)
    methods = {name for name, value in vars(OwningTrainer).items() if callable(value) or isinstance(value, property)}
    asked = {*OwningTrainer.__annotations__, *methods} - {"__init__", "__subclasshook__"}
    asked -= {"current_gradient_accumulation_steps"}  # it has that while it trains
    assert {"args", "beat", "is_sharded", "_save"} <= asked
    assert [name for name in sorted(asked) if not hasattr(trainer, name)] == []


@pytest.mark.parametrize(("ours", "stock"), [(VerifiedPlain, Trainer), (VerifiedSFT, SFTTrainer)])
def test_every_batch_is_verified_before_forward_and_training_is_as_without(make: Make, ours: Any, stock: Any) -> None:
    verified = make(ours, eval_strategy="steps", eval_steps=2)
    with judged(verified) as verdicts:
        verified.train()
    assert all(verdicts)
    plain = make(stock, eval_strategy="steps", eval_steps=2)
    plain.train()
    assert losses(verified) == losses(plain)
    assert len(losses(verified)) >= 7
    assert verified.state.total_flos == plain.state.total_flos > 0
    adapters = [{n: p for n, p in t.model.named_parameters() if p.requires_grad} for t in (verified, plain)]
    assert all(torch.equal(adapters[0][name], tensor) for name, tensor in adapters[1].items())
    batches = verified.transfer_report.to_dict()["batches"]
    assert batches["bytes"] == batches["verified_bytes"] > 0


def test_predict_alone_sees_every_sample_once(make: Make, tokens: Dataset) -> None:
    verified, plain = make(VerifiedPlain), make(Trainer)
    with judged(verified) as verdicts:
        found, expected = (trainer.predict(tokens.select(range(7))) for trainer in (verified, plain))
    assert all(verdicts)
    assert len(found.label_ids) == 7
    assert (found.label_ids == expected.label_ids).all()
    assert (found.predictions == expected.predictions).all()
    assert found.metrics["test_loss"] == expected.metrics["test_loss"]


def test_a_first_step_that_is_left_out_does_not_stop_the_gradient_scaler(make: Make) -> None:
    trainer = make(VerifiedSFT, extra={"skip_steps": {1}})
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu")  # as --fp16 has one on a card
    trainer.train()
    assert trainer.state.global_step == trainer.args.max_steps > 0


def test_persistent_evaluation_loaders_stay_verified(make: Make) -> None:
    trainer = make(dataloader_num_workers=1, dataloader_persistent_workers=True)
    first = trainer.get_eval_dataloader()
    results = []
    with judged(trainer) as verdicts:
        for _ in range(2):
            results.append(trainer.evaluate()["eval_loss"])
    assert all(verdicts) and results[0] == results[1]
    assert trainer.get_eval_dataloader() is first, "its workers go on, and its batches cross ahead of their use"
    (loader,) = trainer._eval_dataloaders.values()
    loader.base_dataloader._iterator._shutdown_workers()  # a collected iterator waits 5 s for it


@pytest.mark.parametrize("schedule", ["own function", "transformers' other schedule"])
def test_a_schedule_that_is_handed_over_is_right_by_its_own_definition(make: Make, schedule: str) -> None:
    """Whatever the arguments say: they name the schedule that upstream would make."""
    trainer = make(learning_rate=1e-3, logging_steps=1)
    optimizer = torch.optim.AdamW([each for each in trainer.model.parameters() if each.requires_grad], lr=0.01)
    if schedule == "own function":
        scheduler = LambdaLR(optimizer, lambda step: 1.0 + step)
        rates = [0.01, 0.02, 0.03]
    else:
        scheduler = get_cosine_schedule_with_warmup(optimizer, 2, 10)
        rates = [0.0, 0.005, 0.01]
    handed = VerifiedPlain(
        trainer.model, trainer.args, train_dataset=trainer.train_dataset, optimizers=(optimizer, scheduler)
    )
    handed.train()
    assert [row["learning_rate"] for row in handed.state.log_history if "loss" in row] == pytest.approx(rates)

    stock = scheduler.step

    def step() -> None:
        stock()
        optimizer.param_groups[0]["lr"] *= 1.5

    scheduler.step = step  # type: ignore[method-assign]
    with pytest.raises(CorruptionError, match="learning rate of group 0"):
        handed.train()


def test_the_table_of_a_notebook_needs_no_shell(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make(logging_steps=1)
    trainer.add_callback(NotebookCallback(live=False, memory_gib=None))
    trainer.train()
    assert trainer.state.global_step == STEPS and "HTML object" in capsys.readouterr().out


def test_label_tokens_are_counted_as_upstream_counts_them_before_any_verdict(make: Make) -> None:
    trainer = make()
    iterator = iter(trainer.get_train_dataloader())
    window = [next(iterator) for _ in range(3)]
    # Two are on their way, the third is a host tensor until its turn.
    assert [trainer.mover.is_pending(batch["labels"]) for batch in window] == [True, True, False]
    count = trainer._count_items(window)
    window = [trainer._verified_inputs(batch) for batch in window]
    stock = Trainer._get_num_items_in_batch(trainer, window, trainer.args.device)
    assert int(count) == int(stock) == sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in window)
    assert trainer._count_items([]) is None
    unlabelled = [{"input_ids": batch["input_ids"]} for batch in window]
    assert trainer._count_items(unlabelled) is None


def test_tensors_that_the_loader_never_saw_are_verified_by_the_guard(make: Make) -> None:
    class Adding(VerifiedPlain):
        """Puts tensors of its own into the batch."""

        def training_step(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Tensor:
            """Adds a mask, as a custom trainer may."""
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            result: Tensor = super().training_step(model, inputs, *rest, **more)
            return result

    trainer = make(Adding)
    with judged(trainer) as verdicts:
        trainer.train()
    assert len(verdicts) == 3 * 6 and all(verdicts)


def test_the_norm_of_gradients_on_different_meshes_is_judged_too(make: Make) -> None:
    """Upstream clips them by a function of its own, not by Accelerate's."""
    trainer, judged = make(max_grad_norm=1e9), []
    trainer._mixed_mesh_grads = True
    judge = trainer._guard.judge

    def noting(model: Any, norm: Any, *more: Any, **how: Any) -> Any:
        judged.append(float(norm))
        return judge(model, norm, *more, **how)

    trainer._guard.judge = noting
    trainer.train()
    logged = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    assert len(judged) == len(logged) == 3 and judged == pytest.approx(logged)


def test_a_nested_batch_is_verified_to_its_leaves(make: Make) -> None:
    trainer = make()
    batch = {"a": [torch.ones(2), (torch.zeros(3), {"b": torch.arange(4)})], "text": "kept", "none": None}
    prepared = trainer._verified_inputs(batch)
    assert all(was_verified(tensor) for tensor in tree_tensors(prepared))
    assert (prepared["text"], prepared["none"]) == ("kept", None)


def test_a_batch_that_cannot_be_brought_over_never_reaches_forward(make: Make) -> None:
    spec = FaultSpec(kind="zero", stage="batches", tensor="labels", persist=True)
    with Mover(torch.device("cpu"), faults=spec) as mover:
        trainer = make(extra={"mover": mover})
        with judged(trainer) as verdicts, pytest.raises(CorruptionError, match="labels"):
            trainer.train()
    assert verdicts == []


def test_a_model_without_files_is_digested_where_it_lies_and_watched(make: Make, model_path: Path) -> None:
    config = AutoConfig.from_pretrained(model_path)
    config._name_or_path = ""
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = make(model=get_peft_model(AutoModelForCausalLM.from_config(config), lora))
    assert trainer.weight_coverage().complete
    assert "on this device nothing crosses" in str(trainer.weight_coverage().verified_by)
    with torch.no_grad():
        trainer.model.get_base_model().model.layers[0].mlp.up_proj.weight[3, 5] += 1  # after its digest, before step 1
    with pytest.raises(MemoryFaultError, match=r"layers\.0\.mlp\.up_proj"):
        trainer.train()


def test_accelerate_leaves_the_weights_where_the_mover_put_them(make: Make) -> None:
    trainer = make()
    before = {name: parameter.data_ptr() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    assert {name: parameter.data_ptr() for name, parameter in trainer.model.named_parameters()} == before


def test_a_trainer_trains_again_and_so_does_another_one_on_its_model(make: Make) -> None:
    trainer = make()
    trainer.train()
    trainer.train()
    another = make(model=trainer.model)
    another.train()
    assert trainer.weight_coverage().complete and another.weight_coverage().complete


def test_the_loader_pins_nothing_beside_the_mover_s_ring_and_the_user_s_arguments_stay(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make()
    given = TrainingArguments(str(tmp_path / "out"), use_cpu=True, report_to="none", enable_jit_checkpoint=True)
    given.dataloader_pin_memory = True  # on a CPU it is not the default
    again = VerifiedPlain(model=trainer.model, args=given, train_dataset=trainer.train_dataset)
    assert not again.args.dataloader_pin_memory and not again.args.enable_jit_checkpoint
    assert given.dataloader_pin_memory and given.enable_jit_checkpoint
    assert "enable_jit_checkpoint is set to False" in caplog.text


def test_a_model_by_name_that_the_trainer_quantises_is_covered(
    model_path: Path, tokens: Dataset, tmp_path: Path
) -> None:
    four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    settings = SFTConfig(
        output_dir=str(tmp_path / "out"),
        model_init_kwargs={"quantization_config": four_bit, "dtype": torch.float32},
        max_steps=1,
        report_to="none",
        use_cpu=True,
        bf16=False,
        **{recompute.SETTING: False},
    )
    adapter = LoraConfig(r=4, task_type="CAUSAL_LM")
    trainer = VerifiedSFT(model=str(model_path), args=settings, train_dataset=tokens, peft_config=adapter)
    assert trainer.weight_coverage().complete
    trainer.train()


def test_biases_that_bitsandbytes_casts_in_forward_stay_verified_and_watched(
    make: Make, model_path: Path, tmp_path: Path
) -> None:
    config = AutoConfig.from_pretrained(model_path, attention_bias=True)
    biased = tmp_path / "biased"
    AutoModelForCausalLM.from_config(config).save_pretrained(biased)
    four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(biased, dtype=torch.float32, quantization_config=four_bit)
    trainer = make(model=get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM")), save_strategy="steps")
    trainer.train()
    bias = model.model.layers[0].self_attn.o_proj.bias
    assert bias.dtype == torch.bfloat16
    assert trainer.mover.reason(bias) == "cast by bitsandbytes from a verified tensor"
    assert trainer.weight_coverage().complete
    bias.data[0] += 1
    with pytest.raises(MemoryFaultError, match=r"o_proj\.bias"):
        trainer._save_checkpoint(trainer.model, trial=None)


def test_a_training_whose_own_callbacks_were_taken_away_ends_in_one_line(make: Make) -> None:
    trainer = make()
    trainer.callback_handler.callbacks[:] = [DefaultFlowCallback()]
    with pytest.raises(UsageError, match="the callbacks that the trainer was made with are gone"):
        trainer.train()
