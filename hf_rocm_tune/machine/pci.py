"""PCI devices: their links, and the way from a card up to the CPU."""

from hf_rocm_tune.machine.machine import Link
from hf_rocm_tune.machine.path_sysfs import read_upward

__all__ = ["Link", "read_upward"]
