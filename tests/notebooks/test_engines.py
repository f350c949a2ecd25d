"""Several engines in one notebook: a cell that is executed again makes a second one while the first is open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests import simcard

IMPORTS = """
import hf_rocm_tune

# isort: split
import torch
from torch import nn
"""
ENGINE = """
transfers = hf_rocm_tune.VerifiedTransfers("cuda")
torch.manual_seed(0)
model = nn.Linear(16, 4).to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
transfers.watch(model, optimizer)
for rows in transfers.batches([torch.full((8, 16), float(number)) for number in range(5)]):
    model(rows).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
engines.append(transfers)
"""
USED_LATER = """
first, second = engines
for each in engines:
    each.check()
before = [each.report.to_dict()["copies"]["bytes"] for each in engines]
torch.ones(100).to("cuda").cpu()                     # to the second, the last one that is open
second.close()
torch.ones(1000).to("cuda").cpu()                    # to the first again
first.close()
torch.ones(10000).to("cuda").cpu()                   # to none
"""
RESULT = """
import json
content = [each.describe() for each in engines]
print(json.dumps({
    "gained": [each["copies"]["bytes"] - known for each, known in zip(content, before)],
    "steps": [each["steps"] for each in content],
    "batches": [each["batches"]["tensors"] for each in content],
    "covered": [each["coverage"]["verified_bytes"] == each["coverage"]["crossed_bytes"] > 0 for each in content],
    "incidents": [each["incidents"] for each in content],
}))
"""


@pytest.mark.long
def test_a_cell_that_is_executed_twice_leaves_two_engines_that_count_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        for name, value in simcard.environment().items():
            monkeypatch.setenv(name, value)
    except simcard.NoCompiler as missing:
        pytest.skip(str(missing))
    cells = [nbformat.v4.new_code_cell(code) for code in (IMPORTS, "engines = []", ENGINE, ENGINE, USED_LATER, RESULT)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    resources = {"metadata": {"path": str(tmp_path)}}
    done: Any = NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    found = json.loads(done.cells[-1].outputs[0].text)
    assert found["gained"] == [8000, 800]
    assert found["steps"] == found["batches"] == [5, 5]
    assert found["covered"] == [True, True] and found["incidents"] == [[], []]
