"""A rank that only makes the preflight: ``python -m tests.cards.preflight_rank '{"limit_s": 9}'``, the rest of what it
needs from the environment, as a launcher sets it; rank 0 ``dies`` where it would try the cards, rank 1 is ``late``
by some seconds. Prints the decision as
JSON, or the message of its end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

from torch.distributed import TCPStore

from hf_rocm_tune.cards import preflight
from hf_rocm_tune.errors import TuneError

ONE_CARD = "`one card`"


def main(settings: dict[str, Any]) -> int:
    device = {"device": "cpu", "address": None}
    limits = {name: float(settings[name]) for name in ("meet_s", "limit_s") if name in settings}
    try:
        if settings.get("dies") and os.environ["RANK"] == "0":
            preflight.try_machine = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        if settings.get("late") and os.environ["RANK"] == "1":  # it asks for the devices when rank 0 is gone
            get = TCPStore.get
            TCPStore.get = lambda *given: (time.sleep(settings["late"]), get(*given))[1]
        done = preflight.run(asked="auto", device=device, environ=os.environ, **limits)
        preflight.insist(done, one_card=ONE_CARD)
    except TuneError as error:
        print(json.dumps({"code": error.exit_code, "message": str(error)}))
        return error.exit_code
    print(json.dumps(done.to_dict() | {"lines": done.lines()}))
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
