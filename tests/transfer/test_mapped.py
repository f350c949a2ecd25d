"""Which file a host tensor lies in, also where the kernel gives the addresses of an unmapped file to another one."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from hf_rocm_tune.models.files import MappedFile
from hf_rocm_tune.transfer.mapped import in_file


def test_a_file_at_the_addresses_of_another_one_is_told_apart(tmp_path: Path) -> None:
    names = ("first", "second", "third")
    for name in names:
        save_file({name: torch.zeros(1 << 18)}, tmp_path / f"{name}.safetensors")
    addresses = set()
    for name in names * 3:
        file = tmp_path / f"{name}.safetensors"
        mapped = MappedFile(file)
        tensor = mapped.tensors[name]
        addresses.add(tensor.data_ptr())
        found = in_file(tensor)
        assert found is not None and (found.file, found.tensor) == (str(file), name)
        del mapped, tensor
    assert len(addresses) < len(names * 3), "no address was used again: the test shows nothing"
