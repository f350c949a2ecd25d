"""What FSDP2 and tensor parallelism have in common: each rank holds a part of the model.

The model is sharded when the trainer is built, so that coverage, sentinels and reports see what will be trained. Each
rank sends its own rows through the mover; what is gathered and averaged is checked before the optimizer; the norm of
the gradients is summed over gloo; a save gathers trained weights and optimizer state over gloo, compared, in the format
of a single process. Not covered: out-of-memory recovery.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from hf_rocm_tune.cards.agree import all_gather_floats, compare_replicas, exchange, max_over_ranks
from hf_rocm_tune.cards.gradients import STAGE, Average, AverageCheck, digest_words, joined_words, marked
from hf_rocm_tune.cards.strategy import Compare, ParallelStrategy
from hf_rocm_tune.errors import CorruptionError, SeamError
from hf_rocm_tune.host_group import host_group
from hf_rocm_tune.models.shards import cut_of, is_sharded, local, reshard, shard_digest
from hf_rocm_tune.models.tensors import tensors_of
from hf_rocm_tune.transfer import Digest, Mover, combine, digest, host_copy, map_tensors, named_tensors

if TYPE_CHECKING:
    from transformers import TrainingArguments
    from trl import ModelConfig


class Sharded(ParallelStrategy):
    on_host: ClassVar[bool] = True
    _traffic: Gathers | None = None  # None before `place`, and where nothing is checked
    _accelerator: Any
    excludes: ClassVar[Mapping[str, str]] = {
        "--auto_fit": "it does not support shards; set --per_device_train_batch_size yourself",
        "--recompute_layers": "all layers are recomputed, or none; use --gradient_checkpointing",
        "--init_lora_weights": "the part that moves into the adapter is computed from full weights",
        "--adapter_name_or_path": "the adapter is read after the weights are cut; merge it into the base first",
        "--use_peft false": "it is for adapters here; train with LoRA",
        "--fp16": "use --bf16, or neither",
        **dict.fromkeys(("--torch_compile", "--activation_offloading"), "leave it out"),
    }

    @override
    def _refusals(
        self, args: TrainingArguments, model: ModelConfig, environ: Mapping[str, str]
    ) -> list[tuple[bool, str]]:
        optim = str(getattr(args.optim, "value", args.optim))
        tried = ("adamw_torch", "adamw_torch_fused", "sgd")
        return [(optim not in tried, f"--optim {optim} is not known to work on shards: use adamw_torch_fused")]

    @override
    def attach(self, accelerator: Any, mover: Mover) -> None:
        super().attach(accelerator, mover)
        accelerator.clip_grad_norm_ = self._clip
        accelerator.get_state_dict = lambda model, unwrap=True: self.state.model()
        self._accelerator = accelerator

    @override
    def place(self, model: nn.Module) -> None:
        if is_sharded(model):
            return
        self._shard(model)
        self.state = FullState(model)
        if self.mover.settings.verify == "off":
            return
        cut = set()
        for name, parameter in model.named_parameters():
            if isinstance(parameter, DTensor) and cut_of(parameter) is not None:
                cut.add(name)
        replicated = [(name, tensor) for name, tensor in tensors_of(model) if name not in cut]
        compare_replicas(replicated, "after sharding")

    @abstractmethod
    def _shard(self, model: nn.Module) -> None:
        """Shard the model and begin to check what the ranks send. Collective."""

    @override
    def start(self, wrapped: nn.Module, optimizer: Any, compare: Compare, *, max_steps: int) -> None:
        if self.state is not None:
            self.state.optimizer = optimizer

    @override
    def check(self, *, step: int, synced: bool) -> None:
        if self._traffic is not None and (self._traffic.pending or synced):
            self._traffic.wait_verified(step=step)

    @override
    def describe(self, model: nn.Module) -> dict[str, Any]:
        if self._traffic:
            grad_sync = self._traffic.describe()
        else:
            grad_sync = {"method": self.name, "compression": "none", "judged": "no"}
        return {**super().describe(model), "grad_sync": grad_sync}

    def _clip(self, parameters: Any, max_norm: float) -> Tensor:
        """Replaces ``Accelerator.clip_grad_norm_``: the norm is summed over gloo, the same on all ranks."""
        if self._traffic is not None:
            self._traffic.require_averages()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        parts = [local(gradient) for gradient in gradients]
        norms = torch.zeros(1)
        if parts:
            norms = torch.stack(torch._foreach_norm(parts, dtype=torch.float32))
        if host_group().rank() > 0:  # gradients that every rank holds completely count once
            whole = [isinstance(gradient, DTensor) and cut_of(gradient) is None for gradient in gradients]
            norms[torch.tensor(whole, device=norms.device)] = 0
        mine = (norms.double() ** 2).sum()
        total = sum(row[0] for row in all_gather_floats([mine.item()])) ** 0.5
        factor = max_norm / (total + 1e-6)
        if factor < 1 or factor != factor:
            torch._foreach_mul_(parts, factor)
        return torch.tensor(total, dtype=torch.float32, device=self.mover.device)


def declare_accelerators(args: Any) -> None:
    """Upstream does not shard on the CPU: there the ranks are declared as ranks of accelerators."""
    if args.device.type == "cpu":
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


GATHERED = "gathered"
_SUMS = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class Gather:
    """One all-gather: weights of a unit, or partial sums that each rank adds up (`tensor_parallel`)."""

    name: str
    sent: Tensor  # int64[2], the digest of what this rank sent
    arrived: Tensor  # int64[ranks, 2], digests of what arrived from each rank, including its own part
    nbytes: int  # from the other ranks

    def words(self, *, failed: bool) -> Tensor:
        return torch.cat([self.sent, self.arrived.flatten()])


class Gathers:
    """Checks what the ranks sent one another in a micro-step, before the optimizer. The constructor is collective.

    Each rank digests what it sends and what arrived; one exchange over gloo lets every rank check every collective: the
    n-th records of all ranks belong together. What arrived wrong has already been used: every rank stops.
    """

    reported_as = ""  # in reports
    message = ""  # in the error, with ``%s`` for the name of the first wrong one
    advice = ""  # the end of errors

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self.gathers: list[Gather] = []
        self.averages: list[Average] = []
        self.check: AverageCheck | None = None  # of averages, where there are any
        self.made = 0  # averages or sums since the start
        self.numbers = itertools.count()  # counts the collectives of the run, the same on all ranks
        self._made_before = self._steps = self._bytes = 0
        host_group()  # created here, on every rank, not in the middle of a step

    @property
    def pending(self) -> bool:
        return bool(self.gathers or self.averages)

    def arrived(self, name: str, sent: Tensor, parts: Tensor) -> None:
        """Remember a gather: the digest of what this rank sent, and what it got from each rank, [ranks, ...]."""
        self._mover.inject(parts, name=name, stage=GATHERED, number=next(self.numbers), attempt=0)
        arrived = torch.stack([digest_words(part) for part in parts])
        nbytes = parts.nbytes - parts[0].nbytes
        self.gathers.append(Gather(name=name, sent=sent, arrived=arrived, nbytes=nbytes))

    def require_averages(self) -> None:
        self._steps += 1
        made = self.made - self._made_before
        self._made_before = self.made
        if made == 0:
            raise SeamError(
                "cannot verify: the ranks exchanged no gradients in a step that ends with the optimizer; use the "
                f"library versions that this package was tested with{self.advice}"
            )

    def wait_verified(self, *, step: int) -> None:
        """Check all collectives since the last call. Collective."""
        gathers = self.gathers
        averages = self.averages
        self.gathers = []
        self.averages = []
        records = [*gathers, *averages]
        for gather in gathers:
            self._bytes += gather.nbytes
        for average in averages:
            self._bytes += average.sent.nbytes - average.sent.nbytes // len(average.projected)
        of_all_ranks = exchange(joined_words(records, [False] * len(records)))
        report = self._mover.report
        ranks = len(of_all_ranks)
        report.count(GATHERED, checked=len(gathers))
        end = len(gathers) * _SUMS * (1 + ranks)
        table = torch.stack([mine[:end] for mine in of_all_ranks]).view(ranks, len(gathers), 1 + ranks, _SUMS)
        sent = table[:, :, 0]  # [from, gather, sums]
        arrived = table[:, :, 1:]  # [at, gather, from, sums]
        right = (arrived == sent.transpose(0, 1)[None]).all(dim=3).all(dim=2)  # [at, gather]
        bad = []
        for number in marked((~right).any(dim=0)):
            bad.append((gathers[number].name, list(marked(~right[:, number]))))
        if bad:
            self._stop(bad, step)
        if self.check is not None:
            report.count(STAGE, buckets=len(averages))
            self.made += len(averages)
            self.check.conclude(averages, [mine[end:] for mine in of_all_ranks], step)

    def _stop(self, bad: Sequence[tuple[str, list[int]]], step: int) -> None:
        """Report the collectives that arrived wrong, name and ranks of each, and end the run."""
        report = self._mover.report
        for name, at in bad:
            row = {"step": step, "stage": GATHERED, "tensor": name, "ranks": at, "kind": "other bytes"}
            report.incident({**row, "retry": "all_gather", "outcome": "stopped"})
        report.count(GATHERED, mismatches=len(bad))
        (name, at), *more = bad
        also = f" (and {len(more)} more times)" if more else ""
        raise CorruptionError(
            f"{self.message % name} at step {step} on ranks {at}{also}. The step was not used and the checkpoints "
            "already written are intact: run the doctor, then start the same command again to continue from the "
            f"newest one{self.advice}"
        )

    def describe(self) -> dict[str, Any]:
        sent = round(self._bytes / max(self._steps, 1))
        common = {"method": self.reported_as, "compression": "none", "process_group": dist.get_backend()}
        return {**common, "bytes_between_ranks_per_step": sent}


class FullState:
    """The full (unsharded) state of a sharded model for a save: gathered once, kept until `forget`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.optimizer: Any = None  # accelerate's wrapper; set when training begins
        self._kept_model: dict[str, Tensor] | None = None
        self._kept_optimizer: dict[str, Any] | None = None

    def model(self) -> dict[str, Tensor]:
        """Full trained weights by name, on rank 0's host; empty on others. Collective the first time."""
        if self._kept_model is None:
            reshard(self._model)
            trained = {}
            for name, parameter in self._model.named_parameters():
                if parameter.requires_grad:
                    trained[name] = parameter.data
            self._kept_model = self._gather(trained)
        return self._kept_model

    def optimizer_state(self) -> dict[str, Any]:
        if self._kept_optimizer is None:
            state = self.optimizer.state_dict()
            sharded = {path: tensor for path, tensor in named_tensors(state) if isinstance(tensor, DTensor)}
            full = self._gather(sharded)
            if host_group().rank() == 0:
                by_id = {id(tensor): full[path] for path, tensor in sharded.items()}
                self._kept_optimizer = map_tensors(state, lambda tensor: by_id.get(id(tensor), tensor))
            else:
                self._kept_optimizer = {}
        return self._kept_optimizer

    def forget(self) -> None:
        self._kept_model = self._kept_optimizer = None

    def _gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        result: dict[str, Tensor] = {}
        bad: list[str] = []
        group = host_group()
        for name, tensor in tensors.items():  # one at a time: memory is bounded
            part = local(tensor).detach()
            if isinstance(tensor, DTensor):
                part_digest = shard_digest(tensor)
                dim = cut_of(tensor)
            else:
                part_digest = digest(part)
                dim = None
            mine = host_copy(part), part_digest.hex()  # a copy that stayed wrong is found on rank 0
            gathered: list[Any] | None = None
            if group.rank() == 0:
                gathered = [None] * group.size()
            dist.gather_object(mine, gathered, dst=0, group=group)
            if gathered is None:
                continue
            parts = [copy for copy, _ in gathered]
            digests = [Digest.from_hex(text) for _, text in gathered]
            if not isinstance(tensor, DTensor):  # every rank holds all of it
                digests = digests[:1]
            result[name] = parts[0] if dim is None else torch.cat(parts, dim)
            if digest(result[name]) != combine(digests):
                bad.append(name)
        if max_over_ranks([len(bad)])[0] > 0:
            first = f" ({bad[0]} first)" if bad else ""
            raise CorruptionError(
                f"parts of a tensor were gathered with errors{first}, so nothing was saved; checkpoints already "
                "written are intact: start the same command again to continue from the newest one"
            )
        return result
