"""One training in several ways: by one process, by two that average their gradients, split over devices.

All ways take the same samples in the same steps: Accelerate deals batches out in turn, so the two batches of B rows of
a step on two processes are together the one batch of 2B rows of that step on one process. The data suffices for one
epoch, since at the end of an epoch two processes may repeat a row.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests import tiny
from tests.e2e.command import CommandServer, Result
from tests.e2e.conftest import flags
from tests.two_ranks import environments

STEPS = 50


@dataclass(frozen=True, kw_only=True)
class Way:
    """How the model is trained.

    Args:
        ranks: processes.
        flags: of the command.
        four_bit: further ones where the model has 4-bit weights.
        env: further variables of each process.
    """

    ranks: int
    flags: dict[str, Any] = field(default_factory=dict)
    four_bit: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


ONE = Way(ranks=1)
WAYS: dict[str, Way] = {
    "ddp": Way(ranks=2, flags={"grad_sync": "ddp"}),
    "host": Way(ranks=2, flags={"grad_sync": "host"}),
    "fsdp2": Way(
        ranks=2,
        four_bit={"bnb_4bit_quant_storage": "float32"},  # FSDP2 shards floats of the dtype of the training only
        env={
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "2",
            "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        },
    ),
    "split": Way(ranks=1, flags={"split_layers": "auto"}),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained: ``lora`` or ``qlora``, micro-batches to a step, and whether rows are packed."""

    method: str
    accumulation: int
    packing: bool

    def __str__(self) -> str:
        return f"{self.method}, accumulation {self.accumulation}, {'packed' if self.packing else 'padded'}"


CASES = [
    Case(method=method, accumulation=accumulation, packing=packing)
    for method in ("lora", "qlora")
    for accumulation in (1, 2)
    for packing in (False, True)
]


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


def train(
    server: CommandServer, model_of: Callable[[str], Path], case: Case, way: Way, *, data: Path, output: Path
) -> Trajectory:
    """Runs one way to its end.

    Args:
        server: starts the processes.
        model_of: directory of a model by architecture.
        case, way: see above.
        data: directory that `rows` filled.
        output: directory of the run.
    """
    settings = {
        "model_name_or_path": model_of("llama3"),
        "dataset_name": data,
        "output_dir": output,
        "max_steps": STEPS,
        "per_device_train_batch_size": 2 // way.ranks,
        "gradient_accumulation_steps": case.accumulation,
        "packing": case.packing,
        "max_length": 160 if case.packing else 64,
        "load_in_4bit": case.method == "qlora",
        "learning_rate": 0.002,
        "lora_dropout": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        **way.flags,
        **(way.four_bit if case.method == "qlora" else {}),
    }
    results = _together(server, flags(**settings), way, output)
    for result in results:
        assert result.code == 0, result.stderr[-3000:]
    history = json.loads((output / "training_log.json").read_text())["log"]
    rows = [row for row in history if "loss" in row]
    assert len(rows) == STEPS
    return Trajectory(
        losses=[row["loss"] for row in rows],
        norms=[row["grad_norm"] for row in rows],
        adapter=load_file(output / "adapter_model.safetensors"),
    )


def rows(folder: Path) -> Path:
    """Data for one epoch of every case: packed rows hold several of them."""
    return tiny.write_dataset_dir(folder, train=4 * STEPS * 6, test=4)


def _together(server: CommandServer, argv: list[str], way: Way, output: Path) -> list[Result]:
    if way.ranks == 1:
        return [server.run(*argv, env=way.env)]
    ranks = environments(output.with_suffix(".exit.json"), [way.env] * way.ranks)
    return [each.wait() for each in [server.start(*argv, env=rank) for rank in ranks]]


def _relative(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours, theirs, strict=True))
