"""Executes the code of model cards as a reader would: in a process that has never heard of this package.

Reads JSON lines {"card", "directory", "logits"} from standard input. The card's first block is executed in the
directory, its logits are compared with those that the training process wrote, and then its second block is executed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from typing import Any

import torch

from tests.e2e.probe import logits


def main() -> None:
    """Answers each line."""
    for line in sys.stdin:
        job = json.loads(line)
        os.chdir(job["directory"])
        blocks = re.findall(r"^```python\n(.*?)\n^```$", job["card"], re.DOTALL | re.MULTILINE)
        names: dict[str, Any] = {}
        exec(blocks[0], names)
        found, expected = logits(names["model"]), torch.load(job["logits"], weights_only=True)
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(blocks[1], names)
        answer = {
            "equal": torch.equal(found, expected),
            "difference": (found - expected).abs().max().item(),
            "blocks": len(blocks),
            "said": said.getvalue(),
            "our_modules": [name for name in sys.modules if name.split(".")[0] == "hf_rocm_tune"],
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
