"""Runs the job of one rank; on rank 1 a frozen weight changes just before DistributedDataParallel wraps the model.

A stand-in for what the start-up broadcast would hide: had it reached the frozen weights, rank 0's copy would replace
the changed one and nobody would see that the ranks had differed.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from hf_rocm_tune import sft


def _change_a_frozen_weight_first() -> None:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    stock = DistributedDataParallel.__init__

    def changed(self: Any, module: torch.nn.Module, *arguments: Any, **keywords: Any) -> None:
        frozen = next(parameter for parameter in module.parameters() if not parameter.requires_grad)
        frozen.data.view(-1)[0] += 1
        stock(self, module, *arguments, **keywords)

    DistributedDataParallel.__init__ = changed  # type: ignore[method-assign]


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        _change_a_frozen_weight_first()
    sys.exit(sft.main())
