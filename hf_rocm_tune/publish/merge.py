"""``hf-rocm-tune merge``: merges an adapter into its base, in bounded memory, verified on disk.

The merge runs on the host. The model is on the meta device; only the adapter's tensors have memory. The base is read
from its mapped files, parameter by parameter: PEFT's layer gets one weight in float32, and its ``merge`` is called. The
result has the base's dtype (or another) and the names of the base's checkpoint. Memory is bounded by one file of the
result (``--max_shard_size``) and a few float32 copies of the largest parameter.

The tables that ``from_pretrained`` uses (``transformers.core_model_loading``, checked with transformers 5.23.0) map
stored tensors to parameters.

The result is written to a temporary directory beside its destination and renamed when every tensor has been read back
from disk and compared with memory, and the manifest is written: an interrupted or killed merge leaves nothing that
looks finished.

An adapter of a 4-bit run is merged into the original weights of its base, not into the quantised ones. If an adapter
changes the two sides of tied embeddings differently, both are stored, and the configuration says that they are not
tied.

Not covered: adapters of parameters that are stored in several tensors (experts), and methods that PEFT does not merge
(Arrow, activated LoRA and others that depend on the token).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from peft.tuners.lora import layer as lora
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper, TrainableTokensWrapper
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from hf_rocm_tune.errors import CorruptionError, UsageError
from hf_rocm_tune.models.factory import check_architecture
from hf_rocm_tune.models.files import check_files, check_model_directory, default_memory
from hf_rocm_tune.publish.adapter import NAME, WEIGHTS_FILE, Adapter, attach, base_of, open_adapter
from hf_rocm_tune.survive import manifest
from hf_rocm_tune.survive.atomic import clean_leftovers, staged_directory
from hf_rocm_tune.survive.manifest import drop_from_cache
from hf_rocm_tune.transfer import digest

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor
    from transformers import PreTrainedModel

_SPARE_BYTES = 64 << 20  # tokenizer, configuration, what a file system keeps for itself
_BY_PEFT = "load base and adapter with PEFT, then merge_and_unload() and save_pretrained()"
_FIX = "give the model that the adapter was trained on with --base"
_INDEX_FILE = "model.safetensors.index.json"
_TOKENIZER = re.compile(
    r"tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab\..*|merges\.txt|.*\.model|.*\.tiktoken"
    r"|chat_template.*"
)
_BESIDE = re.compile(
    r"generation_config\.json|.*processor_config\.json|processor.*\.json|.*\.py|(LICENSE|NOTICE|USE_POLICY).*"
)


def merge(
    adapter_name: str,
    out: Path,
    *,
    base_name: str | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
    trust_remote_code: bool = False,
    say: Callable[[str], None] = print,
) -> Path:
    """Merge an adapter into its base.

    Args:
        adapter_name: directory or Hub id of the adapter.
        out: directory to create.
        base_name: directory or Hub id of the base; None for the one that the adapter names.
        dtype: torch's name of the dtype of the result; None for that of each weight of the base.
        max_shard_bytes: of a file of weights; a larger tensor gets its own file.
        trust_remote_code: run the base's own Python code.
        say: takes lines for the user.

    Returns:
        The directory of the merged model.

    Raises:
        UsageError: adapter or base is missing, damaged or does not fit, or the disk is too small.
        CorruptionError: a file was read back wrong.
    """
    out = _check_out(out, say)
    adapter = open_adapter(adapter_name)
    say(adapter.described)
    if getattr(adapter.config, "layer_replication", None):
        raise UsageError(f"{adapter.name} replicates layers (layer_replication), so it cannot be merged into its base")
    named = base_of(adapter, base_name)
    base = _Base(named.download())
    records = check_files(base.files, default_memory())
    say(
        f"base {named.name}: {len(base.stored)} tensors, {base.nbytes() / 1e9:.3g} GB; files attested "
        f"{records.attested}, not attested {len(records.unknown)}"
    )
    if adapter.trained_in_bits:
        say(
            f"it was trained on {adapter.trained_in_bits}-bit weights and is merged into the original ones: the result "
            "differs from the model in training by the quantisation error"
        )
    wanted = getattr(torch, dtype) if dtype else None
    change = _Change(base, adapter, wanted, trust_remote_code=trust_remote_code)
    if change.untied:
        say(f"{', '.join(change.untied)} is no longer tied: the adapter changed the two sides differently")
    _check_room(out, base.nbytes(wanted) + change.more_bytes(wanted))
    sealed = adapter.written
    origin = {
        "adapter": Path(adapter.name).name,  # only the last part of a directory: no path is published
        "adapter_sha256": sealed.files[WEIGHTS_FILE].sha256 if sealed else None,
        "method": adapter.method,
        "trained_in_bits": adapter.trained_in_bits,
        "base": named.hub_id or Path(named.name).name,
        "base_files_attested": records.attested,
        "base_files_not_attested": len(records.unknown),
        "computed_in": "float32",
        "stored_in": dtype or "the base's dtypes",
        "untied": change.untied,
    }
    started = time.perf_counter()
    try:
        with staged_directory(out) as staging:
            shards = _Shards(staging, max_shard_bytes)
            for name, value in change.tensors():
                shards.put(name, value)
            base.close()
            digests = shards.finish()
            config = _merged_config(base.config, dtype=dtype, untied=bool(change.untied), vocabulary=change.vocabulary)
            (staging / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            (staging / "README.md").write_text(merged_card(named.hub_id, adapter.method), encoding="utf-8")
            _copy_tokenizer(staging, base=base.directory, adapter=adapter.directory)
            manifest.write(
                staging,
                run_id=sealed.run_id if sealed else uuid.uuid4().hex,
                step=sealed.step if sealed else 0,
                status="final",
                tensors=digests,
                extra={"merged": origin},
            )
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror or error}; nothing is left there") from error
    say(
        f"merged {len(change.sites)} of {len(digests)} tensors in float32, stored {shards.nbytes / 1e9:.3g} GB in "
        f"{len(shards.files)} file{'s' if len(shards.files) > 1 else ''} in {time.perf_counter() - started:.1f} s; "
        "every tensor was read back from disk and equals what was computed"
    )
    return out


def _check_out(out: Path, say: Callable[[str], None]) -> Path:
    """Check the destination; remove what killed merges left there. Returns it, or the directory that it links to."""
    try:
        above = next(path for path in (out, *out.absolute().parents) if os.path.lexists(path))
        if not os.path.isdir(above) and (above != out or out.is_symlink()):
            raise UsageError(f"{above} is no directory, so {out} cannot be created: choose another directory")
        out = out.resolve() if out.is_symlink() else out
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UsageError(f"{out} exists and is not empty: choose another directory, or remove it")
        if out.absolute().parent.is_dir():
            for line in clean_leftovers(out.absolute().parent):
                say(f"{line} (left by a killed process)")
    except OSError as error:
        raise UsageError(f"{out} cannot be used: {error.strerror}; choose another directory") from error
    return out


def _check_room(out: Path, nbytes: int) -> None:
    parent = next(path for path in out.absolute().parents if path.is_dir())
    need, free = nbytes + _SPARE_BYTES, shutil.disk_usage(parent).free
    if need > free:
        raise UsageError(
            f"the merged model takes {need / 1e9:.3g} GB, and {parent} has {free / 1e9:.3g} GB free: free some "
            "space, or choose another directory"
        )


# ---- the base's files -------------------------------------------------------------------------------------------

_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of an element of the dtypes that can be merged or cast, by safetensors' names."""


class _Base:
    """A model directory with ``config.json`` and safetensors files, of which one is mapped at a time.

    Raises:
        UsageError: a file is missing or damaged, the weights are not safetensors, or they are quantised.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files = check_model_directory(directory)
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        # file, dtype as safetensors names it, and shape, by name, in the order of the files and of the bytes in them
        self.stored: dict[str, tuple[Path, str, tuple[int, ...]]] = {}
        self._opened: tuple[Path, Any] | None = None
        if not self.files:
            raise UsageError(
                f"{directory} has its weights as pickles (pytorch_model.bin), which are not loaded: load it with "
                "transformers and save it again (save_pretrained writes safetensors)"
            )
        if self.config.get("quantization_config"):
            raise UsageError(
                f"{directory} is quantised, and no adapter can be merged into that: give the original model with --base"
            )
        for file in self.files:
            with safe_open(file, framework="pt", device="cpu") as opened:  # its form has been checked
                for name in opened.offset_keys():
                    entry = opened.get_slice(name)
                    self.stored[name] = file, entry.get_dtype(), tuple(entry.get_shape())

    def nbytes(self, dtype: torch.dtype | None = None) -> int:
        def item(kind: str) -> int:
            return dtype.itemsize if dtype and kind in _ITEM_BYTES else _ITEM_BYTES.get(kind, 1)

        return sum(prod(shape) * item(kind) for _, kind, shape in self.stored.values())

    def read(self, name: str) -> Tensor:
        """One tensor on the host, a view of its mapped file."""
        file = self.stored[name][0]
        try:
            if self._opened is None or self._opened[0] != file:
                self.close()
                self._opened = (file, safe_open(file, framework="pt", device="cpu").__enter__())
            tensor: Tensor = self._opened[1].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UsageError(f"model file {file}: cannot be read ({error}): check the disk") from error
        return tensor

    def close(self) -> None:
        if self._opened is not None:
            self._opened[1].__exit__(None, None, None)
            self._opened = None


# ---- single parameters ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Site:
    """One parameter that the adapter changes."""

    shape: torch.Size  # of its new value
    merge: Callable[[Tensor, torch.dtype], Tensor]  # from the old value on the host to a new tensor of that dtype
    base_value: Tensor | None = None  # the old value, if the adapter's file has it and not the base's

    def apply(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The new value, of the base's value on the host."""
        return self.merge(weight if self.base_value is None else self.base_value, dtype)


def find_sites(model: PeftModel) -> dict[str, Site]:
    """Every parameter of the plain model that the attached adapter changes, by name; none is a `UsageError`."""
    sites: dict[str, Site] = {}
    inside: list[str] = []
    for path, module in model.base_model.model.named_modules():
        if path.startswith(tuple(inside)):
            continue
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            inside.append(f"{path}.")
            sites.update(_sites_of(path, module))
        else:
            sites.update(_replaced_parameters(path, module))
    if not sites:
        raise UsageError("the adapter changes no weight of this model: there is nothing to merge")
    return sites


def _sites_of(path: str, module: nn.Module) -> Iterator[tuple[str, Site]]:
    if isinstance(module, ModulesToSaveWrapper):
        for name, parameter in module.modules_to_save[NAME].named_parameters():
            yield f"{path}.{name}", _replaced_by(parameter)
    elif isinstance(module, TrainableTokensWrapper):
        yield f"{path}.weight", _trained_rows(module.token_adapter)
    elif isinstance(module, TrainableTokensLayer):
        yield f"{path}.weight", _trained_rows(module)
    elif isinstance(module, BaseTunerLayer):
        owner = module.get_base_layer()
        names = [name for name, _ in owner.named_parameters(recurse=False)]
        if "weight" not in names:
            raise UsageError(
                f"{path}: a {type(owner).__name__} with {type(module).__name__} is not merged here: {_BY_PEFT}"
            )
        if isinstance(module, lora.LoraLayer):
            has_bias = module.lora_bias.get(NAME)
            yield from _replaced_parameters(path, owner, but="weight")
            names = ["weight", "bias"] if has_bias and "bias" in names else ["weight"]
        for name in names:
            yield f"{path}.{name}", _by_peft(path, module, name)
    else:
        raise UsageError(f"{path}: a {type(module).__name__} of PEFT cannot be merged")


def _replaced_parameters(path: str, module: nn.Module, *, but: str = "") -> Iterator[tuple[str, Site]]:
    """Parameters of the base whose values come from the adapter's file: biases, saved embeddings."""
    for name, parameter in module.named_parameters(recurse=False):
        if not parameter.is_meta and name != but:
            yield f"{path}.{name}" if path else name, _replaced_by(parameter)


def _replaced_by(parameter: Tensor) -> Site:
    value = parameter.detach()
    return Site(shape=value.shape, merge=lambda base, dtype: base.to(dtype), base_value=value)


def _trained_rows(layer: Any) -> Site:
    """An embedding of which some rows were trained (PEFT's trainable tokens)."""
    weight = layer.get_base_layer().weight
    rows = torch.tensor(layer.token_indices[NAME])
    values = layer.trainable_tokens_delta[NAME].detach()

    def merge(base: Tensor, dtype: torch.dtype) -> Tensor:
        return base.to(dtype).index_copy(0, rows, values.to(dtype))

    return Site(shape=weight.shape, merge=merge, base_value=None if weight.is_meta else weight.detach())


def _by_peft(path: str, layer: Any, name: str) -> Site:
    """A parameter that PEFT's ``merge`` changes."""
    owner = layer.get_base_layer()
    before = dict(owner.named_parameters(recurse=False))
    others = {n: p for n, p in before.items() if n != name}

    def merge(value: Tensor, dtype: torch.dtype) -> Tensor:
        layer.float()
        for other, empty in others.items():
            setattr(owner, other, nn.Parameter(torch.zeros(empty.shape), requires_grad=False))
        # A copy, never a view of a mapped file: PEFT merges in place.
        own = value.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        setattr(owner, name, nn.Parameter(own, requires_grad=False))
        try:
            with torch.no_grad():
                layer.merge(safe_merge=False, adapter_names=[NAME])  # the caller looks for values that are not finite
        except (ValueError, RuntimeError, NotImplementedError) as error:
            raise UsageError(f"PEFT cannot merge {path}: {' '.join(str(error).split())}") from error
        layer.merged_adapters.clear()
        if layer.get_base_layer() is not owner:  # LayerNorm tuning puts another module in its place
            raise UsageError(f"{path}: {type(layer).__name__} does not merge into a weight: it is not covered here")
        merged: Tensor = getattr(owner, name).detach().to(dtype)
        for other, empty in before.items():
            setattr(owner, other, empty)
        return merged

    parameter = before[name]
    return Site(shape=parameter.shape, merge=merge, base_value=None if parameter.is_meta else parameter.detach())


# ---- names ------------------------------------------------------------------------------------------------------


class Names:
    """The names of one model's parameters and of the stored tensors; the model is plain, and on the meta device.

    Attributes:
        parameter_of: by stored name; without tensors that are no parameter (rotary tables of old checkpoints) or only a
            part of one.
        stored_as: by parameter; None where it is made of several stored tensors.
        ties: parameter and the one that it is tied to, from the configuration.
    """

    def __init__(self, model: PreTrainedModel, stored: Iterable[str]) -> None:
        self._model = model
        self._parameters: Mapping[str, Tensor] = model.state_dict()
        conversions = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
        self.ties: Mapping[str, str] = dict(model.all_tied_weights_keys)
        self.parameter_of: dict[str, str] = {}
        self.stored_as: dict[str, str | None] = {}
        by_pattern = {pattern: entry for entry in self._converters for pattern in entry.source_patterns}
        for name in stored:
            parameter, pattern = self._renamed(name)
            if parameter not in self._parameters:
                continue
            if pattern is None:
                self.parameter_of[name], self.stored_as[parameter] = parameter, name
            else:
                first, *others = by_pattern[pattern].target_patterns
                names = (parameter, *(parameter.replace(first, other) for other in others))
                self.stored_as.update(dict.fromkeys(names))
        # Saving reverts exactly the conversions that loading used: some of them add or drop a prefix.
        model._weight_conversions = [entry for entry in conversions if entry.was_used()]

    def _renamed(self, stored: str) -> tuple[str, str | None]:
        """As ``convert_and_load_state_dict_in_model`` does it, with its second look at names that are right already."""
        prefix = self._model.base_model_prefix
        name, pattern = rename_source_key(stored, self._renamings, self._converters, prefix, self._parameters)
        if name not in self._parameters and stored in self._parameters:
            name, pattern = rename_source_key(stored, [], [], prefix, self._parameters)
        return name, pattern

    def stored_name(self, parameter: str) -> str:
        """A name to store a parameter that the base does not store.

        Raises:
            UsageError: transformers would not find it under the name under which it saves it.
        """
        empty = self._parameters[parameter]
        for name in (*revert_weight_conversion(self._model, {parameter: empty}), parameter):
            if self._renamed(name) == (parameter, None):
                return name
        raise UsageError(f"{parameter} cannot be stored beside the weight that it is tied to in this architecture")


def meta_model(directory: Path, *, trust_remote_code: bool) -> PreTrainedModel:
    """The architecture of a model directory, without memory for its weights.

    Raises:
        UsageError: this transformers has no such architecture.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(str(directory), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise UsageError(f"{directory}: config.json: {str(error).strip() or type(error).__name__}; {_FIX}") from error
    check_architecture(config, str(directory))
    name = config.architectures[0]
    architecture = getattr(transformers, name, None)
    with torch.device("meta"):
        if architecture is not None:
            make = getattr(architecture, "_from_config", None) or architecture.from_config
            model: PreTrainedModel = make(config)
            return model
        try:
            return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        except ValueError as error:
            raise UsageError(
                f"transformers {transformers.__version__} has no architecture {name}: if its code is in the model's "
                "directory and you trust it, add --trust_remote_code"
            ) from error


# ---- the changed parameters ---------------------------------------------------------------------------------------


class _Change:
    """The changes of a base by an adapter, from names and shapes; `tensors` computes them.

    Attributes:
        sites: every parameter that changes, by name.
        untied: parameters whose tie is undone.
        vocabulary: rows of the input embedding, if the adapter changes it.

    Raises:
        UsageError: the adapter does not fit, or the base lacks a tensor that it changes.
    """

    def __init__(self, base: _Base, adapter: Adapter, dtype: torch.dtype | None, *, trust_remote_code: bool) -> None:
        self._base, self._dtype = base, dtype
        model = meta_model(base.directory, trust_remote_code=trust_remote_code)
        embedding = model.get_input_embeddings()
        embedding_name = next((f"{name}.weight" for name, found in model.named_modules() if found is embedding), "")
        self._names = Names(model, base.stored)
        self.sites = find_sites(attach(model, adapter, lambda tensor, _: tensor))
        self.vocabulary = self.sites[embedding_name].shape[0] if embedding_name in self.sites else None
        self.untied: list[str] = []
        self._beside: dict[str, str] = {}  # a stored parameter, and the one that was tied to it
        self._undo_ties(stay_tied=bool(getattr(adapter.config, "ensure_weight_tying", False)))
        stored_as = self._names.stored_as
        there = stored_as.keys() | self._beside.values()
        if missing := sorted(self.sites.keys() - there):
            raise UsageError(
                f"{base.directory} lacks {missing[0]}, which the adapter changes ({len(missing)} in all): {_FIX}"
            )
        for name in (*self.sites, *self._beside):
            if stored_as.get(name, "") is None:
                raise UsageError(
                    f"{name} is stored in several tensors, into which no adapter is merged here: {_BY_PEFT}"
                )

    def more_bytes(self, dtype: torch.dtype | None) -> int:
        """Bytes of the result beyond the base: untied weights, and rows of a larger vocabulary."""
        size = dtype.itemsize if dtype else 4
        return size * sum(self.sites[name].shape.numel() for name in self._beside.values() if name in self.sites)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and value of every tensor of the result, in the order of the base's files."""
        for stored in self._base.stored:
            parameter, weight = self._names.parameter_of.get(stored, ""), self._base.read(stored)
            yield stored, self._new_value(parameter, weight)
            if beside := self._beside.get(parameter):
                yield self._names.stored_name(beside), self._new_value(beside, weight)

    def _new_value(self, parameter: str, weight: Tensor) -> Tensor:
        dtype = self._dtype if self._dtype and weight.is_floating_point() else weight.dtype
        site = self.sites.get(parameter)
        if site is None:
            return weight.to(dtype)
        if weight.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            raise UsageError(f"{parameter} is stored as {weight.dtype}, into which no adapter can be merged: {_FIX}")
        merged = site.apply(weight, dtype)
        if merged.shape != site.shape:
            shape = list(merged.shape)
            raise UsageError(f"{parameter} is {shape} here, but {list(site.shape)} for this adapter: {_FIX}")
        if not bool(merged.sum(dtype=torch.float32).isfinite()):  # one pass, no temporary of the size of the tensor
            narrow = "that dtype is too narrow (--dtype bfloat16), or " if dtype == torch.float16 else ""
            raise UsageError(
                f"{parameter} has values that are not finite when it is merged and stored as "
                f"{str(dtype).removeprefix('torch.')}: {narrow}the adapter or the base is broken"
            )
        return merged

    def _undo_ties(self, *, stay_tied: bool) -> None:
        stored_as, sites = self._names.stored_as, self.sites
        for target, source in self._names.ties.items():
            here, there = (source, target) if source in stored_as else (target, source)
            # Parameters that are not stored, or in several tensors, are refused later.
            if not {target, source} & sites.keys() or not (stored := stored_as.get(here)):
                continue
            both = target in sites and source in sites
            if both and (stay_tied or self._come_out_equal(stored, sites[here], sites[there])):
                if there not in stored_as:
                    del sites[there]
                continue
            self.untied.append(target)
            if there not in stored_as:
                self._beside[here] = there

    def _come_out_equal(self, stored: str, one: Site, other: Site) -> bool:
        """Whether both sides of a tie have the same merged value, bit for bit."""
        weight = self._base.read(stored)
        first, second = (digest(site.apply(weight, weight.dtype)) for site in (one, other))
        return one.shape == other.shape and first == second


# ---- what is written --------------------------------------------------------------------------------------------


class _Shards:
    """The weight files of one model directory, each written when it is full."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory, self._max_bytes = directory, max_bytes
        self._waiting: dict[str, Tensor] = {}
        self._digests: list[dict[str, str]] = []  # of each file, by tensor, as it was in memory
        self.files: list[str] = []  # their names; final after `finish`
        self.nbytes = 0  # of all tensors

    def put(self, name: str, tensor: Tensor) -> None:
        if self._waiting and sum(each.nbytes for each in self._waiting.values()) + tensor.nbytes > self._max_bytes:
            self._write()
        self._waiting[name] = tensor.detach().contiguous()
        self.nbytes += tensor.nbytes

    def _write(self) -> None:
        self.files.append(f"{len(self.files)}.safetensors")
        self._digests.append({name: digest(tensor).hex() for name, tensor in self._waiting.items()})
        try:
            save_file(self._waiting, self._directory / self.files[-1], metadata={"format": "pt"})
        except SafetensorError as error:
            number = re.search(r"os error (\d+)", str(error))  # it has the system's error in words only
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        self._waiting = {}

    def finish(self) -> dict[str, str]:
        """Give the files their names, write the index where there are several, and read every tensor back.

        Returns digests by ``<file>:<tensor>``, hexadecimal.

        Raises:
            CorruptionError: a tensor on disk differs from what was in memory, or a file cannot be read.
        """
        self._write()
        total = len(self.files)
        for number, file in enumerate(self.files):
            name = f"model-{number + 1:05d}-of-{total:05d}.safetensors" if total > 1 else "model.safetensors"
            self.files[number] = (self._directory / file).rename(self._directory / name).name
        file_of = {name: file for file, names in zip(self.files, self._digests, strict=True) for name in names}
        if total > 1:
            index = {"metadata": {"total_size": self.nbytes}, "weight_map": dict(sorted(file_of.items()))}
            (self._directory / _INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        for file, expected in zip(self.files, self._digests, strict=True):
            self._read_back(file, expected)
        return {f"{file_of[name]}:{name}": value for names in self._digests for name, value in names.items()}

    def _read_back(self, file: str, expected: Mapping[str, str]) -> None:
        wrong = ""
        try:
            drop_from_cache(self._directory / file)
            with safe_open(self._directory / file, framework="pt", device="cpu") as opened:
                if set(opened.keys()) != expected.keys():
                    wrong = "its header lists other tensors"
                for name in expected if not wrong else ():
                    if digest(opened.get_tensor(name)).hex() != expected[name]:
                        wrong = f"{name} differs from what was written"
        except (SafetensorError, OSError) as error:
            wrong = f"it cannot be read ({error})"
        if wrong:
            raise CorruptionError(
                f"{file} was read back wrong: {wrong}. Nothing was kept: check the disk and the memory, then start "
                "the same command again"
            )


def _merged_config(
    config: dict[str, Any], *, dtype: str | None, untied: bool, vocabulary: int | None
) -> dict[str, Any]:
    """The base's ``config.json`` with the changes of the merge only."""
    changed = deepcopy(config)
    for part in (
        changed,
        *(changed[key] for key in ("text_config", "llm_config") if isinstance(changed.get(key), dict)),
    ):
        if dtype is not None:
            part.update({key: dtype for key in ("dtype", "torch_dtype") if key in part} or {"dtype": dtype})
        if untied:
            part["tie_word_embeddings"] = False
        if vocabulary is not None and "vocab_size" in part:
            part["vocab_size"] = vocabulary
    return changed


def _copy_tokenizer(directory: Path, *, base: Path, adapter: Path) -> None:
    """Copy the tokenizer of the adapter if it has one (training may have added tokens or a chat template), else of the
    base; and the other files of the base that transformers loads.
    """
    has_own = any((adapter / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    chat_template = re.compile(r"chat_template.*")
    for source, pattern in ((base, _BESIDE), (adapter if has_own else base, _TOKENIZER), (adapter, chat_template)):
        for path in source.iterdir():
            if path.is_file() and pattern.fullmatch(path.name):
                shutil.copyfile(path, directory / path.name)


def merged_card(base_id: str | None, method: str) -> str:
    """A short model card with valid metadata; ``base_id`` is None for a base that is not on the Hub."""
    base = f"base_model: {base_id}\nbase_model_relation: finetune\n" if base_id else ""
    what = f"[{base_id}](https://huggingface.co/{base_id})" if base_id else "a local base model"
    return (
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\n{base}"
        "tags:\n- hf-rocm-tune\n- merged\n---\n\n"
        f"# Merged model\n\n{what}, into which an adapter ({method}) was merged in float32 by hf-rocm-tune. Every "
        "tensor was read back from disk; `integrity.json` has each file's SHA-256 and each tensor's digest.\n\n"
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained(".")  # this directory, or its id on the Hub\n'
        'tokenizer = AutoTokenizer.from_pretrained(".")\n```\n'
    )
