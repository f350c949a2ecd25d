"""Do all ranks hold the same bits?

Each rank takes the digest of its own tensors; the digests are compared over gloo, which stages through the host, so
the comparison does not run over the path between cards that is suspect.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch.distributed as dist

from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.transfer import QueuedDigests
from hf_rocm_tune.transfer.host_group import host_group

if TYPE_CHECKING:
    from torch import Tensor

_NAMED = 5


def compare_replicas(tensors: Iterable[tuple[str, Tensor]], when: str) -> int:
    """Compares the digests of these tensors over all ranks. Collective: every rank must call it.

    Args:
        tensors: name and tensor, the same names on every rank.
        when: for the message, such as "before DistributedDataParallel".

    Returns:
        How many tensors were compared; 0 when there is one rank.

    Raises:
        CorruptionError: on every rank, naming the tensors and the ranks that hold other bits than rank 0.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return 0
    rows = list(tensors)
    digests = QueuedDigests([tensor.detach() for _, tensor in rows]).result()
    mine = {name: found.hex() for (name, _), found in zip(rows, digests, strict=True)}
    everyone: list[dict[str, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine, group=host_group())
    first = everyone[0] or {}
    differing: dict[str, list[int]] = {}
    for rank, theirs in enumerate(everyone):
        theirs = theirs or {}
        for name in sorted(first.keys() | theirs.keys()):
            if first.get(name) != theirs.get(name):
                differing.setdefault(name, []).append(rank)
    if differing:
        named = ", ".join(f"{name} (ranks {ranks})" for name, ranks in list(differing.items())[:_NAMED])
        more = f" and {len(differing) - _NAMED} more" if len(differing) > _NAMED else ""
        raise CorruptionError(
            f"{when}: ranks hold other bits than rank 0 in {named}{more}: nothing more is trained on them"
        )
    return len(mine)
