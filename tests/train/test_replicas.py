"""Two real ranks over gloo: what one of them holds otherwise stops both, and is named on both."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.train.sentinels import compare_replicas
from tests.train.trainers import two_ranks

CASES = ("equal", "one bit", "all", "missing", "longer")


def harmed(case: str) -> dict[str, torch.Tensor]:
    """The tensors of rank 1."""
    held = {f"w{number}": torch.arange(50.0) + number for number in range(8)}
    if case == "missing":
        del held["w3"]
    elif case == "longer":
        held["w3"] = torch.cat([held["w3"], torch.zeros(1)])  # zeros add nothing to the sums; the length does
    for name in {"one bit": ["w3"], "all": list(held)}.get(case, []):
        held[name].view(torch.int32)[-1] ^= 1
    return held


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_difference_stops_every_rank_with_the_same_line(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        dist.init_process_group("gloo", rank=rank, world_size=2)
        found: dict[str, Any] = {}
        for case in CASES:
            try:
                found[case] = compare_replicas(harmed(case if rank else "equal").items(), "at step 3")
            except CorruptionError as error:
                found[case] = str(error)
        (tmp_path / f"{rank}.json").write_text(json.dumps(found))
        gc.collect()  # suspected, not proven: a process group held in a cycle made a rank abort once at its end

    two_ranks(work, tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second and first["equal"] == 8
    for case in ("one bit", "missing", "longer"):
        assert "at step 3" in first[case] and "w3 (ranks [1])" in first[case] and "w2" not in first[case]
    assert "w0 (ranks [1])" in first["all"] and "and 3 more" in first["all"]
