"""What optimizers keep and take, by the names that ``--optim`` has.

Sources: torch 2.13 ``optim/adam.py`` (states in the parameter's dtype; the foreach form, which a GPU gets, takes one
more copy of the parameters while it steps; the loop of the CPU three of one parameter; the fused form none);
bitsandbytes 0.50.2 ``optim/optimizer.py`` (8-bit states with a float32 constant for 256 elements; tensors below 4096
elements keep float32; 32-bit states are float32 whatever the parameter; paged states live in managed memory, which the
driver moves between host and card) and ``backends/cpu/ops.py`` (there an 8-bit step works on float32 copies of one
parameter, its gradient and its states, and two of what it writes; measured with AdamW).

Not covered: other optimizers. How paged states behave on RDNA3 was not tried; they are counted as host memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from hf_rocm_tune.errors import UsageError

_SMALLEST_8_BIT = 4096
_BLOCK_8_BIT = 256


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Tensors of one size that are trained.

    Args:
        elements: of one tensor.
        itemsize: bytes of an element, and of an element of its gradient.
        count: how many such tensors.
    """

    elements: int
    itemsize: int
    count: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self.elements * self.itemsize * self.count


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An optimizer's memory.

    Args:
        states: values kept for each parameter.
        bits: of a value; 0 for the parameter's own dtype.
        paged: kept in managed memory.
        copies: of all trained parameters that a step takes while it runs.
        copies_of_one: of the largest of them instead, where they are stepped one by one.
        floats_of_one: the same in float32, whatever the parameter.
    """

    states: int
    bits: int = 0
    paged: bool = False
    copies: float = 0.0
    copies_of_one: float = 0.0
    floats_of_one: int = 0

    def kept(self, trained: Iterable[Trained]) -> int:
        """Bytes of state, wherever it lives."""
        return sum(self._state(tensor) * tensor.count for tensor in trained)

    def taken(self, trained: Iterable[Trained]) -> float:
        """Bytes that a step takes on the card while it runs."""
        tensors = tuple(trained)
        largest = max((tensor.elements * tensor.itemsize for tensor in tensors), default=0)
        floats = max((4 * tensor.elements for tensor in tensors), default=0)
        of_one = self.copies_of_one * largest + self.floats_of_one * floats
        return self.copies * sum(tensor.nbytes for tensor in tensors) + of_one

    def _state(self, tensor: Trained) -> int:
        if self.bits == 0:
            return self.states * tensor.elements * tensor.itemsize
        if self.bits == 8 and tensor.elements >= _SMALLEST_8_BIT:
            return self.states * (tensor.elements + 4 * -(-tensor.elements // _BLOCK_8_BIT))
        return self.states * tensor.elements * 4


OPTIMIZERS: dict[str, Optimizer] = {
    "adamw_torch_fused": Optimizer(states=2),
    "adamw_torch": Optimizer(states=2, copies=1.0),
    "adamw_8bit": Optimizer(states=2, bits=8),
    "adamw_bnb_8bit": Optimizer(states=2, bits=8),
    "paged_adamw_8bit": Optimizer(states=2, bits=8, paged=True),
    "paged_adamw_32bit": Optimizer(states=2, bits=32, paged=True),
    "lion_8bit": Optimizer(states=1, bits=8),
    "lion_32bit": Optimizer(states=1, bits=32),
    "sgd": Optimizer(states=0),
}
DEFAULT = "adamw_torch_fused"


def optimizer(name: str, *, on_cpu: bool = False) -> Optimizer:
    """The optimizer of a name.

    Args:
        name: as ``--optim`` has it.
        on_cpu: there torch and bitsandbytes step one parameter after the other.

    Raises:
        UsageError: its memory is not known here.
    """
    if name not in OPTIMIZERS:
        raise UsageError(f"--optim {name} is not known to the planner; it knows {', '.join(OPTIMIZERS)}")
    found = OPTIMIZERS[name]
    if not on_cpu:
        return found
    return replace(
        found, copies=0.0, copies_of_one=3 * found.copies, floats_of_one=found.states + 4 if found.bits == 8 else 0
    )
