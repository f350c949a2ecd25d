"""A buffer that its own module writes while it computes stays verified; one that something else changes does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from hf_rocm_tune import VerifiedTransferMixin
from hf_rocm_tune.errors import MemoryFaultError
from hf_rocm_tune.models.quantised import WRITTEN


class VerifiedPlain(VerifiedTransferMixin, Trainer):
    """In front of the plain trainer."""


class Counting(nn.Module):
    """Batch normalisation, a buffer that grows, one that is counted on in place, and one that is only read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 1)
        self.register_buffer("seen", torch.empty(0))
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.seen = torch.cat([self.seen, x[:, 0].detach()])
        self.steps += 1
        found = self.head(self.norm(x * self.scale)).squeeze(-1)
        return {"loss": ((found - labels) ** 2).mean(), "logits": found}


@pytest.fixture
def make(tmp_path: Any) -> Callable[[], Any]:
    """A trainer that saves after steps 2 and 4."""

    def build() -> Any:
        torch.manual_seed(1)
        rows = [{"x": torch.randn(4).tolist(), "labels": float(n)} for n in range(16)]
        options = {"save_steps": 2, "max_steps": 4, "per_device_train_batch_size": 4, "use_cpu": True}
        args = TrainingArguments(output_dir=str(tmp_path), report_to="none", disable_tqdm=True, **options)
        return VerifiedPlain(Counting(), args, train_dataset=Dataset.from_list(rows), sentinel_every=1)

    return build


def test_what_a_module_writes_to_its_own_buffers_is_saved_as_it_is(make: Callable[[], Any], tmp_path: Any) -> None:
    trainer = make()
    trainer.train()
    model = trainer.model
    assert (len(model.seen), model.steps.item(), model.norm.num_batches_tracked.item()) == (16, 4, 4)
    assert trainer.mover.reason(model.seen) == trainer.mover.reason(model.steps) == WRITTEN
    assert trainer.weight_coverage().complete
    resumed = make()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert torch.equal(resumed.model.seen, model.seen)


@pytest.mark.parametrize("name", ["seen", "steps", "scale"])
def test_a_change_from_outside_is_a_memory_fault(make: Callable[[], Any], name: str) -> None:
    trainer = make()
    trainer.train()
    getattr(trainer.model, name).view(-1)[0] += 1
    with pytest.raises(MemoryFaultError, match=name):
        trainer._save_checkpoint(trainer.model, trial=None)
