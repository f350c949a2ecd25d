"""Offloading that others do: TRL's of activations, bitsandbytes' paged and 8-bit optimizers.

What they move does not pass the mover. What can be compared afterwards is (the code tables of 8-bit optimizers); the
rest is named in the coverage, and `--verify full` then asks for consent like for a weight that was not verified:
a damaged activation becomes a damaged gradient, and nothing later would show it.

`adamw_8bit` and its like move nothing but those tables: their state is made and kept on the device.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from hf_rocm_tune.errors import CorruptionError, UsageError
from hf_rocm_tune.models.quantised import require_bitsandbytes
from hf_rocm_tune.transfer import digest

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from hf_rocm_tune.models.placement import Coverage


def check_offloads(args: TrainingArguments) -> None:
    """Refuse, before anything is loaded, what cannot work on this device.

    Raises:
        UsageError: activation offloading without an accelerator, or a bitsandbytes optimizer without its library.
    """
    if getattr(args, "activation_offloading", False) and args.device.type == "cpu":
        raise UsageError(
            "--activation_offloading moves activations from an accelerator to host memory, and this job runs on the "
            "CPU: leave it out"
        )
    if _of_bitsandbytes(args):
        require_bitsandbytes(args.device, f"--optim {_optimizer(args)}")


def with_offloads(found: Coverage, args: TrainingArguments) -> Coverage:
    """The coverage of a model, with what these settings send to the device past the mover."""
    rows = []
    if args.device.type != "cpu" and getattr(args, "activation_offloading", False):
        rows.append(
            {
                "tensor": "offloaded activations",
                "reason": "--activation_offloading: TRL copies them to host memory and back by itself",
            }
        )
    if args.device.type != "cpu" and _of_bitsandbytes(args) and "paged" in _optimizer(args):
        rows.append(
            {
                "tensor": "paged optimizer state",
                "reason": f"--optim {_optimizer(args)}: the driver moves its pages between host and device",
            }
        )
    return replace(found, unverified=[*found.unverified, *rows])


class OptimizerTablesCallback(TrainerCallback):
    """Compares the code tables of an 8-bit optimizer, once it has made them, with tables made on the host.

    bitsandbytes sends them to the device by itself at the first step. On resume they come through the mover.

    Raises:
        CorruptionError: a table on the device is not the one that was sent; its 8-bit state is useless.
    """

    def __init__(self) -> None:
        self._compared = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Compares after the first step of this process."""
        if self._compared:
            return
        self._compared = True
        optimizer = more["optimizer"]
        for name, table in getattr(getattr(optimizer, "optimizer", optimizer), "name2qmap", {}).items():
            functional = importlib.import_module("bitsandbytes.functional")
            expected = functional.create_dynamic_map(signed=name == "dynamic")
            if digest(table) != digest(expected.to(table.dtype)):
                raise CorruptionError(
                    f"the {name} code table of the 8-bit optimizer arrived wrong on the device, so its state decodes "
                    "to other values. Nothing was saved since: start the same command again; if it returns, run "
                    "`hf-rocm-tune drill`"
                )


def _optimizer(args: TrainingArguments) -> str:
    return str(getattr(args.optim, "value", args.optim))


def _of_bitsandbytes(args: TrainingArguments) -> bool:
    """By the names in transformers 5.23, ``trainer_optimizer.py``; torchao's and GaLore's 8-bit ones are others."""
    name = _optimizer(args)
    return name.startswith(("paged_", "ademamix", "lion", "rmsprop_bnb")) or name in ("adamw_bnb_8bit", "adamw_8bit")
