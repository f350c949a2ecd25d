"""Gloo with the interception in place: two processes of `script`, on CPUs and with a simulated card each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import simcard
from tests.e2e.command import CommandServer, Result
from tests.two_ranks import environments

TRAINING = """
import argparse, pathlib, sys, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

flags = argparse.ArgumentParser()
flags.add_argument("--output_dir", type=pathlib.Path)
flags.add_argument("--card", action="store_true")
given = flags.parse_args()
dist.init_process_group("gloo")
rank = dist.get_rank()
given.output_dir.mkdir(exist_ok=True)
device = torch.device("cuda", rank) if given.card else torch.device("cpu")

# every collective, of tensors on the host, some of which come from the card and go back
sent = (torch.arange(500, dtype=torch.float64) + 1000 * rank).to(device)
host = sent.cpu().clone()
dist.all_reduce(host)
assert torch.equal(host, 2 * torch.arange(500, dtype=torch.float64) + 1000), host
assert torch.equal(host.to(device).cpu(), host)
gathered = [torch.empty(500, dtype=torch.float64) for _ in range(2)]
dist.all_gather(gathered, sent.cpu())
assert [int(row[0]) for row in gathered] == [0, 1000]
told = sent.cpu().clone()
dist.broadcast(told, 1)
assert int(told[0]) == 1000
if rank:
    dist.send(sent.cpu().half(), 0)
else:
    received = torch.empty(500, dtype=torch.half)
    dist.recv(received, 1)
    assert int(received[0]) == 1000
objects = [None, None]
dist.all_gather_object(objects, sent[:3])
assert [int(each[0]) for each in objects] == [0, 1000]
work = dist.all_reduce(sent.cpu().clone(), async_op=True)
sent.cpu()
work.wait()

torch.manual_seed(7)
model = torch.nn.Linear(16, 16).to(device)
if not given.card:
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
rows = torch.randn(6, 4, 16)
for number in range(6):
    loss = model((rows[number] * (rank + 1)).to(device)).square().mean()
    loss.backward()
    if given.card:  # averages by hand, through the host
        for parameter in model.parameters():
            average = parameter.grad.cpu().clone()
            dist.all_reduce(average)
            parameter.grad.copy_(average / 2)
    optimizer.step()
    optimizer.zero_grad()
    print(f"epoch {number}: loss {loss.item():.9f}", flush=True)
torch.save({name: value.cpu() for name, value in model.state_dict().items()}, given.output_dir / f"{rank}.pt")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.long
@pytest.mark.parametrize("with_card", [False, True], ids=["CPU", "card"])
def test_ranks_over_gloo_train_as_without_us_and_all_that_crosses_is_verified(
    with_card: bool, server_for: Callable[[bool], CommandServer], tmp_path: Path
) -> None:
    script, runner = tmp_path / "train.py", tmp_path / "runner.py"
    script.write_text(TRAINING)
    runner.write_text("import sys\nfrom hf_rocm_tune import script\nsys.exit(script.main())\n")
    try:
        more = {**simcard.environment(), "SIMCARD_DEVICES": "2", "SIMCARD_POISON": "1"} if with_card else {}
    except simcard.NoCompiler as missing:
        pytest.skip(str(missing))
    printed = {}
    for ours in (False, True):
        output = tmp_path / ("ours" if ours else "stock")
        output.mkdir()
        flags = [*(["--card"] if with_card else []), "--output_dir", str(output)]
        argv = [str(script), *flags] if ours else flags
        ranks = environments(tmp_path / "exit.json", **more, SCRIPT=str(runner if ours else script))
        started = [server_for(with_card).start(*argv, env=rank, cwd=tmp_path) for rank in ranks]
        ended: list[Result] = [one.wait() for one in started]
        assert [one.code for one in ended] == [0, 0], [one.stderr[-1500:] for one in ended]
        printed[ours] = [line for one in ended for line in one.stdout.splitlines() if line.startswith("epoch")]
    assert printed[True] == printed[False] and len(printed[True]) == 12
    for place in (tmp_path / "ours", tmp_path / "ours" / "rank1"):
        report = json.loads((place / "transfer_report.json").read_text())
        crossed, verified = (report["coverage"][name] for name in ("crossed_bytes", "verified_bytes"))
        assert crossed == verified and (crossed > 10_000) == with_card, report["coverage"]
        assert report["coverage"]["unverified"] == [] and report["incidents"] == []
