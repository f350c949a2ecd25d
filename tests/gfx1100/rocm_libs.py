"""AMD's rocBLAS and hipBLASLt from Debian's packages, to be executed on the simulated card.

    python -m tests.gfx1100.rocm_libs [--mirror ADDRESS]     # fetches 442 MB and unpacks 1.3 GB

They go into ``build/rocm-libs``, or where the variable ROCM_LIBS points, and are never committed. apt fetches them from
Debian's unstable suite with lists of its own, at the mirror that the machine's sources name unless another is given,
and checks signatures. What came is written down in ``packages.json``: versions, sizes and SHA-256. Only what a gfx1100
needs is unpacked.

The packages want a newer C library than most machines have: `command` then starts Python by the loader of their own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = ("librocblas4", "libhipblaslt1")
BESIDE = ("libroctx64-4",)
BELOW = ("libc6", "libstdc++6", "libgcc-s1")
WANTED = (
    "*/Kernels.so-000-gfx1100.hsaco", "*_gfx1100.co", "*_gfx1100.hsaco", "*_gfx1100.dat", "*_fallback.dat",
    "*Mapping.dat", "*ExtOpLibrary.dat", "*Transform.hsaco", "*.so.*",
)  # fmt: skip
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


class Missing(Exception):
    """They cannot be had here; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Package:
    """What was fetched.

    Attributes:
        size: bytes of the package.
    """

    name: str
    version: str
    size: int
    sha256: str


TESTED = (
    Package(
        name="librocblas4",
        version="6.4.4-4",
        size=280155896,
        sha256="05613a07d3fba2feaa8b81a86a22bc142dd4fb6630c44c416883a33bf22a1cdb",
    ),
    Package(
        name="libhipblaslt1",
        version="7.1.1+dfsg-4",
        size=158924252,
        sha256="05159cd3ce6c5c3914c46a1cafd2be4d288b9ae5e7cda87de1beaff3c0c00542",
    ),
)
"""With which the committed results were made."""


def home() -> Path:
    """Where they are, or will be."""
    return Path(os.environ.get("ROCM_LIBS") or ROOT / "build" / "rocm-libs")


def _machine() -> str:
    return f"{platform.machine()}-linux-gnu"


def directory() -> Path:
    """The one with ``librocblas.so.4``, for ``SIMCARD_BLAS``.

    Raises:
        Missing: they were not fetched.
    """
    if not (home() / "packages.json").exists():
        raise Missing("AMD's libraries are not here (`python -m tests.gfx1100.rocm_libs` fetches them, 442 MB)")
    return home() / "amd" / "usr" / "lib" / _machine()


def packages() -> list[Package]:
    """What was fetched.

    Raises:
        Missing: nothing was.
    """
    directory()
    return [Package(**each) for each in json.loads((home() / "packages.json").read_text())]


def command(argv: Sequence[str]) -> list[str]:
    """The command line that starts this Python with `argv`: by the packages' loader if its own C library is older.

    Its children, which `sys.executable` starts, have the machine's loader again.

    Raises:
        Missing: they were not fetched.
    """
    (theirs,) = (each.version for each in packages() if each.name == "libc6")
    mine = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")[2]
    if _number(mine) >= _number(theirs):
        return [sys.executable, *argv]
    below = home() / "below" / "usr" / "lib" / _machine()
    loader = str(below / "ld-linux-x86-64.so.2")
    return [loader, "--library-path", str(below), "--argv0", sys.executable, sys.executable, *argv]


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def environment() -> dict[str, str]:
    """What a process needs beside the simulated card's variables.

    Raises:
        Missing: they were not fetched.
    """
    return {"SIMCARD_BLAS": str(directory())}


# ---- fetching ---------------------------------------------------------------------------------------------------


def _mirror() -> str:
    """That of the machine's own sources.

    Raises:
        Missing: they name none.
    """
    etc = Path("/etc/apt")
    files = [etc / "sources.list", *sorted((etc / "sources.list.d").glob("*"))]
    for path in files:
        if path.is_file():
            found = re.search(
                r"^\s*(?:deb\b.*?|URIs:\s*)(https?://\S+/debian)/?(?=\s|$)", path.read_text(), re.MULTILINE
            )
            if found:
                return found[1]
    raise Missing("the machine's sources of packages name no mirror of Debian's; give one with --mirror")


def _run(argv: list[str], **more: object) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, **more)  # type: ignore[call-overload]
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise Missing(f"{argv[0]} failed: {said[-1] if said else done.returncode}")


def _fetched(into: Path, mirror: str) -> list[Path]:
    """The packages, fetched by apt with state and lists below `into`."""
    apt = into / "apt"
    for name in ("lists/partial", "cache/archives/partial", "state", "etc"):
        (apt / name).mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()
    signed = f"[signed-by={KEYRING}] " if KEYRING.exists() else ""
    (apt / "sources.list").write_text(f"deb {signed}{mirror} unstable main\n")
    options = {
        "Dir::State": apt / "state", "Dir::State::lists": apt / "lists", "Dir::State::status": apt / "status",
        "Dir::Cache": apt / "cache", "Dir::Etc::sourcelist": apt / "sources.list", "Dir::Etc::sourceparts": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null", "APT::Sandbox::User": "root",
    }  # fmt: skip
    given = [f"-o{name}={value}" for name, value in options.items()]
    _run(["apt-get", *given, "update"])
    archives = into / "archives"
    archives.mkdir(exist_ok=True)
    _run(["apt-get", *given, "download", *LIBRARIES, *BESIDE, *BELOW], cwd=archives)
    return sorted(archives.glob("*.deb"))


def _unpack(archive: Path, into: Path, wanted: Sequence[str]) -> None:
    into.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(archive)], stdout=subprocess.PIPE) as reader:
        with tarfile.open(fileobj=reader.stdout, mode="r|") as content:
            for member in content:
                if any(fnmatch(member.name, pattern) for pattern in wanted):
                    content.extract(member, into, filter="data")
        assert reader.stdout is not None
        while reader.stdout.read(1 << 20):  # the end of the archive, behind the last file
            pass
    if reader.returncode:
        raise Missing(f"{archive.name} cannot be unpacked")


def fetch(mirror: str | None = None) -> list[Package]:
    """Fetches and unpacks them; a fetch that does not come to its end leaves nothing.

    Args:
        mirror: address of a mirror of Debian's; that of the machine's own sources if None.

    Raises:
        Missing: they cannot be had here.
    """
    if platform.machine() != "x86_64":
        raise Missing(f"the packages are for x86_64, and this is {platform.machine()}")
    for tool in ("apt-get", "dpkg-deb", "tar"):
        if shutil.which(tool) is None:
            raise Missing(f"there is no {tool} here")
    home().parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="rocm-libs-", dir=home().parent))
    try:
        found = []
        for archive in _fetched(scratch, mirror or _mirror()):
            name, version, _ = archive.name.removesuffix(".deb").split("_")
            into = scratch / ("below" if name in BELOW else "amd")
            _unpack(archive, into, WANTED if name in LIBRARIES else ("*",))
            content = archive.read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            found.append(Package(name=name, version=version.replace("%2b", "+"), size=len(content), sha256=digest))
        for part in ("apt", "archives"):
            shutil.rmtree(scratch / part)
        (scratch / "packages.json").write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")
        if home().exists():
            shutil.rmtree(home())
        scratch.rename(home())
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return found


def main() -> None:
    """Fetches them, and says what came; exit code 1 and one line where they cannot be had."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--mirror", help="address of a mirror of Debian's; by default that of the machine's own sources"
    )
    try:
        found = fetch(parser.parse_args().mirror)
    except Missing as missing:
        sys.exit(str(missing))
    tested = {each.name: each for each in TESTED}
    for each in found:
        other = each.name in tested and tested[each.name] != each
        note = f"  (results were made with {tested[each.name].version})" if other else ""
        print(f"{each.name} {each.version}  {each.size} bytes  SHA-256 {each.sha256}{note}")
    print(f"in {home()}")


if __name__ == "__main__":
    main()
