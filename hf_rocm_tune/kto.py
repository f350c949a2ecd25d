"""``accelerate launch -m hf_rocm_tune.kto``, or ``hf-rocm-tune kto``: see :mod:`hf_rocm_tune.sft`."""

import sys
from functools import partial

from hf_rocm_tune import sft

main = partial(sft.main, method="kto")

if __name__ == "__main__":
    sys.exit(main())
