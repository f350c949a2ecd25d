"""One rank of `test_machines.py`: compares what the case gives it with the other rank; prints a JSON line a case."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path

import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType

from hf_rocm_tune.distributed import machines
from hf_rocm_tune.errors import UsageError

VERSIONS = {"torch": "2.13.0", "peft": None}
SETTINGS = {"learning_rate": 1e-3, "save_steps": 500, "model_name_or_path": "/data/a", "local_rank": 0}
ROWS = [{"text": f"row {number}", "labels": [number]} for number in range(200)]


def case(name: str, rank: int, shared: Path, own: Path) -> None:
    """What a case does; rank 1 is the other machine."""
    other = rank == 1
    if name == "alike":
        machines.require_same(VERSIONS, {**SETTINGS, "model_name_or_path": f"/disk{rank}", "local_rank": rank})
        machines.require_same_rows(ROWS, "train")
        machines.require_same_rows(iter(ROWS), "train")
        machines.require_same_rows([], "train")
        machines.require_same_rows(None, "evaluation")
        machines.require_shared(shared)
        assert machines.any_rank(other) and not machines.any_rank(False)
    elif name == "version":
        machines.require_same({**VERSIONS, "torch": "2.12.1"} if other else VERSIONS, SETTINGS)
    elif name == "not installed":
        machines.require_same({**VERSIONS, "peft": "0.21.2"} if other else VERSIONS, SETTINGS)
    elif name == "setting":
        machines.require_same(VERSIONS, {**SETTINGS, "save_steps": 50} if other else SETTINGS)
    elif name == "two settings":
        machines.require_same(VERSIONS, {**SETTINGS, "save_steps": 50, "seed": 3} if other else SETTINGS)
    elif name == "fewer rows":
        machines.require_same_rows(ROWS[:-1] if other else ROWS, "train")
    elif name == "other rows":
        machines.require_same_rows([{**row, "labels": [0]} for row in ROWS] if other else ROWS, "train")
    elif name == "own directory":
        machines.require_shared(own)


CASES = ("alike", "version", "not installed", "setting", "two settings", "fewer rows", "other rows", "own directory")


def main(rank: int, store: Path) -> None:
    """All cases, in the order of `CASES`."""
    machines._SECONDS_TO_APPEAR = 0.5
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
    )
    state = PartialState(cpu=True)
    state.distributed_type, state.num_processes, state.process_index = DistributedType.MULTI_CPU, 2, rank
    shared, own = store.parent / "shared", store.parent / f"own-{rank}"
    for directory in (shared, own):
        directory.mkdir(exist_ok=True)
    for name in CASES:
        said = None
        try:
            case(name, rank, shared, own)
        except UsageError as error:
            said = str(error)
        print(json.dumps({"case": name, "said": said, "left": [p.name for p in [*shared.iterdir(), *own.iterdir()]]}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
