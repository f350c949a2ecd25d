"""``hf-rocm-tune merge``: an adapter into the weights of its base, in bounded memory, verified on disk.

Everything is done on the host; no device is needed. The base is read from its files, tensor by tensor, merged in
float32 and written in the base's own dtype (or another). At most one parameter of the base is in memory at a time (of
experts some of one layer), and the weight files, views of which are read, are mapped one at a time: so the peak is
bounded by the largest file.

The result is prepared under a private name beside its destination and renamed when every tensor has been read back
from disk and equals what was in memory, and the manifest is written: a merge that is interrupted, or killed, leaves
nothing that looks finished.

A 4-bit run is merged into the original weights of its base, not into the quantised ones it was trained on: the result
equals original base plus adapter.
"""

from __future__ import annotations

import errno
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.integrity import manifest
from hf_rocm_tune.integrity.atomic import clean_leftovers, staged_directory
from hf_rocm_tune.models.file_records import FileRecords, check_files, default_memory
from hf_rocm_tune.publish.merge_adapter import WEIGHTS_FILE, Adapter, open_adapter
from hf_rocm_tune.publish.merge_attach import attach
from hf_rocm_tune.publish.merge_base import Base, base_of, download
from hf_rocm_tune.publish.merge_checkpoint import Checkpoint
from hf_rocm_tune.publish.merge_files import card, merged_config, write_beside
from hf_rocm_tune.publish.merge_layers import find_sites
from hf_rocm_tune.publish.merge_names import Names, meta_model
from hf_rocm_tune.publish.merge_plan import Plan, Unit, make_plan
from hf_rocm_tune.publish.merge_settings import MergeSettings
from hf_rocm_tune.publish.merge_writer import FLOATING, ShardWriter, free_bytes

if TYPE_CHECKING:
    from torch import Tensor

_OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS, errno.EPERM, errno.EIO}
_SPARE_BYTES = 64 << 20  # tokenizer, configuration, what a file system keeps for itself


@dataclass(frozen=True, kw_only=True)
class Merged:
    """What came of a merge.

    Attributes:
        directory: the model.
        changed: tensors that differ from the base's.
        tensors: all tensors.
        nbytes: of them.
        files: weight files.
        seconds: from the first tensor read to the manifest.
    """

    directory: Path
    changed: int
    tensors: int
    nbytes: int
    files: int
    seconds: float


def merge(settings: MergeSettings, say: Callable[[str], None]) -> Merged:
    """Merge, telling what is done in lines.

    Raises:
        UsageError: adapter or base is missing, damaged or does not fit, or there is no room.
        CorruptionError: what was written was read back wrong.
    """
    _check_out(settings.out, say)
    adapter = open_adapter(settings.adapter)
    say(adapter.described)
    if getattr(adapter.config, "layer_replication", None):
        raise UsageError(f"{adapter.name} replicates layers (layer_replication), so it cannot be merged into its base")
    base = base_of(adapter, settings.base)
    checkpoint = Checkpoint(download(base))
    records = check_files(checkpoint.files, default_memory())
    say(
        f"base {base.name}: {len(checkpoint.tensors)} tensors, {checkpoint.nbytes / 1e9:.3g} GB; files attested "
        f"{records.attested}, not attested {len(records.unknown)}"
    )
    if adapter.trained_in_bits:
        say(
            f"it was trained on {adapter.trained_in_bits}-bit weights and is merged into the original ones: the result "
            "is the original base plus the adapter, and differs from the model in training by what quantising changed"
        )
    work = _Work(settings=settings, adapter=adapter, base=base, checkpoint=checkpoint, records=records)
    if work.plan.untied:
        say(f"{', '.join(work.plan.untied)} was tied and is stored by itself now: the adapter made the two different")
    merged = work.write()
    say(
        f"merged {merged.changed} of {merged.tensors} tensors in float32, stored {merged.nbytes / 1e9:.3g} GB in "
        f"{merged.files} file{'s' if merged.files > 1 else ''} in {merged.seconds:.1f} s; every tensor was read back "
        "from disk and is what was computed"
    )
    return merged


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


class _Work:
    """One merge from its plan to the finished directory."""

    def __init__(
        self, *, settings: MergeSettings, adapter: Adapter, base: Base, checkpoint: Checkpoint, records: FileRecords
    ) -> None:
        self._settings, self._adapter, self._base = settings, adapter, base
        self._checkpoint, self._records = checkpoint, records
        model = meta_model(_load_config(checkpoint.directory, settings), trust_remote_code=settings.trust_remote_code)
        self._embedding = _embedding_name(model)
        self._names = Names(model, checkpoint.tensors)
        self._sites = find_sites(attach(model, adapter, lambda tensor, _: tensor))
        dtype = getattr(torch, settings.dtype) if settings.dtype else None
        self.plan: Plan = make_plan(checkpoint, self._names, self._sites, dtype=dtype, stay_tied=adapter.tied)
        self._dtypes = {output.name: FLOATING.get(output.dtype) for output in self.plan.outputs}

    def write(self) -> Merged:
        """Write, read back, seal, rename.

        Raises:
            UsageError: no room, or a value that cannot be stored.
            CorruptionError: what was written was read back wrong.
        """
        out = self._settings.out
        self._check_room()
        started = time.perf_counter()
        try:
            with staged_directory(out) as staging:
                writer = ShardWriter(staging, self.plan.outputs, max_shard_bytes=self._settings.max_shard_bytes)
                for unit in self.plan.units:
                    self._merge_unit(unit, writer)
                self._checkpoint.close()
                writer.finish()
                self._write_beside(staging)
                tensors = writer.read_back()
                manifest.write(
                    staging,
                    run_id=self._adapter.run_id or uuid.uuid4().hex,
                    step=self._adapter.step,
                    status="final",
                    tensors=writer.digests,
                    extra={"merged": self._origin()},
                )
        except OSError as error:
            if error.errno not in _OF_THE_DISK:
                raise
            raise UsageError(f"{out} cannot be written: {error.strerror}; nothing is left there") from error
        return Merged(
            directory=out,
            changed=sum(len(unit.sites) for unit in self.plan.units),
            tensors=tensors,
            nbytes=writer.nbytes,
            files=len(writer.files),
            seconds=time.perf_counter() - started,
        )

    def _merge_unit(self, unit: Unit, writer: ShardWriter) -> None:
        names = [name for name, _ in unit.group.sources]
        if unit.stored_as:
            weight = self._checkpoint.read(names[0])
            for parameter, name in unit.stored_as:
                writer.put(name, self._value(unit, parameter, weight, self._dtypes[name] or weight.dtype))
            return
        tensors = {name: self._checkpoint.read(name) for name in names}
        dtype = self._dtypes[names[0]]

        def change(parameter: str, value: Tensor, first: int) -> Tensor:
            return self._value(unit, parameter, value, dtype or value.dtype, first if in_parts else None)

        in_parts = all(site.apply_part is not None for site in unit.sites.values())
        for name, value in self._names.change(unit.group, tensors, change, in_parts=in_parts):
            writer.put(name, value)

    def _value(
        self, unit: Unit, parameter: str, weight: Tensor, dtype: torch.dtype, first: int | None = None
    ) -> Tensor:
        """The new value of a parameter; of its experts from ``first`` on, where that is given."""
        site = unit.sites.get(parameter)
        if site is None:
            return weight.to(dtype)
        if first is not None and site.apply_part is not None:
            merged = site.apply_part(weight, dtype, first)
        else:
            merged = site.apply(weight if site.brought is None else site.brought, dtype)
        if not bool(merged.sum(dtype=torch.float32).isfinite()):  # one pass, no temporary of the size of the tensor
            raise UsageError(
                f"{parameter} has values that are not finite when it is merged and stored as {_name(dtype)}: "
                f"{'that dtype is too narrow (--dtype bfloat16), or ' if dtype == torch.float16 else ''}the adapter or "
                "the base is broken"
            )
        return merged

    def _check_room(self) -> None:
        parent = next(path for path in self._settings.out.absolute().parents if path.is_dir())
        need, free = sum(output.nbytes for output in self.plan.outputs) + _SPARE_BYTES, free_bytes(parent)
        if need > free:
            raise UsageError(
                f"the merged model takes {need / 1e9:.3g} GB, and {parent} has {free / 1e9:.3g} GB free: free some "
                "space, or choose another directory"
            )

    def _write_beside(self, staging: Path) -> None:
        embedding = self._sites.get(self._embedding)
        config = merged_config(
            self._checkpoint.config,
            dtype=self._settings.dtype,
            untied=bool(self.plan.untied),
            vocabulary=embedding.shape[0] if embedding is not None else None,
        )
        write_beside(
            staging,
            base=self._checkpoint.directory,
            adapter=self._adapter.directory,
            config=config,
            card=card(base_id=self._base.hub_id, method=self._adapter.method),
        )

    def _origin(self) -> dict[str, Any]:
        """Where the model comes from, for the manifest; of directories the last name, so that no path leaves here."""
        adapter = manifest.read(self._adapter.directory)
        files = adapter.files if isinstance(adapter, manifest.Manifest) else {}
        return {
            "adapter": Path(self._adapter.name).name,
            "adapter_sha256": files[WEIGHTS_FILE].sha256 if WEIGHTS_FILE in files else None,
            "method": self._adapter.method,
            "base": self._base.hub_id or Path(self._base.name).name,
            "base_files_attested": self._records.attested,
            "base_files_not_attested": len(self._records.unknown),
            "trained_in_bits": self._adapter.trained_in_bits,
            "computed_in": "float32",
            "stored_in": self._settings.dtype or "the base's dtypes",
            "untied": self.plan.untied,
        }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _embedding_name(model: Any) -> str:
    module = model.get_input_embeddings()
    return next((f"{name}.weight" for name, found in model.named_modules() if found is module), "")


def _load_config(directory: Path, settings: MergeSettings) -> Any:
    """The base's configuration.

    Raises:
        UsageError: transformers does not know it.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(directory), trust_remote_code=settings.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(f"{directory}: {first}") from error
