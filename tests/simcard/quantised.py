"""In place of ``bitsandbytes.backends.cuda.ops``: for a simulated card there is no native library.

bitsandbytes itself then takes its plain-torch operators (``backends.default``), and for 8-bit optimizers those of
``backends.cpu``, which are plain torch too. Tables that native kernels have built in are made on the card.
"""

from __future__ import annotations

from functools import cache

import torch
from bitsandbytes._ops import register_kernel
from bitsandbytes.backends.cpu import ops as cpu
from bitsandbytes.backends.default import ops as default
from torch import Tensor

register_kernel("bitsandbytes::optimizer_update_8bit_blockwise", "cuda")(cpu._optimizer_update_8bit_blockwise_cpu)


@cache
def _table(quant_type: str, device: torch.device) -> Tensor:
    from bitsandbytes.functional import get_4bit_type

    values = get_4bit_type(quant_type, device="cpu").tolist()
    return torch.stack([torch.full((), value, device=device) for value in values])


default._get_4bit_code = _table
