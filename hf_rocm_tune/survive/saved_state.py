"""Saved weights and training state: comparison with the live state, and loading.

A file is read once, on the host: the bytes that are compared are those whose SHA-256 goes into the manifest. Weights
are read piece by piece (`models.files.sums`), other files whole (`manifest.read_once`). A live tensor is digested on
its device by a compute kernel, so that a faulty copy engine cannot damage both sides alike. PEFT's ``load_adapter`` is
not used: it reads directly to the device, and converts the bf16 adapters of a QLoRA run to fp32. Not covered: the other
files of a checkpoint; the manifest has their SHA-256.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor
from transformers import TrainerState
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_pt_utils import safe_globals

from hf_rocm_tune.errors import CorruptionError, MemoryFaultError, UsageError, first_line
from hf_rocm_tune.models.files import sums
from hf_rocm_tune.models.shards import local, own_part
from hf_rocm_tune.survive.manifest import FileEntry, read_once
from hf_rocm_tune.survive.saved_adapter import set_tensors
from hf_rocm_tune.transfer import digest, host_copy, map_tensors

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor, nn

    from hf_rocm_tune.transfer import Mover

logger = logging.getLogger(__name__)

ADAPTER_FILE = "adapter_model.safetensors"
# bitsandbytes 0.50.2, ``Optimizer8bit.get_state_buffer``: the state that it pages, and the fewest elements.
_PAGED = frozenset({"state1", "state2"})
_PAGED_FROM = 100_000

Place = Callable[..., Any]
"""Moves one host tensor to the device: ``place(tensor, name=..., stage=...)``."""


@dataclass(frozen=True, kw_only=True)
class State:
    """One file beside the weights: what belongs in it, how it is written, and how a resumed run sets it."""

    name: str
    live: Callable[[], Any]
    load: Callable[[Any], Any] = lambda _: None
    loaded: Callable[[], Any] | None = None  # what `load` has set, where `live` is something else
    save: Callable[[Any, Path], Any] | None = None  # None: torch.save
    every_rank: bool = False  # or the first rank only
    of_model: bool = False  # written with --save_only_model, too

    def write_to(self, directory: Path, *, fetched: bool = False) -> None:
        """``fetched``: from copies on the host that were compared with the device."""
        save = self.save or torch.save
        content = self.live()
        if fetched:
            content = map_tensors(content, host_copy)
        save(content, directory / self.name)


@dataclass(frozen=True)
class Readback:
    """Outcome of reading one file and comparing it with the live state."""

    entry: FileEntry | None = None  # of the bytes that were compared; None if the file could not be read
    digests: Mapping[str, str] = field(default_factory=dict)  # by "<file>:<tensor>"; "<file>:" for all but tensors
    differing: list[str] = field(default_factory=list)  # labels that differ, are missing, or cannot be read


# ---- comparison with the live state -------------------------------------------------------------------------


def compare_model(
    directory: Path,
    model: nn.Module,
    trained: Mapping[str, Tensor] | None = None,
    plain: Mapping[str, Tensor] | None = None,
    copied: Mapping[str, Tensor] | None = None,
) -> dict[str, Readback]:
    """Compare the safetensors files in ``directory`` with the adapters of a PEFT model, or else with a full model.

    Args:
        directory: with the files as they were written.
        model: its tensors are what the files should hold.
        trained: the model's whole state dict, where the model itself holds shards of it; None: the model holds it.
        plain: what an adapter's file should hold, by the names in it; None: what the model's adapter is.
        copied: tensors that a full model's files hold beside the model's own, by their names in them.

    Returns:
        By the name of each file what its comparison gave.
    """
    if not hasattr(model, "peft_config"):
        return _compare_full_model(directory, model, copied or {})
    readbacks = {}
    for adapter in cast("PeftModel", model).peft_config:
        tensors: Mapping[str, Tensor]
        if plain is None:
            tensors, required = _live_adapter(model, adapter, trained)
        else:
            tensors, required = plain, set(plain)
        file = adapter_file(adapter)
        readbacks[file] = _compare_tensors(directory, file, tensors, required)
    return readbacks


def _compare_full_model(directory: Path, model: nn.Module, copied: Mapping[str, Tensor]) -> dict[str, Readback]:
    files = sorted(path.name for path in directory.glob("*.safetensors"))
    if not files:
        return {"model.safetensors": Readback(differing=["no .safetensors file was written"])}
    names: set[str] = set()  # of the tensors in all files
    for file in files:
        # a file that cannot be opened is reported where it is compared
        with suppress(SafetensorError, OSError), safe_open(directory / file, framework="pt", device="cpu") as opened:
            names.update(opened.keys())
    tensors, missing = _live_model(model, names - copied.keys())
    tensors.update(copied)
    for name in copied:
        if name not in names:
            missing.add(name)
    return {file: _compare_tensors(directory, file, tensors, missing) for file in files}


def _live_adapter(
    model: nn.Module, adapter: str, state: Mapping[str, Tensor] | None
) -> tuple[Mapping[str, Tensor], set[str]]:
    from peft import get_peft_model_state_dict

    # Whether the file has embeddings was decided when it was written (which may ask the Hub): if it has them, they are
    # found by PEFT's names or the model's.
    with_embeddings = get_peft_model_state_dict(
        model, state_dict=state, adapter_name=adapter, save_embedding_layers=True
    )
    required = get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter, save_embedding_layers=False)
    whole = model.state_dict() if state is None else state
    return {**whole, **with_embeddings, **required}, set(required)


def adapter_on_host(model: nn.Module, mover: Mover, trained: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Host copies of a model's only adapter by the names of its file, fetched and verified by ``mover``."""
    from peft import get_peft_model_state_dict

    tensors: dict[str, Tensor] = get_peft_model_state_dict(model, state_dict=trained, save_embedding_layers=False)
    if trained is not None:
        return tensors
    for name, tensor in tensors.items():
        with mover.fetched(tensor.detach(), name=name, stage="adapter") as fetched:
            tensors[name] = fetched.host.clone()
    return tensors


class HostCopy:
    """Host copies of tensors that are used much later; each use checks that they are still what was copied."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = {name: (tensor, digest(tensor)) for name, tensor in tensors.items()}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors."""
        for name, (tensor, before) in self._tensors.items():
            if digest(tensor) != before:
                raise MemoryFaultError(
                    f"the adapter's initial state changed in host memory: {name}",
                    "Nothing has been saved since. Existing checkpoints are intact; rerun the same command",
                )
        return {name: tensor for name, (tensor, _) in self._tensors.items()}


def _live_model(model: nn.Module, stored: set[str]) -> tuple[dict[str, Tensor], set[str]]:
    """The model's tensors by their names in files that store these names, and the names that no file has.

    A tied weight is stored once, and then not missing under its other name.
    """
    live = dict(model.state_dict())
    if not stored <= live.keys():
        from transformers.core_model_loading import revert_weight_conversion

        # Fused experts are split when they are written: the same function converts the live tensors.
        live = revert_weight_conversion(model, live)
    kept = {live[name].data_ptr() for name in stored & live.keys()}
    return live, {name for name, tensor in live.items() if tensor.data_ptr() not in kept}


def _compare_tensors(directory: Path, file: str, live: Mapping[str, Tensor], required: set[str]) -> Readback:
    path = directory / file
    try:
        saved = sums(path, from_disk=True)
        with safe_open(path, framework="pt") as opened:  # what its header says must be valid
            required = required | set(opened.keys())
    except (OSError, SafetensorError) as error:
        return Readback(differing=[f"{file}: {first_line(error)}"])
    differing: list[str] = []
    for name, stored in saved.tensors.items():
        now = live.get(name)
        same = now is not None and (stored.dtype, stored.shape) == (now.dtype, tuple(now.shape))
        if now is None or not same or digest(now.detach()) != stored.digest:
            differing.append(f"{file}:{name}")
    differing += [f"{file}:{name}" for name in sorted(required - saved.tensors.keys())]
    digests = {f"{file}:{name}": stored.digest.hex() for name, stored in saved.tensors.items()}
    return Readback(FileEntry(bytes=saved.bytes, sha256=saved.sha256), digests, differing)


def compare_state(path: Path, live: Any) -> Readback:
    """Compare the file of a `State` with what is live."""
    _, readback = read_state(path)
    if readback.entry is None:
        return readback
    wanted = state_digests(path.name, live)
    written = readback.digests
    labels = sorted(wanted.keys() | written.keys())
    return replace(readback, differing=[label for label in labels if wanted.get(label) != written.get(label)])


def read_state(path: Path) -> tuple[Any, Readback]:
    """Load the file of a `State` to the host: content and digests; a file that cannot be read is ``differing``."""
    try:
        with read_once(path) as (copy, entry), safe_globals():
            if path.suffix == ".json":
                state = json.loads(copy.read_bytes())
            else:
                state = torch.load(copy, map_location="cpu", weights_only=True, mmap=True)
            return state, Readback(entry, state_digests(path.name, state))
    except Exception as error:  # a damaged pickle or archive can raise anything
        return None, Readback(differing=[f"{path.name}: cannot be read ({first_line(error)})"])


def state_digests(file: str, state: Any) -> dict[str, str]:
    """Digests of the tensors in nested dicts and sequences by "<file>:<path>"; "<file>:" is that of everything else."""
    tensors: dict[str, str] = {}
    rest = hashlib.sha256()
    for path, leaf in sorted(leaves(state), key=lambda item: item[0]):
        if torch.is_tensor(leaf):
            tensors[f"{file}:{path}"] = digest(leaf.detach()).hex()
            leaf = (leaf.dtype, tuple(leaf.shape))
        rest.update(f"{path} {leaf!r}\n".encode())
    return {f"{file}:": rest.hexdigest(), **tensors}


def not_loaded(saved: Any, live: Any) -> list[str]:
    """Paths of saved values that the live object does not hold; it may hold more, and tensors in another dtype."""
    now = dict(leaves(live))
    return [path for path, leaf in leaves(saved) if path not in now or not _same(leaf, now[path])]


def _same(saved: Any, live: Any) -> bool:
    if torch.is_tensor(saved) and torch.is_tensor(live):
        if isinstance(live, DTensor) and saved.dim() > 0:
            saved = own_part(saved, live)
            live = local(live)
        return saved.shape == live.shape and digest(saved.to(live.dtype)) == digest(live.detach())
    return bool(saved == live or (saved != saved and live != live))  # NaN equals NaN here


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of nested dicts and sequences with its path; arrays as tensors."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{prefix}/{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves(item, f"{prefix}/{index}")
    else:
        yield prefix, torch.from_numpy(value) if isinstance(value, np.ndarray) else value


# ---- on the host --------------------------------------------------------------------------------------------


def model_on_host(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a model with its saved tensors on the host (PEFT: the trained ones). Tied weights stay tied."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    state: dict[str, Tensor] = model.state_dict()
    copies: dict[int, Tensor] = {}
    for name, tensor in state.items():
        if name in trained or not hasattr(model, "peft_config"):
            address = tensor.data_ptr() or id(tensor)
            state[name] = copies[address] = copies[address] if address in copies else host_copy(tensor)
    return state


# ---- loading ------------------------------------------------------------------------------------------------


def require_complete(directory: Path) -> None:
    """Refuse a checkpoint that upstream would load only in part, or fail on."""
    instead = "choose another checkpoint or start a new run"
    if not directory.is_dir():
        raise UsageError(f"Can't find a valid checkpoint at {directory}: {instead}")
    try:
        int(TrainerState.load_from_json(str(directory / TRAINER_STATE_NAME)).global_step)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{directory}: {TRAINER_STATE_NAME} cannot be read ({first_line(error)}); {instead}"
        ) from error
    parts = (OPTIMIZER_NAME, SCHEDULER_NAME, "rng_state*.pth")
    missing = [form for form in parts if not any(directory.glob(form))]
    if len(missing) == len(parts):
        logger.warning("%s holds weights only: optimizer, schedule, random state start from the beginning", directory)
    elif missing:
        raise UsageError(
            f"{directory} has no {' and no '.join(missing)}: a run resumed from it would differ; {instead}"
        )


def random_states(*, all_cards: bool) -> dict[str, Any]:
    """As ``Trainer._save_rng_state`` saves them; of several cards also where one process has them."""
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}
    if torch.cuda.is_available():
        if all_cards:
            states["cuda"] = torch.cuda.get_rng_state_all()
        else:
            states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.random.set_rng_state(states["cpu"])
    if not torch.cuda.is_available():
        states.pop("cuda", None)  # saved on a card
        return
    of_cards = states.get("cuda")
    if isinstance(of_cards, list):
        torch.cuda.set_rng_state_all(of_cards)
    elif of_cards is not None:
        torch.cuda.set_rng_state(of_cards)


def load_adapters(directory: Path, model: nn.Module, place: Place) -> None:
    """Set every adapter of a PEFT model from ``directory``; dtypes and trainability stay as they are."""
    from peft import get_peft_model_state_dict

    for adapter in cast("PeftModel", model).peft_config:
        file = directory / adapter_file(adapter)
        with _opened(file) as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
        live = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
        _check_fit(file, tensors, live)
        placed = {name: place(tensor, name=name, stage="adapter") for name, tensor in tensors.items()}
        set_tensors(cast("PeftModel", model), placed, adapter)


def prompts_of(model: nn.Module) -> dict[str, Tensor]:
    """Prompt encoders of a PEFT model and all that is trained."""
    wanted = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    state = model.state_dict()
    return {name: state[name] for name in state if name in wanted or name.startswith("prompt_encoder.")}


def stabilise_prompts(model: nn.Module) -> None:
    """PEFT's CPT projects its trained prompt again in each forward, saving included: until that changes no bit."""
    for name, encoder in getattr(model, "prompt_encoder", {}).items():
        prompt: Any = getattr(getattr(encoder, "delta_embedding", None), "weight", None)
        if prompt is None:
            continue
        for _ in range(8):
            before = digest(prompt.detach())
            cast("PeftModel", model).get_prompt_embedding_to_save(name)
            if digest(prompt.detach()) == before:
                break


def load_prompts(state: Mapping[str, Tensor], model: nn.Module, place: Place) -> None:
    """Set what `prompts_of` returned. PEFT's own function sets the prompts, for inference only."""
    placed = {name: place(tensor, name=name, stage="adapter") for name, tensor in state.items()}
    model.load_state_dict(placed, strict=False)


def load_model(directory: Path, model: nn.Module, place: Place) -> None:
    """Set the weights of a full model from the safetensors files in ``directory``, one tensor at a time.

    Tied weights are in the files once, and set once.
    """
    live = model.state_dict()
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{directory} holds no .safetensors file: choose a checkpoint of this run's model")
    for file in files:
        with _opened(file) as opened:
            names = set(opened.keys())
            if not names <= live.keys():
                _load_converted(directory, model, place)
                return
            for name in sorted(names):
                tensor = opened.get_tensor(name)
                _check_fit(file, {name: tensor}, {name: live[name]})
                live[name].copy_(place(tensor, name=name, stage="adapter"))  # device: both are there


def _load_converted(directory: Path, model: nn.Module, place: Place) -> None:
    """As `load_model` for files whose tensors are not the model's: fused experts are split when written."""
    host, info = type(model).from_pretrained(directory, dtype="auto", output_loading_info=True)  # type: ignore[attr-defined]
    lost = sorted(info["missing_keys"]) + sorted(info["unexpected_keys"])
    if lost:
        raise UsageError(f"{directory} is of another model, it lacks or adds {lost[0]}: choose another checkpoint")
    saved = host.state_dict()
    live = model.state_dict()
    _check_fit(directory, saved, live)
    for name, tensor in live.items():
        tensor.copy_(place(saved[name], name=name, stage="adapter"))  # device: both are there


def load_optimizer(state: Any, optimizer: Any, place: Place) -> None:
    """Load the optimizer state; step counts stay on the host unless the optimizer computes with them on the device.

    bitsandbytes' paged state stays paged: its own ``load_state_dict`` would move all of it to the device.
    """
    own = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper does not forward options
    if getattr(own, "is_paged", False):
        own.load_state_dict(state, move_to_device=False)
        _place_paged(own, place)
        return
    # The rule of torch's `Optimizer._process_value_according_to_param_policy`, which would move them itself.
    steps_on_device: set[int] = set()
    for group in state["param_groups"]:
        if group.get("fused") or group.get("capturable"):
            steps_on_device.update(group["params"])
    placed = {
        number: _placed(values, place, f"optimizer.state.{number}", steps=number in steps_on_device)
        for number, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": placed})


def _place_paged(optimizer: Any, place: Place) -> None:
    """Move loaded state to where bitsandbytes creates it: large moments to paged memory, the rest to the device."""
    get_paged = importlib.import_module("bitsandbytes.functional").get_paged
    parameters = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if not torch.is_tensor(value) or value.dim() == 0:
                continue
            if name not in _PAGED or parameter.numel() < _PAGED_FROM or parameter.device.type == "cpu":
                values[name] = place(value, name=f"optimizer.state.{numbers[id(parameter)]}.{name}", stage="optimizer")
                continue
            pages = values[name] = get_paged(*value.shape, dtype=value.dtype, device=parameter.device)
            pages.copy_(value)  # device: to torch both are host memory; the driver moves the pages
            if digest(pages) != digest(value):
                raise CorruptionError(
                    "paged optimizer state differs from the checkpoint after it was copied: start the same command "
                    "again; if it happens again, train with another --optim"
                )
            optimizer.page_mng.paged_tensors.append(pages)


def _placed(value: Any, place: Place, name: str, *, steps: bool) -> Any:
    if torch.is_tensor(value):
        if name.endswith(".step") and not steps:
            return value.clone()  # a view would keep the whole mapped file alive
        return place(value, name=name, stage="optimizer")
    if isinstance(value, dict):
        return {key: _placed(item, place, f"{name}.{key}", steps=steps) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_placed(item, place, f"{name}.{index}", steps=steps) for index, item in enumerate(value))
    return value


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            yield opened
    except FileNotFoundError as error:
        raise UsageError(f"{file.parent} holds no {file.name}: choose a checkpoint of this run's adapter") from error
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{file} cannot be read ({error}): choose another checkpoint or start a new run") from error


def _check_fit(file: Path, saved: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> None:
    instead = "use the settings it was trained with"
    missing = sorted(live.keys() - saved.keys())
    if missing:
        raise UsageError(
            f"{file} is of another model or adapter: it lacks {len(missing)} of {len(live)} tensors, {missing[0]} "
            f"first; {instead}"
        )
    for name, tensor in live.items():
        there = _dtype_and_shape(saved[name])
        here = _dtype_and_shape(tensor)
        if there != here:
            raise UsageError(f"{file} does not fit: {name} is {there} there and {here} in this run; {instead}")


def adapter_file(adapter: str) -> str:
    """PEFT's file for this adapter: in the directory itself for "default", else in a folder of the adapter's name."""
    return ADAPTER_FILE if adapter == "default" else f"{adapter}/{ADAPTER_FILE}"


def _dtype_and_shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
