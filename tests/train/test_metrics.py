"""What TRL logs is the same bit for bit although it is gathered and read only when it is logged."""

from __future__ import annotations

import copy
import math
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTTrainer

from hf_rocm_tune import VerifiedTransferMixin
from hf_rocm_tune.models import recompute
from tests import tiny
from tests.train.trainers import VerifiedSFT, build, two_ranks


class VerifiedDPO(VerifiedTransferMixin, DPOTrainer):
    """Preferences."""


class VerifiedReward(VerifiedTransferMixin, RewardTrainer):
    """A reward model."""


TEXTS = [text[: 40 + 3 * number] for number, text in enumerate(tiny.training_text()[:14])]
PAIRS = [{"prompt": text, "chosen": text[:9], "rejected": text[-5:]} for text in TEXTS]
OPTIONS: dict[str, Any] = {
    "max_steps": 5,
    "gradient_accumulation_steps": 3,
    "logging_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "per_device_eval_batch_size": 3,
}
KINDS: dict[str, tuple[Any, Any, Any]] = {
    "sft": (SFTTrainer, VerifiedSFT, None),
    "dpo": (DPOTrainer, VerifiedDPO, DPOConfig),
    "reward": (RewardTrainer, VerifiedReward, RewardConfig),
}


def trained(trainer: Any) -> list[dict[str, float]]:
    """The log without times and without what we add to it."""
    trainer.train()
    ours = ("runtime", "per_second", "seconds", "integrity/", "memory/")
    return [
        {name: value for name, value in row.items() if not any(part in name for part in ours)}
        for row in trainer.state.log_history
    ]


def both(kind: str, model: Path, out: Path, rows: Dataset, **options: Any) -> tuple[list[Any], list[Any]]:
    """The log of TRL's trainer and of ours."""
    *trainers, config = KINDS[kind]
    logs = []
    for trainer in trainers:
        loaded: Any = model
        if kind == "reward":
            options["lora"] = {"task_type": "SEQ_CLS"}
            torch.manual_seed(3)
            loaded = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
        ours = {"eval_dataset": rows.select(range(4))}
        logs.append(trained(build(trainer, loaded, rows, out, config=config, ours=ours, **{**OPTIONS, **options})))
    return logs[0], logs[1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_log_is_trls(kind: str, model_path: Path, tmp_path: Path) -> None:
    rows = Dataset.from_list([{"text": text} for text in TEXTS] if kind == "sft" else PAIRS)
    theirs, ours = both(kind, model_path, tmp_path / "out", rows)
    assert ours == theirs
    assert any("eval_num_tokens" in row for row in ours) and len(ours) == 5


ASKED: dict[str, Callable[[Any], Any]] = {
    "mod": lambda loss: loss % 0.7,
    "mod of a number": lambda loss: 7 % loss.item(),
    "floordiv of a number": lambda loss: 7 // loss,
    "divmod": lambda loss: divmod(loss.item(), 0.3)[1],
    "power": lambda loss: 2 ** (loss**2),
    "difference": lambda loss: 1 - loss.item() - 2,
    "product": lambda loss: 3 * loss * 2,
    "sign": lambda loss: -(+loss),
    "equal to itself": lambda loss: loss == loss.mean(),
    "unequal to a number": lambda loss: loss.item() != 0.0,
    "above": lambda loss: loss > 5,
    "below": lambda loss: 5 < 2 * loss.item(),  # noqa: SIM300
    "least": lambda loss: min(loss.item(), 0.1),
    "rounded": lambda loss: round(loss.item(), 2) + math.floor(loss.item()) + math.trunc(loss.item()),
    "as text": lambda loss: f"{loss.item():.3f}{loss.item()!s}"[:5],
    "bits": lambda loss: (loss > 5) & True,
    "rows": lambda loss: sum(loss.reshape(1)),
    "of one row": lambda loss: loss.reshape(1)[0],
    "among numbers": lambda loss: loss.item() in (0.0, 1.0),
    "function": lambda loss: torch.clamp(loss, max=0.2),
    "method": lambda loss: loss.clamp(max=0.2),
}


def test_what_another_version_of_trl_may_ask_of_a_metric_is_answered_as_upstream_would(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = SFTTrainer.compute_loss

    def of_another_version(self: Any, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        found = stock(self, model, inputs, *rest, **more)
        loss = found[0] if isinstance(found, tuple) else found
        for name, ask in ASKED.items():
            gathered = self.accelerator.gather_for_metrics(loss.detach()).mean()
            self._metrics["train" if self.model.training else "eval"][name].append(float(ask(gathered)))
        return found

    monkeypatch.setattr(SFTTrainer, "compute_loss", of_another_version)
    theirs, ours = both("sft", model_path, tmp_path / "out", Dataset.from_list([{"text": text} for text in TEXTS[:6]]))
    assert ours == theirs
    assert set(ASKED) <= set(ours[0])


def test_a_reference_leaves_the_choice_of_layers_and_the_embeddings_alone(model_path: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {recompute.SETTING: True, "max_steps": 2, "ours": {"recompute_layers": (1, 0)}}
    trainer = build(VerifiedDPO, model_path, Dataset.from_list(PAIRS), tmp_path / "out", config=DPOConfig, **options)
    trainer.train()
    model = trainer.model.get_base_model()
    assert [layer.gradient_checkpointing for layer in model.model.layers] == [True, False]
    assert len(model.get_input_embeddings()._forward_hooks) <= 2, "PEFT's and transformers', not one a micro-step"


SEED = 3


class Harmed:
    """Adds to the loss of one micro-step what has no gradient."""

    bad = 0.0
    micro_steps = 0

    def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
        """As upstream, and more in the fifth, after a log."""
        self.micro_steps += 1
        return super().compute_loss(*arguments, **keywords) + (self.bad if self.micro_steps == 5 else 0)  # type: ignore[misc]


class HarmedStock(Harmed, SFTTrainer):
    """TRL's."""


class HarmedOurs(Harmed, VerifiedSFT):
    """Ours."""


class HarmedAgain(HarmedOurs):
    """Ours, with the arguments of an earlier trainer, as after a rollback."""

    def __init__(self, *, model: Any, args: Any, **more: Any) -> None:
        earlier = VerifiedSFT(model=copy.deepcopy(model), args=args, **more)
        torch.manual_seed(SEED)
        super().__init__(model=model, args=earlier.args, **more)


@pytest.mark.parametrize(("bad", "filtered"), [(float("nan"), True), (float("inf"), False)])
def test_a_loss_that_is_not_finite_is_logged_as_upstream_does(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: float, filtered: bool
) -> None:
    monkeypatch.setattr(Harmed, "bad", bad)
    rows = Dataset.from_list([{"text": text} for text in TEXTS])
    options = {"max_steps": 2, "gradient_accumulation_steps": 3, "logging_nan_inf_filter": filtered}
    logs = []
    for kind in (HarmedStock, HarmedOurs, HarmedAgain):
        torch.manual_seed(SEED)  # TRL below 1.15 draws the adapter before it sets its seed
        logs.append(trained(build(kind, model_path, rows, tmp_path / "out", **options)))
    theirs, ours, again = ([row["loss"] for row in log if "loss" in row] for log in logs)
    assert len(ours) == 2 and repr(ours) == repr(again) == repr(theirs)


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_the_log_of_two_ranks_is_trls_with_one_collective_a_log(model_path: Path, tmp_path: Path) -> None:
    two_ranks(lambda _: _compare(model_path, tmp_path), tmp_path)


def _compare(model: Path, tmp_path: Path) -> None:
    rows = Dataset.from_list([{"text": text} for text in TEXTS[:13]])  # the last batch has fewer rows than ranks need
    counts: list[Counter[str]] = []
    for name in ("all_gather", "all_gather_into_tensor"):
        setattr(torch.distributed, name, _counted(getattr(torch.distributed, name), counts))
    options = {"gradient_accumulation_steps": 2, "num_train_epochs": 2, "max_steps": -1}
    logs = []
    for number, trainer in enumerate(KINDS["sft"][:2]):
        counts.append(Counter())
        out = tmp_path / f"out-{number}-{os.environ['RANK']}"
        logs.append(trained(build(trainer, model, rows, out, **{**OPTIONS, "eval_strategy": "no", **options})))
    assert logs[0] == logs[1], logs
    logged = sum("loss" in row for row in logs[1])
    stock, ours = (count["metrics"] for count in counts)
    at_once = stock // 2  # the second of an epoch's two steps has the batch of which rows are cut
    assert stock >= 2 * 4 * logged and ours <= at_once + logged + 1, (stock, ours, logged)


def _counted(gather: Callable[..., Any], counts: list[Counter[str]]) -> Callable[..., Any]:
    def counting(*arguments: Any, **keywords: Any) -> Any:
        caller = sys._getframe(1).f_code.co_name
        counts[-1]["metrics" if caller == "_gpu_gather_one" else caller] += 1
        return gather(*arguments, **keywords)

    return counting
