"""Memory logged beside the loss, and a fragmented cache given back between two steps, before a request fails.

Between steps is the safe point: gradients and activations are gone, so nearly all that is cached can be given back, and
whatever is requested next lies next to each other. On the CPU there is nothing to look at.

Settings against fragmentation are upstream's: ``--train_sampling_strategy group_by_length`` puts rows of like length
into a batch, ``--pad_to_multiple_of`` makes few shapes of many, ``--packing`` makes one.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from hf_rocm_tune.memory.fragmentation import Reading, Rule, read, reason_to_empty
from hf_rocm_tune.models.placement import release_memory

if TYPE_CHECKING:
    import torch
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from hf_rocm_tune.transfer import TransferReport

logger = logging.getLogger(__name__)

LOOK_EVERY = 10
"""Steps between two looks."""


class FragmentationCallback(TrainerCallback):
    """Looks at the allocator every few steps, and acts by the rule.

    Args:
        device: which is looked at.
        report: takes an incident each time the cache is given back.
        rule: when that is.
    """

    def __init__(self, device: torch.device, report: TransferReport, rule: Rule | None = None) -> None:
        self._device = device
        self._report = report
        self._rule = rule or Rule()
        self._earlier: Reading | None = None
        self._quiet_until = 0

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Between two steps."""
        if self._device.type != "cuda" or state.global_step % LOOK_EVERY:
            return
        now, earlier = read(self._device), self._earlier
        self._earlier = now
        reason = reason_to_empty(now, earlier, self._rule)
        if reason is None or state.global_step < self._quiet_until:
            return
        self._quiet_until = state.global_step + self._rule.pause
        release_memory()
        self._earlier = after = read(self._device)
        self._tell(state.global_step, reason, now, after)

    def _tell(self, step: int, reason: str, before: Reading, after: Reading) -> None:
        returned = before.reserved - after.reserved
        logger.warning(
            "step %d: the allocator's cache was given back (%s): %.1f GiB returned, %.1f GiB stay in blocks partly in "
            "use. Batches of like length (--train_sampling_strategy group_by_length) or of few shapes "
            "(--pad_to_multiple_of 64) fragment it less",
            step,
            reason,
            returned / 2**30,
            after.inactive_split / 2**30,
        )
        self._report.count("memory", cache_given_back=1)
        self._report.incident(
            {
                "step": step,
                "stage": "memory",
                "kind": "fragmented",
                "reason": reason,
                "returned_bytes": returned,
                "inactive_split_bytes": after.inactive_split,
                "outcome": "cache given back",
            }
        )
