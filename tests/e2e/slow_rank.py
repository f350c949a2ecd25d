"""``python -m tests.e2e.slow_rank SECONDS ARGV``: a run whose evaluations and saves take so long."""

from __future__ import annotations

import functools
import sys
import time
from typing import Any

from hf_rocm_tune import sft


def main() -> int:
    """Runs the command line with the trainer slowed down."""
    from transformers import Trainer

    from hf_rocm_tune.train.trainer import VerifiedSFTTrainer

    seconds = float(sys.argv[1])

    def slowed(stock: Any) -> Any:
        @functools.wraps(stock)  # overrides are compared with what it says it takes
        def slow(*arguments: Any, **keywords: Any) -> Any:
            print("slow on purpose", flush=True)
            time.sleep(seconds)
            return stock(*arguments, **keywords)

        return slow

    Trainer.evaluation_loop = slowed(Trainer.evaluation_loop)  # type: ignore[method-assign]
    VerifiedSFTTrainer.before_save = slowed(VerifiedSFTTrainer.before_save)  # type: ignore[method-assign]
    return sft.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
