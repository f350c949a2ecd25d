"""``accelerate launch`` as given, but its signals reach the job and its end is the job's."""

from __future__ import annotations

import sys

from hf_rocm_tune.exits import run_guarded
from hf_rocm_tune.launch import launch_as_given

if __name__ == "__main__":
    sys.exit(run_guarded(lambda: launch_as_given(sys.argv[1:]), argv=sys.argv[1:], process_ends=True))
