"""The host around the cards: kernel, memory, container, device nodes."""

from hf_rocm_tune.machine.host_sysfs import read_host
from hf_rocm_tune.machine.kernel_sysfs import PACKED_CONFIG, parse_cmdline, parse_config, read_kernel
from hf_rocm_tune.machine.machine import Host, Kernel, Node

__all__ = ["PACKED_CONFIG", "Host", "Kernel", "Node", "parse_cmdline", "parse_config", "read_host", "read_kernel"]
