"""One rank of `test_fsdp.py`: shards small models by FSDP2, trains them by hand, and prints a JSON line a case."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from hf_rocm_tune.cards.fsdp_traffic import Traffic
from hf_rocm_tune.cards.sharded import FullState
from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.models.placement import findable_tensors_of, tensors_of
from hf_rocm_tune.models.sharding import shard
from hf_rocm_tune.models.shards import fsdp_modules, local, own_part
from hf_rocm_tune.train.sentinels import FrozenSentinel
from hf_rocm_tune.transfer import FaultSpec, Mover, TransferSettings, combine, digest

CPU = torch.device("cpu")
EMBEDDINGS = "base_model.model.model.embed_tokens.weight"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One sharding, and a few steps of training.

    Args:
        fault: specification for both ranks, "" for none.
        arch: of `tests.tiny`.
        verify: as ``--verify``.
        steps: optimizer steps.
        spoil: rank 1 reads another byte than rank 0 from the file.
        after: what to look at when the training is over.
    """

    fault: str = ""
    arch: str = "llama3"
    verify: str = "full"
    steps: int = 3
    spoil: bool = False
    after: str = ""


CASES: dict[str, Case] = {
    "clean": Case(after="whole"),
    "unchecked": Case(verify="off"),
    "tied": Case(arch="qwen3", after="whole"),
    "one shard changes": Case(fault="kind=after,stage=weights,tensor=*embed_tokens*,count=1", steps=0),
    "one shard always changes": Case(fault="kind=after,stage=weights,tensor=*embed_tokens*", steps=0),
    "ranks read other bytes": Case(spoil=True, steps=0),
    "gathered, one bit": Case(fault="kind=flip,stage=gathered,first=9,count=1"),
    "average zeroed": Case(fault="kind=zero,stage=gradients,first=3,count=2"),
    "average with two words swapped": Case(fault="kind=swap,stage=gradients,first=3,count=1,seed=3"),
    "average always wrong": Case(fault="kind=zero,stage=gradients,first=3,persist=1"),
    "memory": Case(steps=1, after="memory"),
    "evaluation": Case(steps=1, after="evaluation"),
}


def _model(folder: Path, case: Case) -> nn.Module:
    base = AutoModelForCausalLM.from_pretrained(folder / case.arch, dtype=torch.float32)
    torch.manual_seed(0)
    # rank 3 is odd: the ranks' parts of A are 2 rows and 1, of which the second is filled up
    return get_peft_model(base, LoraConfig(r=3, lora_dropout=0.0, target_modules="all-linear"))


def _run(accelerator: Accelerator, folder: Path, case: Case) -> dict[str, Any]:
    faults = FaultSpec.parse(case.fault) if case.fault else None
    settings = TransferSettings(verify=case.verify)
    with Mover(CPU, faults=faults, settings=settings) as mover:
        model = _model(folder, case)
        if case.spoil and dist.get_rank() == 1:
            with torch.no_grad():
                model.get_parameter(EMBEDDINGS)[-1, -1] += 1  # in rank 1's own part
        host = {name: each.detach().clone() for name, each in model.named_parameters()}
        row: dict[str, Any] = {"error": None}
        try:
            shard(model, accelerator, mover)
            row |= _sharded(model, host, mover)
            traffic = Traffic(model, fsdp_modules(model), mover) if case.verify != "off" else None
            row["losses"] = _train(model, traffic, case.steps)
            row["weights"] = combine(digest(local(each).detach()) for each in model.parameters()).hex()
            if case.after:
                row |= AFTER[case.after](model, mover, traffic)
        except CorruptionError as error:
            row["error"] = str(error)
        counted = mover.report.to_dict()
        row |= {"moved": counted["weights"], "averages": counted["gradients"], "gathered": counted["gathered"]}
        return row | {"incidents": counted["incidents"]}


def _sharded(model: nn.Module, host: dict[str, torch.Tensor], mover: Mover) -> dict[str, Any]:
    """What has become of the parameters."""
    shards = {name: each for name, each in model.named_parameters() if isinstance(each, DTensor)}
    equal = all(torch.equal(local(each), own_part(host[name], each)) for name, each in shards.items())
    unknown = [name for name, each in tensors_of(model) if mover.provenance(each) not in ("transferred", "derived")]
    kept = sum(each.nbytes for _, each in tensors_of(model))
    return {
        "all_sharded": shards.keys() == host.keys(),
        "own_rows": equal,
        "unknown": unknown,
        "share": kept / sum(each.nbytes for each in host.values()),
    }


def _train(model: nn.Module, traffic: Traffic | None, steps: int) -> list[float]:
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5)
    losses = []
    for step in range(steps):
        tokens = torch.arange(dist.get_rank() * 16 + step, dist.get_rank() * 16 + step + 12)[None]
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if traffic is not None:
            traffic.settle(step=step + 1)
            traffic.require_averages()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _whole(model: nn.Module, mover: Mover, traffic: Traffic | None) -> dict[str, Any]:
    """What is saved is what the ranks have together."""
    saved = FullState(model).model()
    expected = {name: each.full_tensor() for name, each in model.named_parameters() if each.requires_grad}
    first = dist.get_rank() == 0
    equal = saved.keys() == expected.keys() and all(torch.equal(saved[name], expected[name]) for name in saved)
    return {"saved_right": equal if first else saved == {}}


def _memory(model: nn.Module, mover: Mover, traffic: Traffic | None) -> dict[str, Any]:
    """A bit flips in rank 1's own part of a frozen weight."""

    def frozen() -> Any:
        return (found for found in findable_tensors_of(model) if not found[1].requires_grad)

    sentinel = FrozenSentinel(list_tensors=frozen, period=2, arrived_with=mover.digest_of)
    before = sentinel.check_all()
    if dist.get_rank() == 1:
        local(model.get_parameter(EMBEDDINGS)).view(torch.int32)[0, 0] ^= 4
    return {
        "changed": [[each.name for each in found] for found in (before, sentinel.check_all())],
        "watched": sentinel.tensors,
    }


def _evaluation(model: nn.Module, mover: Mover, traffic: Traffic | None) -> dict[str, Any]:
    """A forward without a backward leaves units gathered; what is looked at are the shards all the same."""
    assert traffic is not None
    before = {name: digest(each.detach()) for name, each in tensors_of(model)}
    with torch.no_grad():
        model.eval()(input_ids=torch.arange(8)[None])
    gathered = [name for name, each in model.named_parameters() if not isinstance(each, DTensor)]
    after = {name: digest(each.detach()) for name, each in tensors_of(model)}
    pending = traffic.pending
    traffic.settle(step=9)
    return {"left_gathered": len(gathered), "same": before == after, "pending": [pending, traffic.pending]}


AFTER: dict[str, Callable[..., dict[str, Any]]] = {"whole": _whole, "memory": _memory, "evaluation": _evaluation}


def main(rank: int, store: str, folder: str) -> None:
    """Runs every case."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ["OMP_NUM_THREADS"] = "1"
    # PEFT 0.21 asks for a property that transformers 5.23 has renamed, as in `process.prepare_process`.
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    for name, case in CASES.items():
        plugin.auto_wrap_policy = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP"
        ).auto_wrap_policy
        plugin.transformer_cls_names_to_wrap = None
        print(json.dumps({"case": name, **_run(accelerator, Path(folder), case)}), flush=True)
    dist.destroy_process_group()
    sys.stdout.flush()
    # FSDP keeps gloo's threads beyond the group, and this process was seen to be aborted, once, while the interpreter
    # was taken down. How a real run ends is for the tests of real runs.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
