"""What of a file goes into a recording of a machine: of files that say much, the lines that are read.

The disks on the command line, the thousands of options of a kernel and the details of a process are nobody's business
and would make a recording long. What is kept reads exactly as the whole does, nonsense included.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable

from hf_rocm_tune.machine import host_sysfs, kernel_sysfs

# Neither text nor gzip, and what a text becomes of which no line is read; left empty, both would read as "empty".
_BINARY = b"\0\0\0\0"
_NO_LINE = b"-\n"

_PLAIN_CONFIG = re.compile("|".join(re.escape(place).replace(r"\{\}", "[^/]+") for place in kernel_sysfs.PLAIN_CONFIGS))


def keep(path: str, content: bytes) -> bytes:
    """The part of a file's content that the readers of this package read. For :class:`RecordingTree`."""
    if not content:
        return content
    if path == kernel_sysfs.PACKED_CONFIG:
        text = kernel_sysfs.unpack(content)
        return _BINARY if text is None else gzip.compress("\n".join(_config_lines(text)).encode(), mtime=0)
    if _PLAIN_CONFIG.fullmatch(path):
        return _kept(content, _config_lines)
    lines = _LINES.get(path)
    return content if lines is None else _kept(content, lines)


def _kept(content: bytes, lines: Callable[[str], list[str]]) -> bytes:
    try:
        text = content.decode("utf-8").strip()
    except UnicodeDecodeError:
        return _BINARY
    if "\0" in text:
        return _BINARY
    return "\n".join(lines(text)).encode() or _NO_LINE if text else b""


def _config_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if kernel_sysfs.parse_config(line)]


def _cmdline(text: str) -> list[str]:
    return [" ".join(kernel_sysfs.wanted_words(text))]


def _cpuinfo(text: str) -> list[str]:
    found = host_sysfs.CPU_NAME.search(text)
    return [found[0]] if found else []


def _meminfo(text: str) -> list[str]:
    wanted = tuple(f"{name}:" for name in host_sysfs.MEMINFO_NAMES)
    return [line for line in text.split("\n") if line.startswith(wanted)]


def _status(text: str) -> list[str]:
    return [line for line in text.split("\n") if line.startswith("Seccomp:")]


_LINES: dict[str, Callable[[str], list[str]]] = {
    kernel_sysfs.CMDLINE: _cmdline,
    host_sysfs.CPUINFO: _cpuinfo,
    host_sysfs.MEMINFO: _meminfo,
    host_sysfs.STATUS: _status,
}
