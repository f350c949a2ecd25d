"""A process that has imported everything once and forks a real process for each command.

Importing torch, transformers and trl costs over five seconds a process. The zygote pays that once; every command then
runs in a forked process of its own: own environment, directory, standard streams, exit code, and it can be killed.
The zygote itself never runs a tensor operation, so no OpenMP thread exists when it forks, and it never asks for a card:
a process that has leaves its forked children without one. What it has imported is kept
from the garbage collector (``gc.freeze``): a collection in a child would copy every page of it.

It reads one JSON request a line from standard input and answers one JSON line:

    {"do": "start", "argv": [...], "env": {...}, "cwd": "...", "stdout": "file", "stderr": "file"} -> {"pid": n}
    {"do": "wait", "pid": n, "timeout": seconds}          -> {"status": waitpid status, or null when still running}
"""

from __future__ import annotations

import functools
import gc
import importlib
import io
import itertools
import json
import os
import resource
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import hf_rocm_tune  # noqa: F401  # before torch: it chooses the card


@contextmanager
def _card_unasked() -> Iterator[None]:
    """Within the block a forked process has answered what bitsandbytes asks about the cards when it is imported.

    Raises:
        AssertionError: something else has asked, so that no forked process could have a card.
    """
    import torch

    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        found = [torch.cuda.get_device_properties(card) for card in range(torch.cuda.device_count())]
        known = [
            {name: getattr(each, name) for name in dir(each) if isinstance(getattr(each, name), int | str)}
            for each in found
        ]
        os.write(writer, json.dumps(known).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        cards = [SimpleNamespace(**known) for known in json.load(answer)]
    os.waitpid(pid, 0)
    if not cards:
        yield
        return
    answers: list[tuple[Any, str, Any]] = [
        (torch._C, "_cuda_getDeviceCount", lambda: len(cards)),
        (torch.cuda, "device_count", lambda: len(cards)),
        (torch.cuda, "get_device_properties", lambda card=0: cards[_number(card)]),
        (torch.cuda, "get_device_capability", lambda card=0: (cards[_number(card)].major, cards[_number(card)].minor)),
    ]
    stock = [(owner, name, getattr(owner, name)) for owner, name, _ in answers]
    for owner, name, answer in answers:
        setattr(owner, name, answer)
    yield
    for owner, name, own in stock:
        setattr(owner, name, own)
    assert not torch.cuda.is_initialized(), "importing the libraries has initialised the card: no child can use it"


def _number(card: Any) -> int:
    import torch

    return card.idx if isinstance(card, torch.cuda.device) else torch.device(card).index or 0


def _dump_logits_after_saving(target: str) -> None:
    """When the command has saved its result, the logits of the live model for fixed tokens go to a file."""
    import torch

    from hf_rocm_tune.train.trainer import VerifiedTransferMixin
    from tests.e2e.probe import logits

    stock = VerifiedTransferMixin.save_model

    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        stock(self, output_dir, _internal_call)
        if not _internal_call:
            torch.save(logits(self.model), target)

    VerifiedTransferMixin.save_model = save_model


def _stop_in_sum(number: int) -> None:
    """This rank is stopped in a backward pass, at the n-th gradient that tensor parallelism adds up."""
    from hf_rocm_tune.cards.tensor_parallel import Reductions

    stock, left = Reductions.total, itertools.count(1 - number)

    def total(self: Any, summand: Any, name: str) -> Any:
        if "gradient" in name and next(left) == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        return stock(self, summand, name)

    Reductions.total = total


def _child(request: dict[str, Any]) -> None:
    for stream, name in ((1, "stdout"), (2, "stderr")):
        handle = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(handle, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # as Python does: it keeps them open
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    os.setpgid(0, 0)
    if "simcard" in sys.modules:
        sys.modules["simcard"].configure()

    entry = importlib.import_module(f"hf_rocm_tune.{os.environ.get('METHOD', 'sft')}")
    code = 1
    try:
        if "PREFLIGHT_LIMIT" in os.environ:
            from hf_rocm_tune.cards import preflight

            preflight.run.__kwdefaults__["limit_s"] = float(os.environ["PREFLIGHT_LIMIT"])
        if "PRETENDED_MACHINE" in os.environ:
            from tests.e2e.pretended import pretend

            pretend(os.environ["PRETENDED_MACHINE"])
        if "STOPS_IN_SUM" in os.environ:
            _stop_in_sum(int(os.environ["STOPS_IN_SUM"]))
        if "WRONG_PRODUCTS" in os.environ:
            from tests.train.faulty_products import Faults

            Faults(**json.loads(os.environ["WRONG_PRODUCTS"])).__enter__()
        if "MEMORY_ATTACK" in os.environ:
            from tests.e2e.memory_attacks import arm

            attacks = json.loads(os.environ["MEMORY_ATTACK"])
            for attack in attacks if isinstance(attacks, list) else [attacks]:
                arm(**attack)
        if "DUMP_LOGITS" in os.environ:
            _dump_logits_after_saving(os.environ["DUMP_LOGITS"])
        if "ATTACK" in os.environ:
            from tests.e2e import attacks

            attacks.begin(json.loads(os.environ["ATTACK"]))
        if "FILE_LIMIT" in os.environ:  # bytes of a file, beyond which the system refuses to write
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["FILE_LIMIT"]),) * 2)
        sys.argv[1:] = request["argv"]
        if "SCRIPT" in os.environ:  # a program that imports the package
            runpy.run_path(os.environ["SCRIPT"], run_name="__main__")
            code = 0
        elif "VERB" in os.environ:  # another command than sft
            from hf_rocm_tune import cli

            code = cli.main([os.environ["VERB"], *request["argv"]])
        else:
            code = entry.main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait(pid: int, timeout: float) -> int | None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.02)
    return None


def _import() -> None:
    import bitsandbytes  # noqa: F401
    import datasets  # noqa: F401
    import matplotlib.backends.backend_agg
    import matplotlib.pyplot  # noqa: F401
    import peft.tuners.lora.bnb
    import peft.utils.transformers_weight_conversion  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401
    from matplotlib.figure import Figure
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    import hf_rocm_tune.job.run
    import hf_rocm_tune.publish.page
    import hf_rocm_tune.train.trainer  # noqa: F401
    from hf_rocm_tune import upstream
    from hf_rocm_tune.machine import software
    from hf_rocm_tune.publish import templates

    # What every command would do again, a third of its time: imports of single functions, tables, fonts, templates.
    upstream.check_all()
    for name in [each for each in sys.modules if each.partition(".")[0] == "trackio"]:
        del sys.modules[name]  # it reads its directory from the environment when it is imported
    get_checkpoint_conversion_mapping("llama")
    software._read_wheels = functools.cache(software._read_wheels)
    software._read_wheels()
    templates.compiled("readme.md.j2", html=False)
    figure = Figure()
    figure.add_subplot().plot([1, 2])
    figure.savefig(io.BytesIO())


def main() -> None:
    """Imports everything, says so, and serves requests until standard input closes."""
    with _card_unasked():
        _import()
    gc.collect()
    gc.freeze()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "start":
            pid = os.fork()
            if pid == 0:
                _child(request)
            print(json.dumps({"pid": pid}), file=answers)
        else:
            print(json.dumps({"status": _wait(request["pid"], request["timeout"])}), file=answers)


if __name__ == "__main__":
    main()
