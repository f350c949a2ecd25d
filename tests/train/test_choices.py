"""A router that chooses other experts than the best is found in the first step, on a processor too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.train.arithmetic.attention import wrong_choice
from tests import tiny
from tests.train.trainers import Make


class OtherExperts(TorchDispatchMode):
    """Within the block some results of `topk` are the next experts' numbers."""

    def __init__(self, calls: range) -> None:
        super().__init__()
        self._calls, self.seen = calls, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.name() == "aten::topk":
            if self.seen in self._calls:
                result[1].add_(1).remainder_(args[0].shape[-1])
            self.seen += 1
        return result


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.build("qwen3_moe", tmp_path)


def test_a_router_that_never_chooses_the_best_ends_the_run(make: Make, model: Path) -> None:
    trainer = make(model=model, lora={"target_modules": ["q_proj"]}, max_steps=2)
    with OtherExperts(range(1000)), pytest.raises(CorruptionError, match=r"topk \(the choice of experts\)"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_choice_that_is_wrong_once_is_made_again(make: Make, model: Path) -> None:
    results = []
    for calls in (range(0), range(1)):
        trainer = make(model=model, lora={"target_modules": ["q_proj"]}, max_steps=2)
        with OtherExperts(calls):
            trainer.train()
        counted = trainer.transfer_report.to_dict()["arithmetic"]
        assert counted["disagreements"] == counted["recovered"] == len(calls) and counted["choices"] >= 2
        results.append([each.detach().clone() for each in trainer.model.parameters() if each.requires_grad])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("largest", [True, False])
def test_what_a_right_topk_gives_is_right(largest: bool) -> None:
    scores = torch.randint(-3, 3, (50, 8), generator=torch.Generator().manual_seed(1)).float()  # many are equal
    scores[3] = -torch.inf
    values, chosen = scores.topk(3, largest=largest)
    assert not wrong_choice(chosen, values, scores, -1, largest=largest)
    twice = chosen.clone()
    twice[7, 1] = twice[7, 0]
    assert wrong_choice(twice, scores.gather(-1, twice), scores, -1, largest=largest)
    assert wrong_choice(chosen, values + 1, scores, -1, largest=largest)
    worst = scores.topk(3, largest=not largest)
    assert wrong_choice(worst.indices, worst.values, scores, -1, largest=largest)
