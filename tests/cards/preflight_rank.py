"""A rank that only makes the preflight: ``python -m tests.cards.preflight_rank '{"asked": "auto"}'``, the rest of
what it needs from the environment, as a launcher sets it. Prints the decision as JSON, or the message of its end.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from hf_rocm_tune.cards import preflight
from hf_rocm_tune.errors import TuneError

ONE_CARD = "`one card`"


def main(settings: dict[str, str]) -> int:
    device = {"device": "cpu", "address": None}
    limits = {name: float(settings[name]) for name in ("meet_s", "limit_s") if name in settings}
    try:
        place = Path(settings["place"])
        done = preflight.run(
            asked=settings.get("asked", "auto"), device=device, environ=os.environ, place=place, **limits
        )  # type: ignore[arg-type]
        preflight.insist(done, one_card=ONE_CARD)
    except TuneError as error:
        print(json.dumps({"code": error.exit_code, "message": str(error)}))
        return error.exit_code
    print(json.dumps(done.to_dict() | {"lines": done.lines()}))
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
