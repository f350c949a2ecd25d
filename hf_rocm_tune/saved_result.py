"""Saves a state dict of any program: written aside, read back, compared with the live tensors, renamed and sealed."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hf_rocm_tune.errors import CorruptionError, UsageError, listed
from hf_rocm_tune.models.files import sums
from hf_rocm_tune.page_cache import open_from_disk
from hf_rocm_tune.survive import manifest
from hf_rocm_tune.survive.atomic import create_staging, replace_directory
from hf_rocm_tune.transfer import Digest, QueuedDigests, named_tensors

WEIGHTS_NAME = "model.safetensors"
STATE_NAME = "state.pt"


def save_result(state: Mapping[str, Any], directory: Path, *, step: int) -> None:
    """See `VerifiedTransfers.save`."""
    if not isinstance(state, Mapping) or not state:
        raise UsageError(f"save takes a state dict, not {type(state).__name__}: give model.state_dict()")
    if directory.exists() and not _is_ours(directory):
        raise UsageError(f"{directory} exists and was not saved by this package: choose another directory, or move it")
    staging = create_staging(directory)
    try:
        name, wrong = _write_weights(state, staging) if _is_flat(state) else _write_state(state, staging)
        if wrong:
            raise CorruptionError(
                f"{name} does not hold what was saved: {listed(wrong)} differ when it is read back. Nothing was "
                "replaced; run the doctor and check the disk"
            )
        manifest.write(staging, run_id="", step=step, status="final")
        replace_directory(staging, directory)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _is_ours(directory: Path) -> bool:
    if not directory.is_dir():
        return False
    return manifest.run_of(directory) == "" or not any(directory.iterdir())


def _is_flat(state: Mapping[str, Any]) -> bool:
    return all(isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items())


def _write_weights(state: Mapping[str, Tensor], directory: Path) -> tuple[str, list[str]]:
    live = digests_of(state)
    file = directory / WEIGHTS_NAME
    # Tensors that share memory, such as tied weights, are written once each: the format has no sharing.
    save_file({name: _on_host(tensor) for name, tensor in state.items()}, file, metadata={"format": "pt"})
    stored = sums(file, from_disk=True).tensors
    return file.name, [name for name, digest in live.items() if name not in stored or stored[name].digest != digest]


def _on_host(tensor: Tensor) -> Tensor:
    host = tensor.detach().cpu()  # device: verified at the dispatcher
    return host.contiguous().clone() if host.data_ptr() == tensor.data_ptr() else host.contiguous()


def _write_state(state: Mapping[str, Any], directory: Path) -> tuple[str, list[str]]:
    live = digests_of(dict(named_tensors(state)))
    file = directory / STATE_NAME
    torch.save(state, file)
    stored = digests_in(file)
    return file.name, [name for name, digest in live.items() if stored.get(name) != digest]


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, Digest]:
    """The digests of named tensors, each taken on its own device; waits."""
    digests = QueuedDigests([tensor.detach() for tensor in tensors.values()]).result()
    return dict(zip(tensors, digests, strict=True))


def digests_in(file: Path) -> dict[str, Digest]:
    """The digests of the tensors in a file of ``torch.save`` that this process has just written, as it lies on disk."""
    with open_from_disk(file):  # what is mapped then comes from there
        return digests_of(dict(named_tensors(torch.load(file, map_location="cpu", mmap=True, weights_only=False))))
