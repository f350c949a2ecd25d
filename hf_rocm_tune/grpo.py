"""``accelerate launch -m hf_rocm_tune.grpo``, or ``hf-rocm-tune grpo``: see :mod:`hf_rocm_tune.sft`."""

import sys
from functools import partial

from hf_rocm_tune import sft

main = partial(sft.main, method="grpo")

if __name__ == "__main__":
    sys.exit(main())
