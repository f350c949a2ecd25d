"""Faults put into a running command from outside: upstream's functions are wrapped, and bits flip through raw pointers.

Nothing of ours is touched, and nothing is told: our code sees memory and files that are not what they were. Each attack
happens once in a process, so a run that goes back is left alone by it.
"""

from __future__ import annotations

import ctypes
import functools
import json
import mmap
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.e2e import step_attacks


class Tell:
    """An attack calls it when it has happened; one line more is in its log."""

    def __init__(self, log: str) -> None:
        self.done, self._log = False, log

    def __call__(self, what: str) -> None:
        self.done = True
        if self._log:
            with open(self._log, "a", encoding="utf-8") as file:
                file.write(f"{what}\n")


def flip(tensor: Tensor, rng: random.Random) -> None:
    """Flips one bit of a tensor's memory; torch does not hear of it."""
    at = tensor.data_ptr() + rng.randrange(tensor.numel() * tensor.element_size())
    ctypes.c_ubyte.from_address(at).value ^= 1 << rng.randrange(8)


def arm(*, kind: str, seed: int = 0, step: int = 2, log: str = "", **more: Any) -> None:
    """Prepares one attack.

    Args:
        kind: a key of `ATTACKS`.
        seed: decides where it hits.
        step: the optimizer step, from 1 on, in which it happens, where it has one.
        log: file that tells that it has happened.
        more: for the attack.
    """
    ATTACKS[kind](random.Random(f"{kind} {seed}"), step, Tell(log), **more)


def _wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    stock = getattr(owner, name)
    setattr(owner, name, functools.wraps(stock)(make(stock)))  # the signature stays what it was


def _at(moment: str, step: int, tell: Tell, do: Callable[[Any], None]) -> None:
    """Calls `do` once with the trainer, in a step at a moment of `MOMENTS`."""
    name, ahead, before = MOMENTS[moment]

    def make(stock: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, *arguments: Any, **keywords: Any) -> Any:
            due = not tell.done and self.state.global_step >= step - ahead
            if due and before:
                do(self)
            result = stock(self, *arguments, **keywords)
            if due and not before:
                do(self)
            return result

        return wrapped

    _wrap(_owner_of(name), name, make)


def _owner_of(name: str) -> Any:
    """The class of the command's trainer that has this method, or transformers' own."""
    import trl
    from transformers import Trainer

    own = getattr(trl, f"{os.environ.get('METHOD', 'sft').replace('reward', 'Reward')}Trainer", None)
    own = own or getattr(trl, f"{os.environ.get('METHOD', 'sft').upper()}Trainer")
    return own if name in vars(own) else Trainer


MOMENTS = {
    "before forward": ("compute_loss", 1, True),
    "after backward": ("training_step", 1, False),
    "before clipping": ("_clip_grad_norm", 1, True),
    "before evaluation": ("evaluate", 0, True),
    "while saving": ("_save_checkpoint", 0, True),
    "while saving the result": ("save_model", 0, True),
}
"""Upstream's method, 1 where ``global_step`` does not count the step yet, and whether to come before it or after."""


# ---- frozen -------------------------------------------------------------------------------------------------


def _frozen_of(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, Tensor]]:
    """Weights below adapters, and the quantisation state of 4-bit ones."""
    found: list[tuple[torch.nn.Module, str, Tensor]] = []
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is None or "lora_" in name:
            continue
        found.append((module, "weight", weight))
        if (state := getattr(weight, "quant_state", None)) is not None:
            found.append((module, "", state.absmax))
    return found


def _after_load(rng: random.Random, step: int, tell: Tell) -> None:
    """A frozen weight changes between its loading and the first step."""
    del step
    from trl.trainer import utils

    def make(stock: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            loaded = stock(*arguments, **keywords)
            if not tell.done:
                _, name, tensor = rng.choice(_frozen_of(loaded[0] if isinstance(loaded, tuple) else loaded))
                flip(tensor, rng)
                tell(name)
            return loaded

        return wrapped

    _wrap(utils, "create_model_from_path", make)


def _replaced(rng: random.Random, step: int, tell: Tell, way: str, same: bool = False) -> None:
    """A frozen weight is replaced by another tensor; `same`: by an equal one."""

    def do(trainer: Any) -> None:
        module, name, tensor = rng.choice([row for row in _frozen_of(trainer.model) if row[1]])
        other = tensor.detach().clone()
        if torch.device(other.device).type != "cpu":
            torch.cuda.synchronize()
        if not same:
            flip(other, rng)
        if way == "data":
            tensor.data = other
        elif way == "set_":
            with torch.no_grad():
                tensor.set_(other)
        else:
            module._parameters[name] = torch.nn.Parameter(other, requires_grad=False)
        tell(f"{type(module).__name__}.{name}")

    _at("after backward", step, tell, do)


def _evaluated_only(trainer: Any) -> torch.nn.Module:
    """The reference model, or the reward model."""
    found: torch.nn.Module = getattr(trainer, "ref_model", None) or trainer.reward_funcs[0]
    return getattr(found, "module", found)


def _reference(rng: random.Random, step: int, tell: Tell, moment: str) -> None:
    """A weight of a model that is only evaluated changes during the training."""

    def do(trainer: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        flip(rng.choice(list(_evaluated_only(trainer).parameters())), rng)
        tell(moment)

    _at(moment, step, tell, do)


def _host_model(rng: random.Random, step: int, tell: Tell) -> None:
    """A reward model changes between its loading and the moment when the trainer gets it."""
    del step
    from transformers import AutoModelForSequenceClassification

    stock = AutoModelForSequenceClassification.from_pretrained

    def loaded(*arguments: Any, **keywords: Any) -> Any:
        model = stock(*arguments, **keywords)
        if not tell.done:
            flip(rng.choice([each for each in model.parameters() if each.numel() > 99]), rng)
            tell("host model")
        return model

    AutoModelForSequenceClassification.from_pretrained = loaded


class _Reader:
    """A reader of safetensors that returns one tensor, whose name contains ``tensor``, with a flipped bit."""

    def __init__(self, opened: Any, rng: random.Random, tell: Tell, tensor: str) -> None:
        self._opened, self._rng, self._tell = opened, rng, tell
        self._victim = rng.choice([name for name in sorted(opened.keys()) if tensor in name])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def __enter__(self) -> _Reader:
        self._opened.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._opened.__exit__(*raised)

    def get_tensor(self, name: str) -> Tensor:
        found: Tensor = self._opened.get_tensor(name)
        if name == self._victim:
            found = found.clone()
            flip(found, self._rng)
        return found

    def get_slice(self, name: str) -> Any:
        return _Slice(self, name) if name == self._victim else self._opened.get_slice(name)


class _Slice:
    def __init__(self, reader: _Reader, name: str) -> None:
        self._reader, self._name = reader, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader._opened.get_slice(self._name), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self._reader.get_tensor(self._name)[index]


def _misreading(rng: random.Random, step: int, tell: Tell, directory: str, nth: int = 1, tensor: str = "") -> None:
    """The reader returns other bytes than the weight files of a directory have, when they are opened the n-th time."""
    del step
    from transformers import modeling_utils

    opened = [0]

    def make(stock: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(filename: Any, framework: str, device: Any = "cpu", *, backend: str = "mmap") -> Any:
            found = stock(filename, framework, device=device, backend=backend)
            opened[0] += str(filename).startswith(directory)
            return _Reader(found, rng, tell, tensor) if opened[0] == nth else found

        return wrapped

    stock = modeling_utils.safe_open
    modeling_utils.safe_open = make(stock)
    tell("armed")


def _mapped(rng: random.Random, step: int, tell: Tell) -> None:
    """The mapped file has another bit than the file on the disk, in one of its first tensors."""
    del step
    which, seen = rng.randrange(15), [0]

    def make(stock: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(content: Any, *arguments: Any, **keywords: Any) -> Tensor:
            found: Tensor = stock(content, *arguments, **keywords)
            if isinstance(content, mmap.mmap):
                seen[0] += 1
                if seen[0] == which + 1:
                    found = found.clone()
                    flip(found, rng)
                    tell(f"tensor {which} of the mapped file")
            return found

        return wrapped

    _wrap(torch, "frombuffer", make)


# ---- trained ------------------------------------------------------------------------------------------------


def _trained(rng: random.Random, step: int, tell: Tell, moment: str, what: str) -> None:
    """A trained weight or a tensor of the optimizer's state changes between two updates."""

    def do(trainer: Any) -> None:
        parameters = [each for group in trainer.optimizer.param_groups for each in group["params"]]
        if what == "weight":
            tensors = parameters
        else:
            tensors = [trainer.optimizer.state[each][what] for each in parameters]
        if tensors[0].device.type != "cpu":
            torch.cuda.synchronize()
        flip(rng.choice(tensors), rng)
        tell(what)

    _at(moment, step, tell, do)


def _wrong_update(rng: random.Random, step: int, tell: Tell, what: str) -> None:
    """An update itself gives a wrong weight or optimizer state, so there is nothing on this rank to compare it with."""
    from transformers.trainer_callback import CallbackHandler

    def make(stock: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, args: Any, state: Any, control: Any) -> Any:
            if not tell.done and state.global_step == step - 1:
                parameters = [each for group in self.optimizer.param_groups for each in group["params"]]
                flip(
                    rng.choice([each if what == "weight" else self.optimizer.state[each][what] for each in parameters]),
                    rng,
                )
                tell(what)
            return stock(self, args, state, control)

        return wrapped

    _wrap(CallbackHandler, "on_optimizer_step", make)


def _resumed_state(rng: random.Random, step: int, tell: Tell) -> None:
    """Optimizer state changes in host memory between its comparison with the manifest and its loading."""
    del step
    from hf_rocm_tune.survive import saved_state

    def make(stock: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(state: Any, *arguments: Any, **keywords: Any) -> Any:
            if not tell.done:
                rows = [each for row in state["state"].values() for each in row.values() if each.numel() > 1]
                flip(rng.choice(rows), rng)
                tell("optimizer")
            return stock(state, *arguments, **keywords)

        return wrapped

    _wrap(saved_state, "load_optimizer", make)


def _initial_adapter(rng: random.Random, step: int, tell: Tell) -> None:
    """PiSSA's initial adapter, which is kept on the host for the result, changes."""

    def do(trainer: Any) -> None:
        kept = trainer._checkpoints.start._tensors.values()
        flip(rng.choice([tensor for tensor, _ in kept]), rng)
        tell("initial adapter")

    _at("before forward", step, tell, do)


def _rate(rng: random.Random, step: int, tell: Tell) -> None:
    """The optimizer's learning rate changes by one bit, or a number of the scheduler's does."""

    def do(trainer: Any) -> None:
        if rng.random() < 0.5:
            group = rng.choice(trainer.optimizer.param_groups)
            number = torch.tensor(group["lr"], dtype=torch.float64)
            flip(number, rng)
            group["lr"] = number.item()
        else:
            scheduler = trainer.lr_scheduler
            scheduler = getattr(scheduler, "scheduler", scheduler)
            scheduler.last_epoch ^= 1 << rng.randrange(4)
        tell("rate")

    _at("before forward", step, tell, do)


# ---- batches ------------------------------------------------------------------------------------------------


def _tensors_of(batch: Any, rng: random.Random) -> Tensor:
    name = rng.choice(sorted(name for name in batch if torch.is_tensor(batch[name])))
    found: Tensor = batch[name]
    return found


def _waiting_batch(rng: random.Random, step: int, tell: Tell, number: int) -> None:
    """A batch of an accumulation window changes while it waits: on its way, on the device or on the host."""
    from hf_rocm_tune import VerifiedTransferMixin

    def make(stock: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, *arguments: Any, **keywords: Any) -> Any:
            batches, count = stock(self, *arguments, **keywords)
            if not tell.done and self.state.global_step == step - 1:
                tensor = _tensors_of(batches[number], rng)
                if tensor.device.type != "cpu":
                    torch.cuda.synchronize()
                _run_copies(self)
                flip(tensor, rng)
                tell(f"{number} {tensor.device.type}")
            return batches, count

        return wrapped

    _wrap(VerifiedTransferMixin, "get_batch_samples", make)


def _run_copies(trainer: Any) -> None:
    # Not to flip what a copy is just about to overwrite. A pause would do where a card copies by itself.
    for mover in getattr(trainer.mover, "cards", (trainer.mover,)):
        backend = getattr(mover._backend, "inner", mover._backend)
        if hasattr(backend, "_run"):  # the host plays the copy engine
            backend._run()


def _counted_batch(rng: random.Random, step: int, tell: Tell) -> None:
    """The labels change on the host just before they are counted."""
    from transformers import Trainer

    def make(stock: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, batch_samples: list[Any], *arguments: Any, **keywords: Any) -> Any:
            if not tell.done and self.state.global_step == step - 1:
                labels = rng.choice(batch_samples)["labels"]
                assert labels.device.type == "cpu"
                masked = (labels == -100).flatten().nonzero()
                at = int(masked[0]) if len(masked) and rng.random() < 0.5 else labels.numel() - 1
                ctypes.c_int64.from_address(labels.data_ptr() + 8 * at).value ^= 127
                tell("labels")
            return stock(self, batch_samples, *arguments, **keywords)

        return wrapped

    _wrap(Trainer, "_get_num_items_in_batch", make)


def _miscounted_batch(rng: random.Random, step: int, tell: Tell) -> None:
    """The labels read differently while they are counted, and are right again afterwards."""
    from transformers import Trainer

    def make(stock: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, batch_samples: list[Any], *arguments: Any, **keywords: Any) -> Any:
            if tell.done or self.state.global_step != step - 1:
                return stock(self, batch_samples, *arguments, **keywords)
            labels = rng.choice(batch_samples)["labels"]
            right, wanted = labels.clone(), rng.choice(labels[..., 1:].flatten().ne(-100).nonzero().flatten().tolist())
            row, column = divmod(wanted, labels.shape[1] - 1)
            labels[row, column + 1] = -100
            found = stock(self, batch_samples, *arguments, **keywords)
            labels.copy_(right)
            tell("labels")
            return found

        return wrapped

    _wrap(Trainer, "_get_num_items_in_batch", make)


def _used_batch(rng: random.Random, step: int, tell: Tell) -> None:
    """A batch changes in device memory after its verdict, just before the model reads it."""
    owner = _owner_of("compute_loss")

    def make(stock: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
            if not tell.done and self.state.global_step == step - 1 and model.training:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                tensor = _tensors_of(inputs, rng)
                at = rng.randrange(tensor.numel()) * tensor.element_size()  # the low byte: a token that exists
                ctypes.c_ubyte.from_address(tensor.data_ptr() + at).value ^= 1 << rng.randrange(7)
                tell(f"{list(tensor.shape)}")
            return stock(self, model, inputs, *arguments, **keywords)

        return wrapped

    _wrap(owner, "compute_loss", make)


# ---- files --------------------------------------------------------------------------------------------------


def _file_misread(rng: random.Random, step: int, tell: Tell, file: str) -> None:
    """The tensors come from another reading of the file than the SHA-256: from a bad one."""
    del step
    from trl.trainer import utils

    def flip_in_file() -> Callable[[], None]:
        before = os.stat(file)
        with open(file, "r+b") as stream:
            header = int.from_bytes(stream.read(8), "little")
            at = rng.randrange(8 + header, before.st_size)

            def turn() -> None:
                with open(file, "r+b") as stream:
                    stream.seek(at)
                    byte = stream.read(1)[0]
                    stream.seek(at)
                    stream.write(bytes([byte ^ 4]))
                os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

        turn()
        return turn

    def make(stock: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            back = flip_in_file()
            try:
                return stock(*arguments, **keywords)
            finally:
                back()
                tell(file)

        return wrapped

    _wrap(utils, "create_model_from_path", make)


# ---- copies -------------------------------------------------------------------------------------------------


def _copies(rng: random.Random, step: int, tell: Tell, at: list[int], log_to: str, least: int = 256) -> None:
    """Copies of `least` bytes and more go wrong by one bit, those whose numbers are in `at`; see `memcpy_flips.c`.

    In the end the log's last line says how many there were.
    """
    del step, tell
    library = ctypes.CDLL(None)
    log = os.open(log_to, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    stock = os._exit

    def last(code: int) -> None:
        os.write(log, f"copies {library.flips_seen()}\n".encode())
        stock(code)

    os._exit = last
    interpreter = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/libpython" in line]
    span = [int(line.split()[0].split("-")[end], 16) for line, end in ((interpreter[0], 0), (interpreter[-1], 1))]
    numbers = (ctypes.c_long * len(at))(*at)
    seed = ctypes.c_uint64(rng.getrandbits(64))
    begin, end = map(ctypes.c_size_t, span)
    library.flips_begin(ctypes.c_size_t(least), begin, end, seed, numbers, ctypes.c_long(len(at)), log)


# ---- layers that are streamed -------------------------------------------------------------------------------


def _streamed(rng: random.Random, step: int, tell: Tell, place: str) -> None:
    """A streamed layer changes: where it waits, in the ``mapped`` file or in ``anonymous`` memory, or on the card."""

    def do(trainer: Any) -> None:
        if place == "card":
            torch.cuda.synchronize()
            flip(rng.choice(trainer.streamer.buffers).memory, rng)
        elif place == "anonymous":
            flip(rng.choice([each.source for layer in trainer.streamer.contents for each in layer.segments]), rng)
        else:  # a layer that shares its buffer, in this process's mappings alone
            maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
            for row in (row for row in maps if row[-1].endswith("model.safetensors") and row[1] == "rw-p"):
                content = Path(row[-1]).read_bytes()
                start = 8 + int.from_bytes(content[:8], "little")
                header = json.loads(content[8:start])
                start += header["model.layers.4.mlp.up_proj.weight"]["data_offsets"][0]
                ctypes.c_ubyte.from_address(int(row[0].split("-")[0], 16) + start - int(row[2], 16)).value ^= 16
        tell(place)

    _at("before forward", step, tell, do)


ATTACKS: dict[str, Callable[..., None]] = {
    "after load": _after_load,
    "replaced": _replaced,
    "trained": _trained,
    "wrong update": _wrong_update,
    "waiting batch": _waiting_batch,
    "counted batch": _counted_batch,
    "file misread": _file_misread,
    "copies": _copies,
    "reference": _reference,
    "host model": _host_model,
    "misreading": _misreading,
    "mapped": _mapped,
    "resumed state": _resumed_state,
    "initial adapter": _initial_adapter,
    "rate": _rate,
    "streamed": _streamed,
    "miscounted batch": _miscounted_batch,
    "used batch": _used_batch,
    **step_attacks.ATTACKS,
}
