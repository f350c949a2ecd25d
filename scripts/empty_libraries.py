"""Lets a build of torch for CUDA start where the vendor's libraries are missing: it then computes on the processor.

    python scripts/empty_libraries.py DIRECTORY        such as .../site-packages/torch/lib

For each library that torch's own need and that is not on this machine, one of that name is compiled. It defines the
names that torch expects of it, in the versions that it expects. Those of the runtime answer that there is no device;
whoever calls another ends in a message and an abort. So `make drift` tries versions of torch of which no build
for processors can be had.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_SOURCE = """\
#include <stdio.h>
#include <stdlib.h>
static long called(const char *name) { fprintf(stderr, "%s: an empty library\\n", name); abort(); }
"""
_NO_DEVICE = 100
"""cudaErrorNoDevice: what the runtime answers where no card is."""
_FOREIGN = re.compile("cu|nv|nccl|libnv|__nv|__cuda")
"""How the names begin that CUDA's libraries have without a version."""


def main() -> int:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        print("empty_libraries: wanted is the directory of torch's libraries", file=sys.stderr)
        return 2
    for name in add(Path(sys.argv[1])):
        print(name)
    return 0


def add(directory: Path) -> list[str]:
    """Compiles what is missing into the directory, which torch searches first; the names of the new libraries."""
    own = sorted(str(path) for path in directory.glob("*.so*"))
    known = _lines("ldconfig", "-p")
    found = {line.split()[0] for line in known if " => " in line} | {path.name for path in directory.glob("*.so*")}
    dynamic = "\n".join(_lines("readelf", "--dynamic", "--wide", *own))
    missing = sorted(set(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)) - found)
    library_of = dict(_versions(own))
    wanted: dict[str, set[tuple[str, str]]] = {name: set() for name in missing}
    defined, open_names = set[str](), set[str]()
    for symbol, version, here in _symbols(own):
        if here:
            defined.add(symbol)
        elif version and (name := library_of.get(version)) in wanted:
            wanted[name].add((version, symbol))
        elif not version and _FOREIGN.match(symbol):
            open_names.add(symbol)
    if missing:
        stated = {symbol for symbols in wanted.values() for _, symbol in symbols}
        wanted[missing[0]] |= {("", symbol) for symbol in open_names - defined - stated}
    for name, symbols in wanted.items():
        _compile(directory / name, symbols)
    return missing


def _lines(*command: str) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def _versions(libraries: list[str]) -> Iterator[tuple[str, str]]:
    """Each version of names that the libraries need, and the library that has it."""
    library = ""
    for line in _lines("readelf", "--version-info", "--wide", *libraries):
        if found := re.search(r"Version: \d+ +File: (\S+)", line):
            library = found[1]
        elif found := re.search(r"Name: (\S+) +Flags:", line):
            yield found[1], library


def _symbols(libraries: list[str]) -> Iterator[tuple[str, str, bool]]:
    """Dynamic symbols: name, version, and whether the library defines it."""
    for line in _lines("readelf", "--dyn-syms", "--wide", *libraries):
        parts = line.split()
        if len(parts) >= 8 and parts[0].endswith(":") and parts[4] in ("GLOBAL", "WEAK"):
            symbol, _, version = parts[7].partition("@")
            yield symbol, version.lstrip("@"), parts[6] != "UND"


def _compile(target: Path, symbols: set[tuple[str, str]]) -> None:
    lines = [_SOURCE]
    for number, (_, symbol) in enumerate(sorted(symbols)):
        answer = f'called("{symbol}")'
        if symbol.startswith("__cuda") or symbol.endswith("LastError"):  # what registers kernels at the load
            answer = "0"
        elif "GetError" in symbol:
            answer = '(long)"no device"'
        elif symbol.startswith("cuda"):
            answer = str(_NO_DEVICE)
        lines.append(f'long empty_{number}(void) __asm__("{symbol}"); long empty_{number}(void) {{ return {answer}; }}')
    versions = sorted({version for version, _ in symbols if version})
    script = [f"{one} {{ {''.join(f'{name}; ' for of, name in sorted(symbols) if of == one)}}};" for one in versions]
    with tempfile.TemporaryDirectory() as place:
        source, versions_of = Path(place, "empty.c"), Path(place, "versions")
        source.write_text("\n".join(lines), encoding="utf-8")
        versions_of.write_text("\n".join(script), encoding="utf-8")
        command = ["cc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{target.name}", str(source), "-o", str(target)]
        subprocess.run([*command, *([f"-Wl,--version-script={versions_of}"] if script else [])], check=True)


if __name__ == "__main__":
    sys.exit(main())
