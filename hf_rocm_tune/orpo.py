"""``accelerate launch -m hf_rocm_tune.orpo``, or ``hf-rocm-tune orpo``: see :mod:`hf_rocm_tune.sft`."""

from __future__ import annotations

import sys

from hf_rocm_tune.sft import main

if __name__ == "__main__":
    sys.exit(main(method="orpo"))
