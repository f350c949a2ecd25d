"""Whether installing this package could replace a torch that is there: dry runs of pip and uv beside stand-ins.

    python benchmarks/torch_kept.py [--tools pip uv] [--versions VERSION ...] [--out benchmarks/results]

A stand-in is what a resolver sees of an installed torch: its metadata, with a version and its requirements. It is put
into an empty virtual environment, the package's wheel is built once, and each tool is asked what it would install: for
the package, for each of its extras (uv), for all of them together, and again with the option for upgrades. Both need an
index of packages; uv must be on the PATH. Writes DATE-cpu-torch-kept.json; exit code 1 where torch would be touched.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = (
    *("2.9.1+rocm7.2.1", "2.10.0", "2.10.0+rocm7.1", "2.10.0+gitb5ea6a6", "2.10.0+cpu", "2.11.0+rocm7.2"),
    *("2.11.0+cpu", "2.12.0+rocm7.2", "2.12.1+gitdeadbee", "2.12.0+cpu", "2.13.0+rocm7.2", "2.13.0+rocm7.14.0"),
    *("2.13.0+gitabc1234", "2.13.0+cpu", "2.14.1+rocm7.2", "2.14.1+gitdeadbee", "2.14.1+cpu", "2.15.0"),
    *("2.15.0+rocm10.0.0", "2.15.0+git0123abc", "2.15.0+cpu", "2.10.0a0+git449b176", "2.16.0.dev20261120+rocm10.1"),
)
TRITON_ROCM = "3.7.1"  # the name of the package from torch 2.10 on, which the ROCm index has and PyPI has not
UPGRADE = "--upgrade"
#: Of each kind one, with which every extra is tried by itself, too.
EACH_EXTRA = ("2.10.0+gitb5ea6a6", "2.14.1+rocm7.2", "2.15.0+cpu")
#: What every torch requires.
REQUIRED = ("filelock", "typing-extensions>=4.10.0", "sympy>=1.13.3", "networkx>=2.5.1", "jinja2", "fsspec>=0.8.5")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", choices=("pip", "uv"), default=("pip", "uv"))
    parser.add_argument("--versions", nargs="+", default=VERSIONS)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        subprocess.run(
            [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", scratch, ROOT], check=True
        )
        (wheel,) = place.glob("hf_rocm_tune-*.whl")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / "venv"], check=True)
        rows = list(tries(wanted.tools, wanted.versions, wheel, place / "venv"))
    touched = [row for row in rows if row["torch"] != "kept" and (row["tool"], row["options"]) != ("uv", [UPGRADE])]
    versions = {tool: _last(subprocess.run(_version_of(tool), capture_output=True, text=True)) for tool in wanted.tools}
    result = {"date": _today(), "python": platform.python_version(), "tools": versions, "tries": rows}
    target = wanted.out / f"{_today()}-cpu-torch-kept.json"
    target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{len(rows)} tries, torch touched in {len(touched)} without uv's --upgrade: {target}")
    return int(bool(touched))


def tries(tools: Sequence[str], versions: Sequence[str], wheel: Path, venv: Path) -> Iterator[dict[str, object]]:
    """One row for each tool, stand-in, and choice of extras or options."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = sorted(project["optional-dependencies"])
    (site,) = venv.glob("lib/python3*/site-packages")
    for tool in tools:
        for version in versions:
            made = stand_in(site, version)
            asked: list[tuple[list[str], tuple[str, ...]]] = [([], ()), (extras, ())]
            if version in EACH_EXTRA:
                asked += [([one], ()) for one in extras]
            if version == versions[0]:
                asked += [([], (UPGRADE,))]
                asked += [([], ("--upgrade-package", "hf-rocm-tune"))] if tool == "uv" else []
            for names, options in asked:
                requirement = f"hf-rocm-tune[{','.join(names)}] @ {wheel.as_uri()}"
                command = [*_command(tool, venv), *options, requirement]
                # A constraint on torch in pip's configuration is its owner's: pip obeys it by replacing torch.
                environ = {**os.environ, "PIP_CONSTRAINT": os.devnull}
                done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
                found = verdict(done)
                print(f"{tool} {version} [{','.join(names)}] {' '.join(options)}: {found}", flush=True)
                yield {"tool": tool, "there": version, "extras": names, "options": list(options), "torch": found}
            for info in made:
                shutil.rmtree(info)


def stand_in(site: Path, version: str) -> list[Path]:
    """Puts the metadata of a torch of that version into an environment; where it is. A ROCm build has its Triton."""
    if "+rocm" not in version:
        return [_metadata(site, "torch", version, REQUIRED)]
    return [
        _metadata(site, "torch", version, (*REQUIRED, f"triton-rocm=={TRITON_ROCM}")),
        _metadata(site, "triton_rocm", TRITON_ROCM, ()),
    ]


def _metadata(site: Path, name: str, version: str, required: Sequence[str]) -> Path:
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {one}" for one in required]
    (info / "METADATA").write_text("\n".join([*lines, ""]), encoding="utf-8")
    (info / "INSTALLER").write_text("pip\n", encoding="utf-8")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-any\n", encoding="utf-8")
    (info / "RECORD").write_text("", encoding="utf-8")
    return info


def verdict(done: subprocess.CompletedProcess[str]) -> str:
    """What the tool would do with torch, and with vendors' libraries."""
    if done.returncode:
        return f"no answer: {_last(done, errors=True)[:300]}"
    said = f"{done.stdout}\n{done.stderr}"
    names = re.findall(r"(?im)^\s*[-+~] (\S+?)==|[ ]((?:torch|nvidia[\w-]*|cuda[\w-]*))-[0-9]", said)
    bad = sorted({name for pair in names for name in pair if re.match("torch$|nvidia|cuda|triton-rocm", name)})
    return f"touched: {', '.join(bad)}" if bad else "kept"


def _command(tool: str, venv: Path) -> list[str]:
    python = str(venv / "bin" / "python")
    if tool == "pip":
        return [sys.executable, "-m", "pip", "--python", python, "install", "--dry-run"]
    return ["uv", "pip", "install", "--dry-run", "--python", python]


def _version_of(tool: str) -> list[str]:
    return [sys.executable, "-m", "pip", "--version"] if tool == "pip" else ["uv", "--version"]


def _last(done: subprocess.CompletedProcess[str], *, errors: bool = False) -> str:
    return ((done.stderr if errors else done.stdout).strip().splitlines() or ["nothing was printed"])[-1].split(
        " from "
    )[0]


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


if __name__ == "__main__":
    sys.exit(main())
