"""A model sharded over the ranks, by FSDP2 or for tensor parallelism, every byte of every shard verified.

Accelerate's ``fsdp2_prepare_model`` decides what is gathered together; its broadcast of every weight from rank 0 is
replaced: each rank reads the files itself and sends **only its own rows** through the mover. Then the digests of all
ranks' parts, taken on their devices, must add up to the digest of the whole as it was read (of 4-bit weights, which
are made on the device, as they were there before). Not covered: 4-bit weights stored as integers (refused before).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from hf_rocm_tune import upstream
from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.host_group import host_group
from hf_rocm_tune.models.placement import place, tensors_of
from hf_rocm_tune.models.shards import TENSOR_PARALLEL, as_shard, is_sharded, local, own_part, part_of, shard_digest
from hf_rocm_tune.transfer import Digest, Mover, combine, digest

CUT = "cut on the device from a verified tensor"


def shard(model: nn.Module, accelerator: Any, mover: Mover) -> None:
    """Shards a model in place. Collective; it may be called once."""
    _Fsdp2(model, mover, accelerator).run()


def cut(model: nn.Module, mesh: DeviceMesh, mover: Mover, dims: Mapping[str, int | None]) -> None:
    """Cuts weights of a model in place and brings the rest to the device whole. Collective; it may be called once."""
    _TensorParallel(model, mover, mesh, dims).run()


class _Sharding(ABC):
    def __init__(self, model: nn.Module, mover: Mover) -> None:
        self._model, self._mover = model, mover
        self._quantised = bool(getattr(model, "is_loaded_in_4bit", False))
        self._trainable = {name for name, each in model.named_parameters() if each.requires_grad}
        self._wholes: dict[str, Digest] = {}
        self._sources: dict[str, Tensor] = {}  # this rank's rows on the host, to send them again

    def run(self) -> None:
        verified = self._mover.settings.verify != "off"
        place(self._model, self._mover, parameters=self._quantised)
        buffers = {name: digest(buffer) for name, buffer in self._model.named_buffers()} if verified else {}
        if self._quantised and verified:
            self._remember(self._model.named_parameters())
        self._prepare()
        if verified:
            self._make_right()
            self._mark(buffers)
        self._sources.clear()

    @abstractmethod
    def _prepare(self) -> None:
        """Shard the parameters."""

    def _send(self, name: str) -> Tensor:
        stage = "adapter" if name in self._trainable else "weights"
        return self._mover.move(self._sources[name], name=name, stage=stage)

    def _remember(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Digests of whole tensors, each by two ranks: what one has read wrong is held against the view of another."""
        group = host_group()
        mine = {
            name: digest(tensor.detach()).hex()
            for number, (name, tensor) in enumerate(tensors)
            if (group.rank() - number) % group.size() < 2
        }
        for theirs in _told(mine):
            for name, text in theirs.items():
                if self._wholes.setdefault(name, Digest.from_hex(text)) != Digest.from_hex(text):
                    raise CorruptionError(
                        f"the ranks have read {name} differently. It was not used: start the same command again; if it "
                        "happens again, test this machine's memory and disk"
                    )

    def _make_right(self) -> None:
        wrong = self._wrong()
        if not wrong:
            return
        differing = _told(self._differing(wrong))
        at = {name: [rank for rank, names in enumerate(differing) if name in names] for name in wrong}
        still = wrong
        if self._mover.settings.on_corruption == "recover":
            for name in self._differing(wrong):
                part = local(dict(self._shards())[name]).detach()
                part.copy_(self._send(name))  # device: from this device's memory to itself
            still = self._wrong()
        for name in wrong:
            self._tell(name, at[name], "stopped" if name in still else "recovered")
        if still:
            name = still[0]
            more = f" and {len(still) - 1} more" if len(still) > 1 else ""
            where = f"on ranks {at[name]}" if at[name] else "though each rank has what it read: they read other bytes"
            raise CorruptionError(
                f"the shards of {name}{more} do not make the tensor that was loaded ({where}). Nothing was trained on "
                "them: run the doctor, then start the same command again"
            )

    def _wrong(self) -> list[str]:
        """Names of parameters whose parts do not add up. Collective."""
        everyone = _told({name: shard_digest(each).hex() for name, each in self._shards()})
        return [
            name
            for name in everyone[0]
            if combine(Digest.from_hex(theirs[name]) for theirs in everyone) != self._wholes[name]
        ]

    def _differing(self, names: Iterable[str]) -> dict[str, str]:
        """Those of the names whose part on this device is not what this rank has read."""
        shards = dict(self._shards())
        return {
            name: ""
            for name in names
            if name in self._sources and digest(local(shards[name]).detach()) != digest(self._sources[name])
        }

    def _tell(self, name: str, ranks: list[int], outcome: str) -> None:
        stage = "adapter" if name in self._trainable else "weights"
        if host_group().rank() == 0:
            self._mover.report.add(stage, mismatches=1, recovered=int(outcome == "recovered"))
            self._mover.report.incident(
                {"step": 0, "stage": stage, "tensor": name, "kind": "wrong shard", "ranks": ranks, "outcome": outcome}
            )

    def _shards(self) -> Iterator[tuple[str, DTensor]]:
        return ((name, each) for name, each in self._model.named_parameters() if isinstance(each, DTensor))

    def _mark(self, buffers: dict[str, Digest]) -> None:
        sharded = {name for name, _ in self._shards()}
        for name, tensor in tensors_of(self._model):
            if self._mover.provenance(tensor) is not None:
                continue
            if name in sharded or (name in buffers and digest(tensor) == buffers[name]):
                self._mover.mark_derived(tensor, CUT)


class _Fsdp2(_Sharding):
    def __init__(self, model: nn.Module, mover: Mover, accelerator: Any) -> None:
        super().__init__(model, mover)
        self._accelerator = accelerator

    def _prepare(self) -> None:
        plugin = self._accelerator.state.fsdp_plugin
        _, _, prepare = upstream.resolve("fsdp2_prepare")
        with upstream.replaced("fsdp2_load", lambda _: self._fill), _kept_with_the_root(self._model):
            # Shards on the meta device and then calls `_fill`; the environment keeps every rank reading the files.
            plugin.cpu_ram_efficient_loading = not self._quantised
            try:
                prepare(self._accelerator, self._model)
            finally:
                plugin.cpu_ram_efficient_loading = False
        assert is_sharded(self._model)

    def _fill(self, accelerator: Any, model: nn.Module, full_sd: dict[str, Tensor], cpu_offload: bool = False) -> None:
        """In place of accelerate's broadcast: this rank's rows of each weight, verified on their way."""
        del accelerator, cpu_offload
        meta = model.state_dict()
        if self._mover.settings.verify != "off":
            self._remember((name, full_sd[name]) for name, each in meta.items() if isinstance(each, DTensor))
        placed: dict[str, Tensor] = {}
        moved: dict[tuple[int, Any], Tensor] = {}  # a tied weight is one tensor of two names
        for name, like in meta.items():
            whole = full_sd[name]
            if not isinstance(like, DTensor):
                placed[name] = whole  # a buffer, which is on its device
                continue
            key = whole.data_ptr(), whole.shape
            if key not in moved:
                self._sources[name] = own_part(whole.detach(), like)
                moved[key] = self._send(name)
            placed[name] = as_shard(moved[key], like)
        model.load_state_dict(placed, assign=True)


class _TensorParallel(_Sharding):
    def __init__(self, model: nn.Module, mover: Mover, mesh: DeviceMesh, dims: Mapping[str, int | None]) -> None:
        super().__init__(model, mover)
        self._mesh, self._dims = mesh, dims

    def _prepare(self) -> None:
        wholes = {name: self._model.get_parameter(name) for name in self._dims}
        if self._mover.settings.verify != "off":
            self._remember({**dict(self._model.named_parameters()), **wholes}.items())  # those that stay whole, too
        for name, dim in self._dims.items():
            whole = wholes[name].detach()
            self._sources[name] = part_of(whole, dim, self._mesh)
            placement = Replicate() if dim is None else Shard(dim)
            shard = DTensor.from_local(
                self._send(name), self._mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
            )
            path, _, leaf = name.rpartition(".")
            self._model.get_submodule(path)._parameters[leaf] = nn.Parameter(shard, wholes[name].requires_grad)
        place(self._model, self._mover)
        setattr(self._model, TENSOR_PARALLEL, self._mesh.size())


@contextmanager
def _kept_with_the_root(model: nn.Module) -> Iterator[None]:
    """Within the block an untied output embedding is not seen as such, so that FSDP2 gathers it with the root.

    TRL's fused loss reads ``lm_head.weight`` without calling ``lm_head``; a unit of its own would be gathered by TRL
    itself, by a collective that nothing checks (trl 1.16.0, ``trainer/utils.py``).
    """
    given, made = (getattr(model, f"get_{side}_embeddings", lambda: None)() for side in ("input", "output"))
    tied = made is not None and given is not None and given.weight is made.weight
    with nullcontext() if tied or made is None else _hidden(model):
        yield


@contextmanager
def _hidden(model: nn.Module) -> Iterator[None]:
    model.__dict__["get_output_embeddings"] = lambda: None
    try:
        yield
    finally:
        del model.__dict__["get_output_embeddings"]


def _told(mine: dict[str, str]) -> list[dict[str, str]]:
    group = host_group()
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    return everyone
