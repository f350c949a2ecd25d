"""``hf-rocm-tune merge``: an adapter into the weights of its base, in bounded memory, verified on disk.

Everything is done on the host; no device is needed. The base is read from its mapped files, tensor by tensor, merged in
float32 and written in the base's own dtype (or another), under the names and in the form of the base's checkpoint, so
whatever reads the base reads the result. Memory is bounded by the largest file and a few float32 copies of the largest
parameter, whatever the base's size.

The result is prepared under a private name beside its destination and renamed when every tensor has been read back
from disk and equals what was in memory, and the manifest is written: a merge that is interrupted, or killed, leaves
nothing that looks finished.

A 4-bit run is merged into the original weights of its base, not into the quantised ones it was trained on: the result
equals original base plus adapter. Tied embeddings: an adapter that changes only one side of a tie, or each side
otherwise, leaves two different weights; both are stored then, and the configuration says that they are not tied.
"""

from __future__ import annotations

import errno
import json
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open

from hf_rocm_tune.errors import CorruptionError, UsageError
from hf_rocm_tune.integrity import manifest
from hf_rocm_tune.integrity.atomic import clean_leftovers, staged_directory
from hf_rocm_tune.integrity.manifest import drop_from_cache
from hf_rocm_tune.models.file_records import check_files, default_memory
from hf_rocm_tune.models.files import check_model_directory
from hf_rocm_tune.publish.adapter import WEIGHTS_FILE, Adapter, attach, base_of, open_adapter
from hf_rocm_tune.publish.merge_command import MergeSettings
from hf_rocm_tune.publish.merge_weights import Group, Names, Site, find_sites, meta_model
from hf_rocm_tune.transfer import digest
from hf_rocm_tune.transfer.raw_bytes import as_bytes

if TYPE_CHECKING:
    from torch import Tensor

_FLOATING = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The dtypes of weights that can be merged or cast, by safetensors' names."""

_OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS, errno.EPERM, errno.EIO}
_SPARE_BYTES = 64 << 20  # tokenizer, configuration, what a file system keeps for itself
_FIX = "give the model that the adapter was trained on with --base"
_INDEX_FILE = "model.safetensors.index.json"
_TOKENIZER = re.compile(
    r"(tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab\..*|merges\.txt|.*\.model|.*\.tiktoken"
    r"|chat_template.*)"
)
_BESIDE = re.compile(
    r"(generation_config\.json|.*processor_config\.json|processor.*\.json|.*\.py|(LICENSE|NOTICE|USE_POLICY).*)"
)


def merge(settings: MergeSettings, say: Callable[[str], None]) -> Path:
    """Merge, telling what is done in lines; returns the directory of the merged model.

    Raises:
        UsageError: adapter or base is missing, damaged or does not fit, or there is no room.
        CorruptionError: what was written was read back wrong.
    """
    out = settings.out
    _check_out(out, say)
    adapter = open_adapter(settings.adapter)
    say(adapter.described)
    if getattr(adapter.config, "layer_replication", None):
        raise UsageError(f"{adapter.name} replicates layers (layer_replication), so it cannot be merged into its base")
    base = base_of(adapter, settings.base)
    checkpoint = Checkpoint(base.download())
    records = check_files(checkpoint.files, default_memory())
    total = sum(stored.nbytes for stored in checkpoint.tensors.values())
    say(
        f"base {base.name}: {len(checkpoint.tensors)} tensors, {total / 1e9:.3g} GB; files attested "
        f"{records.attested}, not attested {len(records.unknown)}"
    )
    if adapter.trained_in_bits:
        say(
            f"it was trained on {adapter.trained_in_bits}-bit weights and is merged into the original ones: the result "
            "is the original base plus the adapter, and differs from the model in training by what quantising changed"
        )
    model = meta_model(_load_config(checkpoint.directory, settings), trust_remote_code=settings.trust_remote_code)
    embedding = model.get_input_embeddings()
    embedding_name = next((f"{name}.weight" for name, found in model.named_modules() if found is embedding), "")
    names = Names(model, checkpoint.tensors)
    sites = find_sites(attach(model, adapter, lambda tensor, _: tensor))
    stay_tied = bool(getattr(adapter.config, "ensure_weight_tying", False))
    plan = _Plan(checkpoint, names, sites, dtype=settings.dtype, stay_tied=stay_tied)
    if plan.untied:
        say(f"{', '.join(plan.untied)} was tied and is stored by itself now: the adapter made the two different")
    _check_room(out, plan)
    new_embedding = sites.get(embedding_name)
    config = _merged_config(
        checkpoint.config,
        dtype=settings.dtype,
        untied=bool(plan.untied),
        vocabulary=new_embedding.shape[0] if new_embedding is not None else None,
    )
    origin = {
        **_origin(adapter),
        "base": base.hub_id or Path(base.name).name,
        "base_files_attested": records.attested,
        "base_files_not_attested": len(records.unknown),
        "computed_in": "float32",
        "stored_in": settings.dtype or "the base's dtypes",
        "untied": plan.untied,
    }
    started = time.perf_counter()
    try:
        with staged_directory(out) as staging:
            writer = ShardWriter(staging, plan.outputs, max_shard_bytes=settings.max_shard_bytes)
            for unit in plan.units:
                for name, value in _merged_unit(unit, checkpoint, names, plan):
                    writer.put(name, value)
            checkpoint.close()
            writer.finish()
            (staging / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            (staging / "README.md").write_text(merged_card(base.hub_id, adapter.method), encoding="utf-8")
            _copy_tokenizer(staging, base=checkpoint.directory, adapter=adapter.directory)
            tensors = writer.read_back()
            manifest.write(
                staging,
                run_id=adapter.run_id or uuid.uuid4().hex,
                step=adapter.step,
                status="final",
                tensors=writer.digests,
                extra={"merged": origin},
            )
    except OSError as error:
        if error.errno not in _OF_THE_DISK:
            raise
        raise UsageError(f"{out} cannot be written: {error.strerror}; nothing is left there") from error
    say(
        f"merged {sum(len(unit.sites) for unit in plan.units)} of {tensors} tensors in float32, stored "
        f"{plan.nbytes / 1e9:.3g} GB in {len(writer.files)} file{'s' if len(writer.files) > 1 else ''} in "
        f"{time.perf_counter() - started:.1f} s; every tensor was read back from disk and is what was computed"
    )
    return out


def _check_out(out: Path, say: Callable[[str], None]) -> None:
    """Before anything is read. What earlier merges left when they were killed is removed."""
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UsageError(f"{out} exists and is not empty: choose another directory, or remove it")
        if out.absolute().parent.is_dir():
            for line in clean_leftovers(out.absolute().parent):
                say(f"{line} (left by a process that was killed)")
    except OSError as error:
        raise UsageError(f"{out} cannot be used: {error.strerror}; choose another directory") from error


def _check_room(out: Path, plan: _Plan) -> None:
    parent = next(path for path in out.absolute().parents if path.is_dir())
    need, free = plan.nbytes + _SPARE_BYTES, shutil.disk_usage(parent).free
    if need > free:
        raise UsageError(
            f"the merged model takes {need / 1e9:.3g} GB, and {parent} has {free / 1e9:.3g} GB free: free some "
            "space, or choose another directory"
        )


def _load_config(directory: Path, settings: MergeSettings) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(directory), trust_remote_code=settings.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(f"{directory}: {first}") from error


def _origin(adapter: Adapter) -> dict[str, Any]:
    """Where the weights come from, for the manifest; of directories the last name, so that no path leaves here."""
    found = manifest.read(adapter.directory)
    files = found.files if isinstance(found, manifest.Manifest) else {}
    return {
        "adapter": Path(adapter.name).name,
        "adapter_sha256": files[WEIGHTS_FILE].sha256 if WEIGHTS_FILE in files else None,
        "method": adapter.method,
        "trained_in_bits": adapter.trained_in_bits,
    }


# ---- the base's files -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One tensor in a file: its dtype as safetensors names it (``BF16``), shape, and size in bytes."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Checkpoint:
    """A model directory with ``config.json`` and safetensors files, of which one is mapped at a time.

    Attributes:
        directory: as given.
        files: its weight files.
        config: ``config.json``.
        tensors: what is stored, by name, in the order of the files and of the bytes in them.

    Raises:
        UsageError: a file is missing or damaged, the weights are no safetensors, or they are quantised.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files = check_model_directory(directory)
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        self.tensors: dict[str, Stored] = {}
        self._file_of: dict[str, Path] = {}
        self._opened: tuple[Path, Any] | None = None
        if not self.files:
            raise UsageError(
                f"{directory} has its weights as pickles (pytorch_model.bin), which are not read here: load it with "
                "transformers and save it again (save_pretrained writes safetensors)"
            )
        if self.config.get("quantization_config"):
            raise UsageError(
                f"{directory} is quantised, and an adapter cannot be merged into that: give the original model, of "
                "which it was made, with --base"
            )
        for file in self.files:
            with file.open("rb") as stream:  # its form was checked before
                header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
            header.pop("__metadata__", None)
            for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
                start, stop = entry["data_offsets"]
                self.tensors[name] = Stored(dtype=entry["dtype"], shape=tuple(entry["shape"]), nbytes=stop - start)
                self._file_of[name] = file

    def read(self, name: str) -> Tensor:
        """One tensor on the host, a view of its mapped file.

        Raises:
            UsageError: its file cannot be read any more.
        """
        file = self._file_of[name]
        try:
            if self._opened is None or self._opened[0] != file:
                self.close()
                self._opened = (file, safe_open(file, framework="pt", device="cpu").__enter__())
            tensor: Tensor = self._opened[1].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UsageError(f"model file {file}: cannot be read ({error}): check the disk") from error
        return tensor

    def close(self) -> None:
        """Let go of the mapped file."""
        if self._opened is not None:
            self._opened[1].__exit__(None, None, None)
            self._opened = None


# ---- the plan: what is written, decided from names and shapes before anything is ----------------------------------


@dataclass(frozen=True, kw_only=True)
class _Unit:
    """One step of the merge: the stored tensors that are read together, and what is written of them.

    Attributes:
        group: what is read, where transformers converts it; None where one stored tensor is one parameter.
        sites: parameters that change, by name; empty: the tensor is copied.
        stored_as: parameter and the name under which it is written; without a group the first name is the one read.
    """

    group: Group | None = None
    sites: Mapping[str, Site] = field(default_factory=dict)
    stored_as: tuple[tuple[str, str], ...] = ()


class _Plan:
    """All steps in the order of the base's files.

    Attributes:
        units: the steps.
        outputs: what they write, by name.
        nbytes: of all outputs.
        untied: parameters whose tie is undone.

    Raises:
        UsageError: the base lacks a tensor that the adapter changes, or cannot be stored in the form it needs.
    """

    def __init__(
        self, checkpoint: Checkpoint, names: Names, sites: Mapping[str, Site], *, dtype: str | None, stay_tied: bool
    ) -> None:
        self._checkpoint, self._dtype = checkpoint, dtype
        self.units: list[_Unit] = []
        self.outputs: dict[str, Stored] = {}
        self.untied: list[str] = []
        changed = dict(sites)
        beside = self._undo_ties(names, changed, stay_tied=stay_tied)
        done: set[str] = set()
        for stored in checkpoint.tensors:
            if stored not in done:
                unit = self._unit_of(stored, names, changed, beside)
                self.units.append(unit)
                if unit.group is not None:
                    done.update(source for source, _ in unit.group.sources)
        covered = {name for unit in self.units for name in unit.sites}
        if missing := sorted(changed.keys() - covered):
            raise UsageError(
                f"{checkpoint.directory} lacks {missing[0]}, which the adapter changes ({len(missing)} in all): {_FIX}"
            )
        for unit in self.units:
            self._add_outputs(unit)
        self.nbytes = sum(output.nbytes for output in self.outputs.values())

    def _undo_ties(self, names: Names, changed: dict[str, Site], *, stay_tied: bool) -> dict[str, str]:
        """By stored parameter the one that was tied to it and is to be stored beside it."""
        beside = {}
        for target, source in names.ties.items():
            if not {target, source} & changed.keys():
                continue
            here, there = (source, target) if source in names.made_by else (target, source)
            if here not in names.made_by:
                continue  # neither is stored, which is refused later
            both = target in changed and source in changed
            if both and (stay_tied or self._come_out_equal(names.made_by[here], changed[here], changed[there])):
                if there not in names.made_by:
                    del changed[there]
                continue
            self.untied.append(target)
            if there not in names.made_by:
                beside[here] = there
        return beside

    def _come_out_equal(self, group: Group, one: Site, other: Site) -> bool:
        """Whether both sides of a tie have the same merged value, bit for bit."""
        weight = self._checkpoint.read(group.sources[0][0])
        first, second = (digest(site.apply(weight, weight.dtype)) for site in (one, other))
        return one.shape == other.shape and first == second

    def _unit_of(self, stored: str, names: Names, changed: Mapping[str, Site], beside: Mapping[str, str]) -> _Unit:
        group = names.group_of.get(stored)
        if group is None:  # of no parameter of the model: kept, as save_pretrained would not
            return _Unit(stored_as=(("", stored),))
        extra = [there for here, there in beside.items() if here in group.parameters]
        sites = {name: changed[name] for name in [*group.parameters, *extra] if name in changed}
        if group.converter is not None and sites:
            if extra:
                raise UsageError(f"{extra[0]} is tied to a weight that is stored in parts, which cannot be untied here")
            return _Unit(group=group, sites=sites)
        written = [(group.parameters[0], stored), *((name, names.stored_name(name)) for name in extra)]
        return _Unit(sites=sites, stored_as=tuple(written))

    def _add_outputs(self, unit: _Unit) -> None:
        if unit.group is not None:
            for name, _ in unit.group.sources:
                self._add_output(name, self._checkpoint.tensors[name])
            return
        stored = self._checkpoint.tensors[unit.stored_as[0][1]]
        for parameter, name in unit.stored_as:
            site = unit.sites.get(parameter)
            shape = tuple(site.shape) if site is not None else stored.shape
            if site is not None and stored.dtype not in _FLOATING:
                raise UsageError(f"{name} is stored as {stored.dtype}, into which no adapter can be merged: {_FIX}")
            if site is not None and site.brought is None and shape != stored.shape:
                raise UsageError(
                    f"{name} is {list(stored.shape)} in {self._checkpoint.directory}, but {list(shape)} for this "
                    f"adapter: {_FIX}"
                )
            self._add_output(name, stored, shape)

    def _add_output(self, name: str, stored: Stored, shape: tuple[int, ...] | None = None) -> None:
        if stored.dtype in _FLOATING:
            wanted = getattr(torch, self._dtype) if self._dtype else None
            kind = next((key for key, value in _FLOATING.items() if value == wanted), stored.dtype)
            shape = stored.shape if shape is None else shape
            stored = Stored(dtype=kind, shape=shape, nbytes=prod(shape) * _FLOATING[kind].itemsize)
        self.outputs[name] = stored


def _merged_unit(unit: _Unit, checkpoint: Checkpoint, names: Names, plan: _Plan) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a step writes, by name."""
    if unit.group is None:
        weight = checkpoint.read(unit.stored_as[0][1])
        for parameter, name in unit.stored_as:
            dtype = _FLOATING.get(plan.outputs[name].dtype, weight.dtype)
            yield name, _new_value(unit.sites.get(parameter), parameter, weight, dtype)
        return
    tensors = {name: checkpoint.read(name) for name, _ in unit.group.sources}
    wanted = _FLOATING.get(plan.outputs[next(iter(tensors))].dtype)
    yield from names.change(
        unit.group,
        tensors,
        lambda name, value: _new_value(unit.sites.get(name), name, value, wanted or value.dtype),
    ).items()


def _new_value(site: Site | None, parameter: str, weight: Tensor, dtype: torch.dtype) -> Tensor:
    if site is None:
        return weight.to(dtype)
    merged = site.apply(weight, dtype)
    if not bool(merged.sum(dtype=torch.float32).isfinite()):  # one pass, no temporary of the size of the tensor
        narrow = "that dtype is too narrow (--dtype bfloat16), or " if dtype == torch.float16 else ""
        raise UsageError(
            f"{parameter} has values that are not finite when it is merged and stored as "
            f"{str(dtype).removeprefix('torch.')}: {narrow}the adapter or the base is broken"
        )
    return merged


# ---- what is written --------------------------------------------------------------------------------------------


class ShardWriter:
    """The weight files of one model directory, laid out first and filled tensor by tensor, in any order.

    The format (https://github.com/huggingface/safetensors#format) puts a header with every tensor's dtype, shape and
    place before the data. Wider dtypes come first in a file, because a reader that maps it needs each tensor aligned to
    its element.

    Args:
        directory: exists and is empty of weights.
        outputs: every tensor that will be written, in the order in which they are to be spread over the files.
        max_shard_bytes: of a file's data; a tensor that is larger has a file of its own.

    Attributes:
        digests: of each tensor as it was in memory, by ``<file>:<tensor>``, hexadecimal.
        files: names of the files.
    """

    def __init__(self, directory: Path, outputs: Mapping[str, Stored], *, max_shard_bytes: int) -> None:
        self._directory, self._outputs = directory, outputs
        self.digests: dict[str, str] = {}
        shards = split_state_dict_into_shards_factory(
            dict(outputs),
            get_storage_size=lambda output: output.nbytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_bytes,
        )
        self._file_of: dict[str, str] = shards.tensor_to_filename
        self._metadata = shards.metadata
        self.files = list(shards.filename_to_tensors)
        self._start_of: dict[str, int] = {}
        for file, names in shards.filename_to_tensors.items():
            self._lay_out(file, names)

    def _lay_out(self, file: str, names: list[str]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        position = 0
        for name in sorted(names, key=lambda name: -_element_bytes(self._outputs[name].dtype)):
            output = self._outputs[name]
            offsets = [position, position + output.nbytes]
            header[name] = {"dtype": output.dtype, "shape": list(output.shape), "data_offsets": offsets}
            self._start_of[name] = position
            position += output.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with (self._directory / file).open("xb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + position)
        for name in names:
            self._start_of[name] += 8 + len(text)

    def put(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, which is on the host and has the dtype and shape that were announced.

        Raises:
            OSError: the disk is full, or cannot be written.
        """
        data = as_bytes(tensor.detach().contiguous())
        expected = self._outputs[name].nbytes
        assert data.numel() == expected, f"{name}: {data.numel()} bytes instead of {expected}"
        self.digests[f"{self._file_of[name]}:{name}"] = digest(data).hex()
        with (self._directory / self._file_of[name]).open("r+b") as stream:
            stream.seek(self._start_of[name])
            stream.write(data.numpy())  # type: ignore[arg-type]  # an array is a buffer; Python 3.11 cannot say so

    def finish(self) -> None:
        """Write the index, where there are several files. Every tensor must have been put."""
        missing = len(self._outputs) - len(self.digests)
        assert not missing, f"{missing} announced tensors were not written"
        if len(self.files) > 1:
            index = {"metadata": self._metadata, "weight_map": dict(sorted(self._file_of.items()))}
            (self._directory / _INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def read_back(self) -> int:
        """Compare every tensor on disk with what was in memory; the system forgets its cached pages before.

        Returns:
            How many were compared.

        Raises:
            CorruptionError: one differs, or a file cannot be read.
        """
        for file in self.files:
            names = {name for name, place in self._file_of.items() if place == file}
            wrong = ""
            try:
                drop_from_cache(self._directory / file)
                with safe_open(self._directory / file, framework="pt", device="cpu") as opened:
                    if set(opened.keys()) != names:
                        wrong = "its header lists other tensors"
                    for name in names if not wrong else ():
                        if digest(opened.get_tensor(name)).hex() != self.digests[f"{file}:{name}"]:
                            wrong = f"{name} differs from what was written"
            except (SafetensorError, OSError) as error:
                wrong = f"it cannot be read ({error})"
            if wrong:
                raise CorruptionError(
                    f"{file} was read back wrong: {wrong}. Nothing was kept: check the disk and the memory, then start "
                    "the same command again"
                )
        return len(self._outputs)


def _element_bytes(dtype: str) -> int:
    """Of one element, from the dtype's name (``BF16``: 2); 0 for formats that pack several into a byte."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) // 8 if bits else 1


def _merged_config(
    config: dict[str, Any], *, dtype: str | None, untied: bool, vocabulary: int | None
) -> dict[str, Any]:
    """The base's ``config.json`` with what the merge changed, and nothing that a newer transformers would add.

    Args:
        config: content of the base's ``config.json``.
        dtype: torch's name of the dtype of the weights, where it was asked for.
        untied: input and output embeddings differ now.
        vocabulary: rows of the input embedding, where the adapter brings one.
    """
    changed: dict[str, Any] = json.loads(json.dumps(config))
    parts = [changed, *(part for key in ("text_config", "llm_config") if isinstance(part := changed.get(key), dict))]
    for part in parts:
        if dtype is not None:
            part.update({key: dtype for key in ("dtype", "torch_dtype") if key in part} or {"dtype": dtype})
        if untied:
            part["tie_word_embeddings"] = False
        if vocabulary is not None and "vocab_size" in part:
            part["vocab_size"] = vocabulary
    return changed


def _copy_tokenizer(directory: Path, *, base: Path, adapter: Path) -> None:
    """Copy tokenizer files of the adapter where it has a tokenizer (training may have added tokens or a chat template),
    else of the base; and what else of the base belongs to a model that transformers loads.
    """
    has_own = any((adapter / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    chat_template = re.compile(r"chat_template.*")
    for source, pattern in ((base, _BESIDE), (adapter if has_own else base, _TOKENIZER), (adapter, chat_template)):
        for path in source.iterdir():
            weights = path.name in ("model.safetensors", _INDEX_FILE)
            if path.is_file() and pattern.fullmatch(path.name) and not weights:
                shutil.copyfile(path, directory / path.name)


def merged_card(base_id: str | None, method: str) -> str:
    """A short model card with valid metadata.

    Args:
        base_id: Hub id of the base, or None for one that is not on the Hub.
        method: by which the adapter was trained.
    """
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
