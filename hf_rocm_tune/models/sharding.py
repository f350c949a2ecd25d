"""A model sharded over the ranks, by FSDP2 or for tensor parallelism, every byte of every shard verified.

Accelerate's ``fsdp2_prepare_model`` decides what is gathered together; its broadcast of every weight from rank 0 is
replaced: each rank reads the files itself and sends **only its own rows** through the mover. Then the digests of all
ranks' parts, taken on their devices, must add up to the digest of the whole as it was read (of 4-bit weights, which
are made on the device, as they were there before). Not covered: 4-bit weights stored as integers (refused before).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from hf_rocm_tune import upstream
from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.host_group import host_group
from hf_rocm_tune.models.placement import place
from hf_rocm_tune.models.shards import TENSOR_PARALLEL, as_shard, is_sharded, local, own_part, part_of, shard_digest
from hf_rocm_tune.models.tensors import tensors_of
from hf_rocm_tune.transfer import Digest, Mover, combine, digest

CUT = "cut on the device from a verified tensor"


def shard(model: nn.Module, accelerator: Any, mover: Mover) -> None:
    """Shards a model in place by FSDP2. Collective; it may be called once."""
    quantised = bool(getattr(model, "is_loaded_in_4bit", False))
    place(model, mover, parameters=quantised)
    parts = _Parts(model, mover)
    if quantised:
        parts.remember(model.named_parameters())

    def fill(accelerator: Any, model: nn.Module, full_sd: dict[str, Tensor], cpu_offload: bool = False) -> None:
        """In place of accelerate's broadcast: this rank's rows of each weight, verified on their way."""
        del accelerator, cpu_offload
        meta = model.state_dict()
        parts.remember((name, full_sd[name]) for name, like in meta.items() if isinstance(like, DTensor))
        placed: dict[str, Tensor] = {}
        moved: dict[tuple[int, Any], Tensor] = {}  # a tied weight is one tensor of two names
        for name, like in meta.items():
            whole = full_sd[name]
            if not isinstance(like, DTensor):
                placed[name] = whole  # a buffer, which is on its device
                continue
            key = whole.data_ptr(), whole.shape
            if key not in moved:
                moved[key] = parts.send(name, own_part(whole.detach(), like))
            placed[name] = as_shard(moved[key], like)
        model.load_state_dict(placed, assign=True)

    plugin = accelerator.state.fsdp_plugin
    _, _, prepare = upstream.resolve("fsdp2_prepare")
    with upstream.replaced("fsdp2_load", lambda _: fill), _kept_with_the_root(model):
        # Shards on the meta device and then calls `fill`; the environment keeps every rank reading the files.
        plugin.cpu_ram_efficient_loading = not quantised
        try:
            prepare(accelerator, model)
        finally:
            plugin.cpu_ram_efficient_loading = False
    assert is_sharded(model)
    parts.check()


def cut(model: nn.Module, mesh: DeviceMesh, mover: Mover, dims: Mapping[str, int | None]) -> None:
    """Cuts weights of a model in place and brings the rest to the device whole. Collective; it may be called once."""
    place(model, mover, parameters=False)
    parts = _Parts(model, mover)
    wholes = {name: model.get_parameter(name) for name in dims}
    parts.remember({**dict(model.named_parameters()), **wholes}.items())  # those that stay whole, too
    for name, dim in dims.items():
        whole = wholes[name].detach()
        part = DTensor.from_local(
            parts.send(name, part_of(whole, dim, mesh)),
            mesh,
            [Replicate() if dim is None else Shard(dim)],
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, nn.Parameter(part, wholes[name].requires_grad))
    place(model, mover)
    setattr(model, TENSOR_PARALLEL, mesh.size())
    parts.check()


class _Parts:
    """What each rank sends of a model's parameters, whose buffers are on their device; nothing with ``verify="off"``.

    Every method but `send` is collective.
    """

    def __init__(self, model: nn.Module, mover: Mover) -> None:
        self._model = model
        self._mover = mover
        self._verifies = mover.settings.verify != "off"
        self._trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._wholes: dict[str, Digest] = {}
        self._sources: dict[str, Tensor] = {}  # this rank's rows on the host, to send them again
        self._buffers = {name: digest(buffer) for name, buffer in model.named_buffers()} if self._verifies else {}

    def _stage(self, name: str) -> str:
        return "adapter" if name in self._trainable else "weights"

    def send(self, name: str, part: Tensor) -> Tensor:
        self._sources[name] = part
        return self._mover.move(part, name=name, stage=self._stage(name))

    def remember(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Digests of whole tensors, each by two ranks: what one has read wrong is held against the view of another."""
        if not self._verifies:
            return
        group = host_group()
        mine = {
            name: digest(tensor.detach()).hex()
            for number, (name, tensor) in enumerate(tensors)
            if (group.rank() - number) % group.size() < 2
        }
        for theirs in all_gather_named(mine):
            for name, text in theirs.items():
                if self._wholes.setdefault(name, Digest.from_hex(text)) != Digest.from_hex(text):
                    raise CorruptionError(
                        f"the ranks have read {name} differently. It was not used: start the same command again; if it "
                        "happens again, test this machine's memory and disk"
                    )

    def check(self) -> None:
        """Sends wrong parts again; raises where the parts still do not add up. Marks those that do as verified."""
        if not self._verifies:
            return
        wrong = self._wrong()
        if wrong:
            self._make_right(wrong)
        sharded = dict(self._shards())
        for name, tensor in tensors_of(self._model):
            if self._mover.provenance(tensor) is not None:
                continue
            if name in sharded or (name in self._buffers and digest(tensor) == self._buffers[name]):
                self._mover.mark_derived(tensor, CUT)

    def _make_right(self, wrong: list[str]) -> None:
        shards = dict(self._shards())
        mine = []
        for name in wrong:
            if name in self._sources and digest(local(shards[name]).detach()) != digest(self._sources[name]):
                mine.append(name)
        of_all_ranks = all_gather_named(dict.fromkeys(mine, ""))
        at: dict[str, list[int]] = {}
        for name in wrong:
            at[name] = [rank for rank, theirs in enumerate(of_all_ranks) if name in theirs]
        still = wrong
        if self._mover.settings.on_corruption == "recover":
            for name in mine:
                part = local(shards[name]).detach()
                part.copy_(self.send(name, self._sources[name]))  # device: from this device's memory to itself
            still = self._wrong()
        if host_group().rank() == 0:
            for name in wrong:
                self._report(name, at[name], recovered=name not in still)
        if still:
            name = still[0]
            more = f" and {len(still) - 1} more" if len(still) > 1 else ""
            where = f"on ranks {at[name]}" if at[name] else "though each rank has what it read: they read other bytes"
            raise CorruptionError(
                f"the shards of {name}{more} do not make the tensor that was loaded ({where}). Nothing was trained on "
                "them: run the doctor, then start the same command again"
            )

    def _report(self, name: str, ranks: list[int], *, recovered: bool) -> None:
        stage = self._stage(name)
        self._mover.report.add(stage, mismatches=1, recovered=int(recovered))
        row = {"step": 0, "stage": stage, "tensor": name, "kind": "wrong shard", "ranks": ranks}
        self._mover.report.incident({**row, "outcome": "recovered" if recovered else "stopped"})

    def _wrong(self) -> list[str]:
        """The tensors whose shards, of all ranks, do not make what was loaded."""
        of_all_ranks = all_gather_named({name: shard_digest(shard).hex() for name, shard in self._shards()})
        wrong = []
        for name in of_all_ranks[0]:
            if combine(Digest.from_hex(theirs[name]) for theirs in of_all_ranks) != self._wholes[name]:
                wrong.append(name)
        return wrong

    def _shards(self) -> Iterator[tuple[str, DTensor]]:
        for name, parameter in self._model.named_parameters():
            if isinstance(parameter, DTensor):
                yield name, parameter


@contextmanager
def _kept_with_the_root(model: nn.Module) -> Iterator[None]:
    """Within the block an untied output embedding is not seen as such, so that FSDP2 gathers it with the root.

    TRL's fused loss reads ``lm_head.weight`` without calling ``lm_head``; a unit of its own would be gathered by TRL
    itself, by a collective that nothing checks (trl 1.16.0, ``trainer/utils.py``).
    """
    given, made = (getattr(model, f"get_{side}_embeddings", lambda: None)() for side in ("input", "output"))
    hides = made is not None and (given is None or given.weight is not made.weight)
    if hides:
        model.__dict__["get_output_embeddings"] = lambda: None
    try:
        yield
    finally:
        if hides:
            del model.__dict__["get_output_embeddings"]


def all_gather_named(mine: dict[str, str]) -> list[dict[str, str]]:
    """The texts of each rank. Collective, over gloo."""
    group = host_group()
    of_all_ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(of_all_ranks, mine, group=group)
    return of_all_ranks
