"""What the simulated card keeps to, by experiment: the tests on it are worth as much as these rules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import simcard

EXPERIMENTS = """
import torch, simcard
from hf_rocm_tune.train import device_memory
card = torch.device("cuda", 0)

# work runs later than the call; a stream waits for what it is told to, and for nothing else
simcard.delay(100000, 100001, 0, 0)
value, other = torch.zeros(1000, device=card), torch.cuda.Stream()
torch.cuda.synchronize()
value.fill_(7)
with torch.cuda.stream(other):
    early = value.clone()
other.synchronize()
seen = early.sum()
other.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(other):
    late = value.clone()
torch.cuda.synchronize()
assert late.sum().item() == 7000, late.sum()
assert seen.item() == 0, seen
simcard.delay()

# freed memory goes to the next request of the same stream at once, unless another stream is recorded on it
block = torch.empty(1 << 20, dtype=torch.uint8, device=card)
address = block.data_ptr()
del block
block = torch.empty(1 << 20, dtype=torch.uint8, device=card)
assert block.data_ptr() == address
simcard.delay(0, 0, 200000, 200001)
with torch.cuda.stream(other):
    block.fill_(1)
block.record_stream(other)
del block
assert torch.empty(1 << 20, dtype=torch.uint8, device=card).data_ptr() != address
simcard.delay()

# a copy touches page-locked memory when it runs
pinned, target = torch.ones(1000, pin_memory=True), torch.empty(1000, device=card)
simcard.delay(200000, 200001, 0, 0)
target.copy_(pinned, non_blocking=True)
pinned.fill_(2)
simcard.delay()
assert target.sum().item() == 2000

# host tensors are no operands
try:
    target + torch.ones(1000)
except RuntimeError as error:
    assert "same device" in str(error)
else:
    raise AssertionError("a host tensor was taken")

# the capacity, and what torch tells of it
read = device_memory.read(card)
assert read.total == 1 << 26 and read.allocated > 0
assert read.free == read.total - read.reserved
try:
    torch.empty(1 << 27, dtype=torch.uint8, device=card)
except torch.OutOfMemoryError:
    pass
else:
    raise AssertionError("more than there is")
assert torch.cuda.memory_stats()["num_ooms"] == 1 and device_memory.read(card).retries == 1
assert torch.cuda.get_device_properties(0).gcnArchName == "gfx1100"
assert torch.cuda.device_count() == 2 and torch.empty(1, device="cuda:1").device.index == 1

# numbers of a seed
torch.cuda.manual_seed(3)
first, state = torch.randn(5, device=card), torch.cuda.get_rng_state()
again = torch.randn(5, device=card)
torch.cuda.set_rng_state(state)
assert torch.equal(torch.randn(5, device=card), again) and not torch.equal(first, again)

# torch's rule: who has asked for a card leaves none to forked children, who may seed themselves all the same
import os
def in_a_fork(use):
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            use()
            said = "nothing"
        except RuntimeError as error:
            said = str(error)
        os.write(writer, said.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    return os.read(reader, 1000).decode()
for use in (lambda: torch.ones(1, device=card), lambda: torch.ones(1).to(card), torch.cuda.current_device):
    assert in_a_fork(use).startswith("Cannot re-initialize CUDA in forked subprocess"), in_a_fork(use)
assert in_a_fork(lambda: torch.manual_seed(0)) == "nothing" and in_a_fork(torch.cuda.is_available) == "nothing"
"""


def test_the_card_keeps_its_rules() -> None:
    try:
        environment = {**os.environ, **simcard.environment()}
    except simcard.NoCompiler as missing:
        pytest.skip(str(missing))
    environment |= {"SIMCARD_CAPACITY": str(1 << 26), "SIMCARD_ARCH": "gfx1100", "SIMCARD_DEVICES": "2"}
    done = subprocess.run(
        [sys.executable, "-c", EXPERIMENTS], env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]


COUNTED = """
import torch
x = torch.ones(1000, device="cuda")
(x + x).to(torch.float64)
torch.cuda.synchronize()
"""


@pytest.mark.long
def test_operators_by_the_cpus_code_are_counted_on_request(tmp_path: Path) -> None:
    """An addition of 4,000 bytes reads two operands and writes one; a cast is a copy."""
    try:
        environment = {**os.environ, **simcard.environment(), "SIMCARD_OPERATORS": str(tmp_path / "operators")}
    except simcard.NoCompiler as missing:
        pytest.skip(str(missing))
    subprocess.run([sys.executable, "-c", COUNTED], env=environment, check=True, timeout=240)
    lines = [line.split("\t") for line in (tmp_path / "operators").read_text().splitlines()]
    rows = {name.partition(".")[0]: (int(calls), int(nbytes)) for name, calls, nbytes in lines}
    assert rows["aten::copy_"] == (1, 12000)
    assert rows["aten::add"] == (1, 12000)
