"""``hf-rocm-tune sft --cards_way auto``: the fastest way to use two cards by the plan, as flags of launcher and job.

The launcher runs this as a separate process (``python -m hf_rocm_tune.job.cards FLAGS``), because it reads the memory
of a card, and the launcher must not use a card while the job trains. The last line of standard output is a JSON object
with ``flags`` and ``why``. The plan uses the effective batch of two processes with these flags.

Averages through the host are not chosen here: the job's preflight tries RCCL and falls back to them if its averages are
wrong or do not return. With the other ways a failed preflight ends the job with exit code 4.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from hf_rocm_tune.errors import OutOfMemoryError, UsageError
from hf_rocm_tune.exits import run_guarded
from hf_rocm_tune.settings import names

CARDS = 2
_DECIDED = ("auto_fit", "recompute_layers", "split_layers", "pipeline", "tensor_parallel", "grad_sync")
"""Flags for what the plan decides here."""


def choose(argv: Sequence[str]) -> dict[str, Any]:
    """Choose the way to use two cards for a job.

    Args:
        argv: the job's flags.

    Returns:
        ``flags``: for launcher and job, to append to the given ones; ``why``: one sentence.

    Raises:
        UsageError: fewer than two cards are visible, a flag of `_DECIDED` is given, or the job cannot be planned.
        OutOfMemoryError: no way fits.
    """
    import torch

    from hf_rocm_tune.job.fit import demand_of, memory_of, request_of
    from hf_rocm_tune.plan import plan_for
    from hf_rocm_tune.plan.ways import best_of, sentence, ways
    from hf_rocm_tune.settings.arguments import parse

    arguments = parse(argv)
    if chosen := sorted(arguments.given.intersection(_DECIDED)):
        raise UsageError(f"{names.CARDS_WAY} auto chooses --{chosen[0]}: leave out one of the two")
    if (visible := torch.cuda.device_count()) < CARDS:
        raise UsageError(f"{names.CARDS_WAY} auto needs two visible cards, and there are {visible}: leave it out")
    wanted = demand_of(arguments, ranks=CARDS)
    request = request_of(arguments, wanted, "hip" if torch.version.hip else "cuda")
    plan = plan_for(request, card=memory_of(torch.device("cuda", 0)), grid=False)
    found = [each for each in ways(plan) if each.name != "host"]
    best = best_of(found)
    if best is None:
        raise OutOfMemoryError(f"{names.CARDS_WAY} auto: {sentence(plan, found)}")
    case = best.option.case
    decided: dict[str, Any] = {
        "per_device_train_batch_size": case.micro_batch,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_checkpointing": str(case.checkpointing).lower(),
    }
    if case.recompute is not None:
        decided["recompute_layers"] = "{},{}".format(*case.recompute)
    flags = [*shlex.split(best.flags), *(word for name, value in decided.items() for word in (f"--{name}", str(value)))]
    return {"flags": flags, "why": sentence(plan, found)}


def main(argv: Sequence[str]) -> int:
    """Prints the choice as JSON."""
    from hf_rocm_tune.sft import prepare

    prepare()
    print(json.dumps(choose(argv)), flush=True)
    return 0


if __name__ == "__main__":
    os.environ["HF_ROCM_TUNE_QUIET"] = "1"
    sys.exit(run_guarded(lambda: main(sys.argv[1:]), argv=sys.argv[1:], process_ends=True))
