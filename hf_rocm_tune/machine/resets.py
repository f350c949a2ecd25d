"""Did the driver see the GPU fail? Read from device core dumps, which need no root; the kernel's log mostly does.

The kernel lists a dump as ``/sys/class/devcoredump/devcdN`` with a link to the device that failed and drops it after
five minutes (Linux ``drivers/base/devcoredump.c``); amdgpu writes one when it resets a GPU, where the kernel has
CONFIG_DEV_COREDUMP (``amdgpu_dev_coredump.c``). Nothing listed means nothing: not every fault leaves a dump.
"""

from __future__ import annotations

from pathlib import Path

from hf_rocm_tune.machine.sysfs import list_names, read_link_name
from hf_rocm_tune.machine.sysfs_tree import Tree

_CLASS = "sys/class/devcoredump"


def core_dumps(root: Tree | Path = Path("/")) -> frozenset[str]:
    """The dumps of amdgpu that are listed now, as "devcd1 of 0000:03:00.0"; empty where nothing can be read."""
    found = set()
    for name in list_names(root, _CLASS).value or []:
        device = f"{_CLASS}/{name}/failing_device"
        if read_link_name(root, f"{device}/driver").value == "amdgpu":
            found.add(f"{name} of {read_link_name(root, device).value or 'an unnamed device'}")
    return frozenset(found)
