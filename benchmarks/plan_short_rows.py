"""Steps that loop over the tokens of long rows: planned from shorter rows, beside recordings of the whole step.

Prints for each model and case the planned figure over the recorded one: peak, launches, bytes written. The
configurations are the default ones of transformers. A whole step takes up to 500,000 operations and some seconds.

    python benchmarks/plan_short_rows.py [--kinds mamba jamba] [--length 1024]
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.plan_architectures import default_config  # noqa: E402
from hf_rocm_tune.machine import process  # noqa: E402
from hf_rocm_tune.plan import PlanRequest  # noqa: E402

KINDS = ("mamba", "falcon_mamba", "jamba", "recurrent_gemma", "rwkv", "xlstm", "kimi_linear")
ALL_OPERATIONS = 10**8


def compare(kind: str, length: int) -> list[str]:
    """A line for each case of a model's step."""
    from hf_rocm_tune.plan.estimate import Case, ShortRows, Step
    from hf_rocm_tune.plan.recorder import record
    from hf_rocm_tune.plan.recordings import Recordings

    recordings = Recordings(default_config(kind), PlanRequest(length=length), "lora")
    sample = recordings.sample
    lines = []
    for rows, checkpointing in ((2, False), (1, True), (4, True)):
        case = Case(micro_batch=rows, length=length, checkpointing=checkpointing)
        planned = recordings(case)
        recording = planned.runs[0][0]
        rows_of = f"rows of {max(recording.tapes)}" if isinstance(recording, ShortRows) else "recorded whole"
        whole = Step(((record(sample, case, *case.shape, most=ALL_OPERATIONS), sample.layer_of),))
        peak = planned.peak().total / whole.peak().total
        launches = planned.work()[2] / whole.work()[2]
        written = planned.work()[1] / whole.work()[1]
        how = "recomputed" if checkpointing else "kept"
        lines.append(
            f"{kind:<16} {rows} rows, {how:<10} {rows_of:<14} peak {peak:.4f} launches {launches:.4f} "
            f"written {written:.4f}"
        )
    return lines


def main() -> None:
    """Compares all kinds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    parser.add_argument("--length", type=int, default=1024)
    wanted = parser.parse_args()
    process.prepare_process(os.environ)
    for kind in wanted.kinds:
        print("\n".join(compare(kind, wanted.length)), flush=True)


if __name__ == "__main__":
    main()
