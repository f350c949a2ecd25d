"""However the work is shared out, the training is the same: losses, gradient norms and adapter over 50 steps.

All of it is `long`: the normal suite has DDP and FSDP2 (`test_ranks`), splits (`test_split`). What
differs between ways is the order of float sums, how far a batch is padded, and the dtype in which adapters of a 4-bit
model are averaged.

All ways take the same samples in the same steps: Accelerate deals batches out in turn, so the two batches of B rows of
a step on two processes are together the one batch of 2B rows of that step on one process. The data suffices for one
epoch, since at the end of an epoch two processes may repeat a row.

``KEEP_TRAJECTORIES=FILE`` keeps what was seen, a JSON object a line; see ``benchmarks/results``.
"""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.conftest import ADAPTER, Job, MakeJob, done
from tests.e2e.test_ranks import FSDP2

STEPS = 50
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ddp": (2, {"grad_sync": "ddp"}),
    "host": (2, {"grad_sync": "host"}),
    "fsdp2": (2, {}),
    "split": (1, {"split_layers": "auto"}),
}
"""Processes, and flags."""
METHODS: dict[str, dict[str, Any]] = {"lora": {}, "qlora": {"load_in_4bit": True}}
TOLERANCES = {
    "lora": {"loss": 1e-5, "grad_norm": 1e-4, "adapter": 1e-3},
    "qlora": {"loss": 3e-4, "grad_norm": 6e-2, "adapter": 5e-2},
}
"""See `Trajectory.away_from`. TRL trains the adapters of 4-bit models in bfloat16, which has 8 bits: an average of two
gradients is rounded otherwise than a gradient of two rows, and a norm of such is known to 0.4 % only.
"""


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """Losses and gradient norms by step, and the adapter at the end."""

    losses: list[float]
    norms: list[float]
    adapter: dict[str, torch.Tensor]

    def away_from(self, other: Trajectory) -> dict[str, float]:
        """The largest relative difference of a loss and of a gradient norm, and of all adapter tensors together the
        norm of the difference over the norm.
        """
        assert self.adapter.keys() == other.adapter.keys()
        apart = [(tensor.double() - other.adapter[name].double()).norm() for name, tensor in self.adapter.items()]
        whole = [tensor.double().norm() for tensor in other.adapter.values()]
        return {
            "loss": _relative(self.losses, other.losses),
            "grad_norm": _relative(self.norms, other.norms),
            "adapter": float(torch.stack(apart).norm() / torch.stack(whole).norm()),
        }


def _relative(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours, theirs, strict=True))


@pytest.fixture(scope="module")
def job(make_job: MakeJob) -> Job:
    """With rows for one epoch of every case: packed rows hold several of them."""
    plain = {"max_steps": STEPS, "learning_rate": 0.002, "lora_dropout": 0.0, "save_strategy": "no"}
    return make_job("trajectories", train=4 * STEPS * 6, **plain)


def train(job: Job, way: str, method: str, accumulation: int, packing: bool) -> Trajectory:
    """Runs one way to its end, once."""
    ranks, given = WAYS[way]
    output = job.root / "-".join([way, method, str(accumulation), str(packing)])
    if not output.exists():
        settings = {"per_device_train_batch_size": 2 // ranks, "gradient_accumulation_steps": accumulation}
        settings |= {"packing": packing, "max_length": 160 if packing else 64, **METHODS[method], **given}
        if (way, method) == ("fsdp2", "qlora"):
            settings["bnb_4bit_quant_storage"] = "float32"  # it shards floats of the dtype of the training only
        env = FSDP2 if way == "fsdp2" else {}
        for each in [job.run(output, **settings)] if ranks == 1 else job.ranks(output, each=[env, env], **settings):
            done(each)
    rows = [row for row in json.loads((output / "training_log.json").read_text())["log"] if "loss" in row]
    assert len(rows) == STEPS
    return Trajectory(
        losses=[row["loss"] for row in rows],
        norms=[row["grad_norm"] for row in rows],
        adapter=load_file(output / ADAPTER),
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "accumulation", "packing", "way"),
    [*itertools.product(METHODS, (1, 2), (False, True), list(WAYS)[1:])],
)
def test_the_way_does_not_change_the_training(
    job: Job, method: str, accumulation: int, packing: bool, way: str
) -> None:
    reference = train(job, "one", method, accumulation, packing)
    assert reference.losses[0] - reference.losses[-1] > 0.1  # a frozen trajectory would agree as well
    away = train(job, way, method, accumulation, packing).away_from(reference)
    if file := os.environ.get("KEEP_TRAJECTORIES"):
        case = f"{method}, accumulation {accumulation}, {'packed' if packing else 'padded'}"
        with open(file, "a", encoding="utf-8") as kept:
            kept.write(json.dumps({"case": case, "way": way, "steps": len(reference.losses), **away}) + "\n")
    assert all(away[what] <= limit for what, limit in TOLERANCES[method].items()), away
