"""``python -m hf_rocm_tune`` is ``hf-rocm-tune``."""

from __future__ import annotations

import sys

from hf_rocm_tune.cli import main

if __name__ == "__main__":
    sys.exit(main())
