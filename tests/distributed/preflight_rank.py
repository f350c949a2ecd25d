"""A rank that only makes the preflight: ``python -m tests.distributed.preflight_rank '{"asked": "auto"}'``, the rest of
what it needs from the environment, as a launcher sets it. Prints the decision as JSON, or the message of its end.
"""

from __future__ import annotations

import json
import os
import sys

import torch.distributed as dist

from hf_rocm_tune.distributed import preflight
from hf_rocm_tune.errors import TuneError

ONE_CARD = "`one card`"


def main(settings: dict[str, str]) -> int:
    device = {"device": "cpu", "address": None}
    limits = {name: float(settings[name]) for name in ("meet_s", "limit_s") if name in settings}
    try:
        done, meeting = preflight.run(asked=settings.get("asked", "auto"), device=device, environ=os.environ, **limits)  # type: ignore[arg-type]
        preflight.insist(done, one_card=ONE_CARD)
    except TuneError as error:
        print(json.dumps({"code": error.exit_code, "message": str(error)}))
        return error.exit_code
    dist.init_process_group("gloo")  # the store of the preflight is in nobody's way
    del meeting
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(done.to_dict() | {"lines": done.lines()}))
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
