"""In one process on the simulated card: what a program writes on purpose is no fault, and a flipped bit is one."""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from simcard import card  # the simulated card of this process
from torch import nn

import hf_rocm_tune
from hf_rocm_tune import saved_result
from hf_rocm_tune.errors import TuneError
from hf_rocm_tune.transfer import FaultSpec

DEVICE = "cuda"
ZERO = card.HARMS.index("zero")


class Loop:
    """A small model with a frozen and a trained layer, watched."""

    def __init__(self, faults: FaultSpec | None = None) -> None:
        torch.manual_seed(1)
        self.loaded: list[None] = []  # one for each tensor that a loader has sent
        self.transfers = hf_rocm_tune.VerifiedTransfers(DEVICE, check_every=1, faults=faults)
        self.frozen, self.head = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 2)
        self.model = nn.Sequential(self.frozen, self.head).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=0.1)
        self.transfers.watch(self.model, self.optimizer)
        self.step()

    def step(self) -> None:
        for (batch,) in self.transfers.batches([(torch.randn(4, 8),)]):
            self.model(batch).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def flip(tensor: torch.Tensor) -> None:
    """One bit, in the card's memory, behind torch's back."""
    torch.cuda.synchronize()
    byte = ctypes.c_uint8.from_address(tensor.data_ptr() + 2)
    byte.value ^= 16


@torch.no_grad()
def lerp(loop: Loop) -> None:  # as schedule-free optimizers' train and eval
    for parameter in loop.head.parameters():
        parameter.lerp_(torch.zeros_like(parameter), 0.3)


def copied_data(loop: Loop) -> None:  # as EMA's store, copy_to and restore
    for parameter in loop.model.parameters():
        kept = parameter.data.clone()
        parameter.data.copy_(kept * 0.5)


def new_storage(loop: Loop) -> None:  # as LocalSGD
    for parameter in loop.model.parameters():
        parameter.data = parameter.data * 0.5


@torch.no_grad()
def rows(loop: Loop) -> None:  # as textual inversion
    loop.head.weight[torch.tensor([0], device=DEVICE)] = 0.25


def loaded_state(loop: Loop) -> None:
    loop.model.load_state_dict({name: value * 0.5 for name, value in loop.model.state_dict().items()})
    loop.optimizer.load_state_dict(loop.optimizer.state_dict())


def another_optimizer(loop: Loop) -> None:
    loop.transfers.forget()
    loop.optimizer = torch.optim.SGD(loop.head.parameters(), lr=0.1, momentum=0.9)
    loop.transfers.watch(loop.optimizer, loop.model)


def trained_from_now(loop: Loop) -> None:
    loop.frozen.requires_grad_(True)
    loop.optimizer.add_param_group({"params": list(loop.frozen.parameters())})


WRITES: dict[str, Callable[[Loop], None]] = {
    function.__name__: function
    for function in (
        lerp, copied_data, new_storage, rows, loaded_state, another_optimizer, trained_from_now
    )
}  # fmt: skip
FLIPS: dict[str, Callable[[Loop], torch.Tensor]] = {
    "frozen weight": lambda loop: loop.frozen.weight,
    "trained weight": lambda loop: loop.head.weight,
    "optimizer state": lambda loop: loop.optimizer.state[loop.head.weight]["exp_avg"],
}


def outcome(act: Callable[[], Any]) -> str:
    try:
        act()
    except TuneError as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def stepped(write: Callable[[Loop], None]) -> str:
    loop = Loop()

    def act() -> None:
        write(loop)
        loop.step()
        loop.step()
        loop.transfers.check()

    try:
        return outcome(act)
    finally:
        loop.transfers.close()


def flipped_batch() -> str:
    loop = Loop()

    def act() -> None:
        for (batch,) in loop.transfers.batches([(torch.randn(4, 8),)] * 2):
            loop.model(batch).square().sum().backward()
            flip(batch)
            loop.optimizer.step()

    return outcome(act)


def damaged_file() -> str:
    loop = Loop()
    stock = saved_result.save_file

    def save(tensors: Any, file: Path, **more: Any) -> None:
        stock(tensors, file, **more)
        content = bytearray(file.read_bytes())
        content[-3] ^= 1
        file.write_bytes(content)

    with TemporaryDirectory() as directory:
        target = Path(directory) / "result"
        loop.transfers.save(loop.model.state_dict(), target)
        right = (target / "model.safetensors").read_bytes()
        saved_result.save_file = save
        said = outcome(lambda: loop.transfers.save(loop.model.state_dict(), target))
        saved_result.save_file = stock
        assert (target / "model.safetensors").read_bytes() == right
        (Path(directory) / "mine").mkdir()
        (Path(directory) / "mine" / "notes.txt").write_text("kept")
        foreign = outcome(lambda: loop.transfers.save(loop.model.state_dict(), Path(directory) / "mine"))
        assert (Path(directory) / "mine" / "notes.txt").read_text() == "kept"
    assert foreign.startswith("UsageError"), foreign
    return said


def before_the_first_check(change: Callable[[torch.Tensor], Any]) -> str:
    """A frozen weight as it arrived, changed before it is watched."""
    with hf_rocm_tune.VerifiedTransfers(DEVICE) as transfers:
        model = nn.Module()
        model.weight = nn.Parameter(torch.randn(8, 8).to(DEVICE), requires_grad=False)
        change(model.weight)
        transfers.watch(model)
        return outcome(transfers.check)


def replaced_error() -> str:
    """`load_state_dict` reports a copy that fails as an error of its own."""

    def load() -> None:
        spec = FaultSpec.parse("kind=zero,persist=1")
        with hf_rocm_tune.VerifiedTransfers(DEVICE, faults=spec):
            nn.Linear(8, 8, device=DEVICE).load_state_dict(nn.Linear(8, 8).state_dict())

    return outcome(load)


def damaged_state() -> str:
    """A file that `VerifiedAccelerator.save_state` has written, changed before it is read back."""
    accelerator = hf_rocm_tune.VerifiedAccelerator()
    model = nn.Linear(8, 8)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    stock = torch.save

    def save(state: Any, file: Any, *given: Any, **more: Any) -> None:
        stock(state, file, *given, **more)
        if Path(str(file)).name.startswith("optimizer"):
            stock({**state, "foreign": torch.ones(3)}, file, *given, **more)

    def harm(models: Any, weights: Any, directory: str) -> None:
        weights[0] = {name: value.clone() for name, value in weights[0].items()}
        flip(weights[0]["weight"])

    with TemporaryDirectory() as directory:
        target = Path(directory) / "state"
        accelerator.save_state(str(target))
        kept = {file.name: file.read_bytes() for file in target.iterdir()}
        hook = accelerator.register_save_state_pre_hook(harm)
        said = outcome(lambda: accelerator.save_state(str(target)))
        hook.remove()
        assert {file.name: file.read_bytes() for file in target.iterdir()} == kept
        torch.save = save
        also = outcome(lambda: accelerator.save_state(str(target)))
        torch.save = stock
        assert sorted(file.name for file in Path(directory).iterdir()) == ["state"]
    assert "optimizer.bin" in also, also
    accelerator.end_training()
    return said


def digests_read_back_wrong() -> str:
    """Copies of digests to the host are zeroed now and then: the digests are read again, and nothing has changed.

    The rate lets a few of about 60 digests be zeroed, and hardly ever (1e-5) all readings of one.
    """
    loop = Loop()

    def act() -> None:
        for _ in range(16):
            loop.step()
        loop.transfers.check()

    card.lib.sim_harm(1, ZERO, 0.1, 1)
    try:
        return outcome(act)
    finally:
        card.lib.sim_harm(1, 0, 0.0, 1)
        loop.transfers.close()


def digests_never_read_right() -> str:
    """Every copy to the host is zeroed: the copies are accused, not the memory."""
    loop = Loop()
    card.lib.sim_harm(1, ZERO, 1.0, 1)
    try:
        return outcome(loop.transfers.check)
    finally:
        card.lib.sim_harm(1, 0, 0.0, 1)
        loop.transfers.close()


def others_run_while_a_number_is_read() -> str:
    """`item` waits for the card; Python's lock is free meanwhile."""
    with hf_rocm_tune.VerifiedTransfers(DEVICE):
        number, ended, counted = torch.ones(1, device=DEVICE), threading.Event(), []

        def count() -> None:
            while not ended.wait(0.01):
                counted.append(None)

        other = threading.Thread(target=count)
        other.start()
        card.lib.sim_sleep(400_000)
        before = len(counted)
        number.item()
        seen = len(counted) - before
        ended.set()
        other.join()
    return "fine" if seen >= 5 else f"the other thread ran {seen} times"


def trained(faults: FaultSpec | None, *beside: Callable[[Loop, threading.Event], None]) -> tuple[list[float], str]:
    """The weights after ten steps that send an activation through the host, while other threads copy."""
    loop, ended, failed = Loop(faults), threading.Event(), []

    def run(act: Callable[[Loop, threading.Event], None]) -> None:
        try:
            while not ended.is_set():
                act(loop, ended)
        except BaseException as error:
            failed.append(repr(error))

    torch.manual_seed(2)
    rows = [(torch.randn(4, 8),) for _ in range(10)]  # before the others draw from the same generator
    threads = [threading.Thread(target=run, args=(act,)) for act in beside]
    for thread in threads:
        thread.start()
    for (batch,) in loop.transfers.batches(rows):
        through_host = loop.frozen(batch).requires_grad_().to("cpu").to(DEVICE)  # its gradient returns in autograd's
        loop.head(through_host).square().sum().backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    ended.set()
    for thread in threads:
        thread.join()
    loop.transfers.check()
    coverage = loop.transfers.describe()["coverage"]
    if coverage["crossed_bytes"] != coverage["verified_bytes"] or coverage["unverified"]:
        failed.append(f"unverified: {coverage}")
    loads_of = [row for row in loop.transfers.describe()["origins"] if row["origin"].endswith(":loads")]
    if [row["verified_bytes"] for row in loads_of] != [300 * 100 * 4 * len(loop.loaded)] * (2 if beside else 0):
        failed.append(f"{len(loop.loaded)} loads: {loads_of}")
    outcomes = {row["outcome"] for row in loop.transfers.report.incidents}
    if outcomes != ({"recovered"} if faults else set()):
        failed.append(f"incidents: {loop.transfers.report.incidents}")
    weights = loop.head.weight.detach().cpu().flatten().tolist()
    loop.transfers.close()
    return weights, "; ".join(failed)


def loads(loop: Loop, _: threading.Event) -> None:
    loop.loaded.append(None)
    sent = torch.randn(300, 100)
    if not torch.equal(sent.pin_memory().to(DEVICE, non_blocking=True).cpu(), sent):
        raise AssertionError("a loader's tensor has changed")


def writes_checkpoint(loop: Loop, _: threading.Event) -> None:
    """Of what does not change meanwhile: a copy of what does is torn, with and without this package."""
    file = BytesIO()
    torch.save({"frozen": loop.frozen.weight.detach().cpu(), "model": loop.frozen.state_dict()}, file)
    file.seek(0)
    if not torch.equal(torch.load(file, map_location="cpu")["model"]["weight"], loop.frozen.weight.cpu()):
        raise AssertionError("a frozen weight was written wrong")


def copying_at_once(faults: FaultSpec | None = None) -> str:
    """A loader, the prefetcher, autograd and a writer of checkpoints copy at once: the weights are those without."""
    alone, _ = trained(None)
    together, failed = trained(faults, loads, writes_checkpoint, loads)
    return failed or ("fine" if together == alone else "other weights")


def two_engines() -> str:
    first, second = Loop(), Loop()
    second.step()
    second.transfers.close()
    before = first.transfers.describe()["coverage"]["crossed_bytes"]
    first.step()
    first.transfers.check()
    return "fine" if first.transfers.describe()["coverage"]["crossed_bytes"] > before else "not served"


print(
    json.dumps(
        {
            "writes": {name: stepped(write) for name, write in WRITES.items()},
            "flips": {name: stepped(lambda loop, find=find: flip(find(loop))) for name, find in FLIPS.items()},
            "batch": flipped_batch(),
            "file": damaged_file(),
            "initialised": before_the_first_check(nn.init.normal_),
            "flipped at the start": before_the_first_check(flip),
            "replaced error": replaced_error(),
            "state": damaged_state(),
            "digests": digests_read_back_wrong(),
            "no digest": digests_never_read_right(),
            "number": others_run_while_a_number_is_read(),
            "at once": copying_at_once(),
            "at once, with faults": copying_at_once(FaultSpec.parse("kind=flip,rate=0.05,seed=3")),
            "engines": two_engines(),
        }
    )
)
