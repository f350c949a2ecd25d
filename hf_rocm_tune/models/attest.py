"""A model object that was loaded elsewhere, compared with its files.

A notebook user may hand over a model that is already on the device. Its transfer cannot be verified any more, but its
content can: where the files that it came from are known, each tensor's digest is compared with the file's.

Not covered: quantised weights (their files hold other bits), tensors that a conversion fuses or renames on loading,
and weights that were changed since: all of these stay unverified, with the reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.models.files import check_model_directory
from hf_rocm_tune.models.placement import tensors_of
from hf_rocm_tune.transfer import digest

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hf_rocm_tune.transfer import Mover

EQUAL = "equal to its file"


def attest(model: nn.Module, mover: Mover) -> tuple[int, int]:
    """Compares everything that a handed-over model already has on the mover's device with its files.

    Tensors that equal their file count as verified from here on; the others are marked as unverified with a reason.
    Tensors with a provenance, and tensors still on the host of an accelerator, are left alone.

    Returns:
        Number of tensors that equal their file, and number of tensors looked at.
    """
    unknown = {
        _file_name(name): tensor
        for name, tensor in tensors_of(model)
        if tensor.device.type == mover.device.type and mover.provenance(tensor) is None
    }
    files, why_not = _files_of(model)
    looked_at = len(unknown)
    equal = 0
    for file in files:
        with safe_open(file, framework="pt") as checkpoint:
            for name in checkpoint.keys() & unknown.keys():
                tensor = unknown.pop(name)
                if _equal(checkpoint.get_tensor(name), tensor):
                    mover.mark_derived(tensor, EQUAL)
                    equal += 1
                else:
                    mover.mark_unverified(tensor, f"handed over on the device; differs from {file.name}")
    for tensor in unknown.values():
        mover.mark_unverified(tensor, f"handed over on the device; {why_not or 'no file holds a tensor of this name'}")
    return equal, looked_at


def _equal(in_file: Tensor, on_device: Tensor) -> bool:
    if in_file.shape != on_device.shape or not on_device.is_floating_point():
        return False
    return digest(in_file.to(dtype=on_device.dtype)) == digest(on_device)


def _files_of(model: nn.Module) -> tuple[list[Path], str]:
    name = getattr(getattr(model, "config", None), "_name_or_path", "") or ""
    if not name:
        return [], "the files that it came from are not known"
    directory = Path(name)
    if not directory.is_dir():
        cached = _cached_snapshot(name)
        if cached is None:
            return [], f"{name} is neither a directory nor in the Hub's cache"
        directory = cached
    try:
        return check_model_directory(directory), ""
    except (UsageError, OSError, SafetensorError) as error:
        return [], str(error)


def _cached_snapshot(name: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError):
        return None


def _file_name(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")
