"""What is saved of a sharded model: the trained weights and the optimizer's state, brought together on rank 0.

Every rank digests its part on its device, brings it to the host, and sends it over gloo; rank 0 joins the parts and
compares the whole with the sum of the digests. Frozen weights stay where they are: they are not saved.

The result has the form that one process would save, so a checkpoint fits any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.models.shards import reshard, shard_digest
from hf_rocm_tune.ranks.agree import highest
from hf_rocm_tune.training.readback import host_copy
from hf_rocm_tune.transfer import Digest, Mover, combine, digest
from hf_rocm_tune.transfer.host_group import host_group

_BATCH_BYTES = 64 << 20


class WholeState:
    """Brings together, keeps for one save, and forgets.

    Args:
        model: sharded.
        mover: holds the settings.

    Attributes:
        optimizer: accelerate's wrapper of the optimizer; set when training begins.
    """

    def __init__(self, model: nn.Module, mover: Mover) -> None:
        self._model, self._mover = model, mover
        self.optimizer: Any = None
        self._kept_model: dict[str, Tensor] | None = None
        self._kept_optimizer: dict[str, Any] | None = None

    def model(self) -> dict[str, Tensor]:
        """Trained weights by name, whole, on rank 0's host; nothing on other ranks. Collective the first time.

        Raises:
            CorruptionError: on every rank, when a part did not come over right.
        """
        if self._kept_model is None:
            reshard(self._model)
            trained = {name: each.data for name, each in self._model.named_parameters() if each.requires_grad}
            self._kept_model = self._whole(trained)
        return self._kept_model

    def optimizer_state(self) -> dict[str, Any]:
        """As `model`, of the optimizer: the ``state_dict`` of a single process."""
        if self._kept_optimizer is None:
            state = self.optimizer.state_dict()
            wholes = self._whole(dict(_sharded(state)))
            self._kept_optimizer = _filled(state, wholes) if host_group().rank() == 0 else {}
        return self._kept_optimizer

    def forget(self) -> None:
        """The save is over: what was brought together is of no more use."""
        self._kept_model = self._kept_optimizer = None

    # ---- bringing together ----------------------------------------------------------------------------------

    def _whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        result: dict[str, Tensor] = {}
        bad: list[str] = []
        for names in _batches(tensors):
            mine = {name: self._on_host(tensors[name]) for name in names}
            parts = _gathered(mine)
            for name in names if parts else ():
                whole, right = _joined([each[name] for each in parts], tensors[name])
                result[name] = whole
                bad += [] if right else [name]
        if highest([len(bad)])[0] > 0:
            raise CorruptionError(
                f"parts of a tensor did not come together right{f' ({bad[0]} first)' if bad else ''}, so nothing was "
                "saved; checkpoints already written are intact: start the same command again to continue from the "
                "newest one"
            )
        return result

    def _on_host(self, tensor: Tensor) -> tuple[Tensor, str]:
        """This rank's part on the host, and the digest of the part on the device at its place in the whole."""
        part = tensor._local_tensor.detach() if isinstance(tensor, DTensor) else tensor.detach()
        found = shard_digest(tensor) if isinstance(tensor, DTensor) else digest(part)
        return host_copy(part), found.hex()  # one that stayed wrong is found on rank 0


def _gathered(mine: dict[str, tuple[Tensor, str]]) -> list[dict[str, tuple[Tensor, str]]]:
    """By rank what each has, on rank 0; nothing elsewhere. Collective, over gloo."""
    group = host_group()
    parts: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
    dist.gather_object(mine, parts, dst=0, group=group)
    return parts or []


def _joined(parts: list[tuple[Tensor, str]], like: Tensor) -> tuple[Tensor, bool]:
    if not isinstance(like, DTensor):
        whole, text = parts[0]
        return whole, digest(whole).hex() == text
    whole = torch.cat([part for part, _ in parts])
    return whole, digest(whole) == combine(Digest.from_hex(text) for _, text in parts)


def _batches(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Names, in order, by at most 64 MiB of tensors at a time, so that the host holds no second copy of everything."""
    batch: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        if batch and size + nbytes > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += nbytes
    if batch:
        yield batch


def _sharded(state: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every sharded tensor in nested dicts and lists, by its path."""
    if isinstance(state, DTensor):
        yield path, state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from _sharded(value, f"{path}/{key}")
    elif isinstance(state, list | tuple):
        for number, value in enumerate(state):
            yield from _sharded(value, f"{path}/{number}")


def _filled(state: Any, wholes: Mapping[str, Tensor], path: str = "") -> Any:
    """The same with whole tensors in the place of the sharded ones."""
    if isinstance(state, DTensor):
        return wholes[path]
    if isinstance(state, Mapping):
        return {key: _filled(value, wholes, f"{path}/{key}") for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_filled(value, wholes, f"{path}/{number}") for number, value in enumerate(state))
    return state
