"""AMD's rocBLAS and hipBLASLt, executed as gfx1100 machine code on the simulated card; nothing is measured.

    python benchmarks/amd_blas.py sweep [--shapes 37,65,131:97,136,71 ...] [--json FILE]
    python benchmarks/amd_blas.py kernels [--rows 512 2048 4096] [--json FILE]
    python benchmarks/amd_blas.py waves [--json FILE]

`sweep` executes every kernel that the libraries offer for a product, against float64, element by element. `kernels`
says which kernel each product of a LoRA step of an 8B model gets; of these nothing is executed. `waves` counts how many
kernels of the libraries' files have waves of 32 and of 64 lanes; the emulator knows the former.

`python -m tests.gfx1100.rocm_libs` fetches the libraries first. Figures are of their versions, which the result names.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from torch import Tensor

EXECUTED = "executed as gfx1100 machine code on the simulated card, not measured"
CHOSEN = "counted: nothing was executed, nothing measured"
LIBRARIES = ("rocBLAS", "hipBLASLt")
PAIRS = (
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    ("bfloat16", "float32"),
    ("float16", "float32"),
    ("float32", "float32"),
)
LAYOUTS = ("NT", "NN", "TN")
"""Of the product by rows, as torch has it: y = x w^T, dx = dy w, dw = dy^T x."""
UNITS = 84
"""Compute units of an RX 7900 XT."""
Row = dict[str, Any]


# ---- in a process with the card ---------------------------------------------------------------------------------


class Log:
    """The launches since the last look."""

    def __init__(self) -> None:
        self._path, self._read = Path(os.environ["SIMCARD_GFX1100_LOG"]), 0

    def launches(self) -> list[list[str]]:
        """Fields of each: see `tests.gfx1100.hip.Ran`."""
        with self._path.open() as file:
            file.seek(self._read)
            text = file.read()
        self._read += len(text)
        return [line.split("\t") for line in text.splitlines()]


def product(
    a: Tensor, b: Tensor, c: Tensor, *, across: str, library: str, beta: float = 0.0, sizes: tuple[int, ...] = ()
) -> Any:
    """``c = op(a) op(b) + beta c`` by rows, as torch asks for it: by columns, with the operands exchanged.

    Args:
        across: "N" or "T" for `a` and `b`.
        sizes: rows, inner size and columns, where the tensors are stand-ins for larger ones.
    """
    import torch

    from tests.gfx1100.hip import Product

    number = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
    ta, tb = (each == "T" for each in across)
    if sizes:
        m, k, n = sizes
    else:
        m, k = (a.shape[1], a.shape[0]) if ta else a.shape
        n = b.shape[0] if tb else b.shape[1]
    address = c.data_ptr()
    return Product(
        a=b.data_ptr(), b=a.data_ptr(), c=address, d=address, m=n, n=m, k=k, batches=1, lda=k if tb else n,
        ldb=m if ta else k, ldc=n, ldd=n, alpha=1.0, beta=beta, type_in=number[a.dtype], type_out=number[c.dtype],
        across_a=tb, across_b=ta, library=LIBRARIES.index(library),
    )  # fmt: skip


def kind_of_kernel(name: str) -> Row:
    """What the name of a kernel says of it."""
    tile, split = re.search(r"_MT(\d+x\d+x\d+)", name), re.search(r"_GSU(\d+)_", name)
    return {
        "tile": tile[1] if tile else "",
        "wmma": "_MI16x16" in name,
        "split": int(split[1]) if split else 1,
        "after": "PostGSU" in name,
    }


def _sweep(shapes: list[tuple[int, int, int]], libraries: list[str], pairs: list[tuple[str, str]]) -> Iterator[Row]:
    import torch

    from tests.gfx1100 import hip

    log = Log()
    for library in libraries:
        for given, result in pairs:
            for m, k, n in shapes:
                for across in LAYOUTS:
                    for beta in (0.0, 1.0):
                        yield _every(hip, torch, log, library, given, result, (m, k, n), across, beta)


def _every(
    hip: Any,
    torch: Any,
    log: Log,
    library: str,
    given: str,
    result: str,
    shape: tuple[int, ...],
    across: str,
    beta: float,
) -> Row:
    """Every solution for one product."""
    m, k, n = shape
    ta, tb = (each == "T" for each in across)
    random = torch.Generator().manual_seed(5)
    kind, out = getattr(torch, given), getattr(torch, result)
    a = torch.randn(*((k, m) if ta else (m, k)), generator=random).to(kind)
    b = torch.randn(*((n, k) if tb else (k, n)), generator=random).to(kind)
    c = torch.randn(m, n, generator=random).to(out)
    left, right = a.double().T if ta else a.double(), b.double().T if tb else b.double()
    exact, scale = left @ right + beta * c.double(), left.abs() @ right.abs() + beta * c.double().abs()
    # One rounding of the result, and float32 sums of k products in any order.
    bound = torch.finfo(out).eps / 2 * 1.0001 * exact.abs() + 4 * k * 2.0**-24 * scale
    begin = c if beta else torch.full_like(c, float("nan"))  # what is not to be read, is not
    on_card, target = [each.cuda() for each in (a, b)], begin.cuda()
    worst, wrong, names, faults = 0.0, [], Counter(), Counter()
    asked = product(*on_card, target, across=across, library=library, beta=beta)
    numbers = hip.solutions(asked)
    begun = time.process_time()
    log.launches()
    for number in numbers:
        target.copy_(begin.cuda())
        asked.solution = number
        try:
            hip.multiply(asked)
            torch.cuda.synchronize()
        except RuntimeError as error:
            faults[re.sub(r"^.*kernel \S+ (at 0x.*? wave \d+: )?", "", str(error))[-160:]] += 1
            log.launches()
            continue
        error = float(((target.cpu().double() - exact).abs() / bound).max())
        worst = max(worst, error if error == error else float("inf"))
        ran = [fields[1] for fields in log.launches()]
        names.update(ran)
        if not error <= 1:
            wrong.append({"solution": number, "error": error, "kernels": ran})
    kinds = {name: kind_of_kernel(name) for name in names}
    return {
        "library": library, "given": given, "result": result, "shape": list(shape), "across": across, "beta": beta,
        "solutions": len(numbers), "kernels": len(names), "wmma": sum(each["wmma"] for each in kinds.values()),
        "tiles": len({each["tile"] for each in kinds.values() if each["tile"]}),
        "split": sorted({each["split"] for each in kinds.values()}),
        "worst error over bound": worst, "wrong": wrong, "faults": dict(faults),
        "names": sorted(names), "cpu_seconds": time.process_time() - begun,
    }  # fmt: skip


WIDTH, INNER, WORDS, KEYS, RANK = 4096, 14336, 128256, 1024, 16
"""Of an 8B model as Llama 3 has them, and of its adapters."""


def _of_a_step(rows: int) -> dict[str, tuple[str, int, int, int, str, str]]:
    """Products of a LoRA step, by name: layout, rows, inner size, columns, dtypes of operands and result."""
    half, whole = "bfloat16", "float32"
    found = {}
    for name, out, inner in (
        ("q, o", WIDTH, WIDTH), ("k, v", KEYS, WIDTH), ("gate, up", INNER, WIDTH), ("down", WIDTH, INNER),
    ):  # fmt: skip
        found[f"{name}: forward"] = ("NT", rows, inner, out, half, half)
        found[f"{name}: backward"] = ("NN", rows, out, inner, half, half)
    for kind in (half, whole):
        for width in (WIDTH, INNER):
            of = f"of {width}, {kind}"
            found[f"A {of}: forward"] = ("NT", rows, width, RANK, kind, kind)
            found[f"A {of}: backward"] = ("NN", rows, RANK, width, kind, kind)
            found[f"A {of}: gradient"] = ("TN", RANK, rows, width, kind, kind)
            found[f"B {of}: forward"] = ("NT", rows, RANK, width, kind, kind)
            found[f"B {of}: backward"] = ("NN", rows, width, RANK, kind, kind)
            found[f"B {of}: gradient"] = ("TN", width, rows, RANK, kind, kind)
    found["head: forward"] = ("NT", rows, WIDTH, WORDS, half, half)
    found["head: forward to float32"] = ("NT", rows, WIDTH, WORDS, half, whole)
    found["head: backward"] = ("NN", rows, WORDS, WIDTH, half, half)
    found["head: backward to float32"] = ("NN", rows, WORDS, WIDTH, half, whole)
    found["a check's vectors"] = ("NN", rows, WIDTH, 3, whole, whole)
    return found


def _kernels(all_rows: list[int]) -> Iterator[Row]:
    """Which kernel each product gets; memory is never touched, so that one small tensor stands for all."""
    import torch

    from tests.gfx1100 import hip

    log = Log()
    stand_in = {
        name: torch.zeros(1 << 16, dtype=getattr(torch, name), device="cuda") for name in ("bfloat16", "float32")
    }
    for rows in all_rows:
        for name, (across, m, k, n, given, result) in _of_a_step(rows).items():
            for library in LIBRARIES:
                a, c = stand_in[given], stand_in[result]
                row: Row = {"rows": rows, "product": name, "sizes": [m, k, n], "library": library, "kernels": []}
                try:
                    hip.multiply(product(a, a, c, across=across, library=library, sizes=(m, k, n)))
                    torch.cuda.synchronize()
                except RuntimeError as error:
                    row["error"] = str(error)
                for fields in log.launches():
                    grid = [int(each) for each in fields[2].split(",")]
                    lanes = [int(each) for each in fields[3].split(",")]
                    kind = kind_of_kernel(fields[1])
                    groups = grid[0] * grid[1] * grid[2]
                    row["kernels"].append({"name": fields[1], "workgroups": groups, "lanes": lanes[0], **kind})
                yield row


# ---- in the process that was asked ------------------------------------------------------------------------------


def machine() -> str:
    """What the card's code was interpreted on."""
    return f"{len(os.sched_getaffinity(0))} cores of {platform.machine()}, no GPU"


def packages_or_exit() -> list[str]:
    """Names and versions of AMD's packages; ends the program with the reason where they are not here."""
    from tests.gfx1100 import rocm_libs

    try:
        return [f"{each.name} {each.version}" for each in rocm_libs.packages()]
    except rocm_libs.Missing as missing:
        sys.exit(str(missing))


def on_card(script: str, argv: list[str], **variables: str) -> Iterator[Row]:
    """The rows that a script prints with ``--on-card`` in a process with the card and the libraries."""
    from tests import simcard
    from tests.gfx1100 import rocm_libs

    with tempfile.TemporaryDirectory() as scratch:
        environment = {
            **os.environ, **simcard.environment(gfx1100=True), **rocm_libs.environment(), "OMP_NUM_THREADS": "1",
            "SIMCARD_GFX1100_LOG": str(Path(scratch) / "log"), **variables,
        }  # fmt: skip
        command = rocm_libs.command([str(Path(script).resolve()), "--on-card", *argv])
        with subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout is not None
            for line in running.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
        if running.returncode:
            sys.exit(running.returncode)


def sweep(wanted: argparse.Namespace, argv: list[str]) -> Row:
    """Runs it, prints a line for each product, and sums up."""
    rows, seen = [], {library: set() for library in LIBRARIES}
    for row in on_card(__file__, argv):
        seen[row["library"]] |= set(row.pop("names"))
        rows.append(row)
        print(
            f"{row['library']:9s} {row['given']}->{row['result']} {row['shape']} {row['across']} beta {row['beta']}: "
            f"{row['solutions']} solutions, {row['kernels']} kernels, {row['wmma']} with WMMA, worst "
            f"{row['worst error over bound']:.3f}, wrong {len(row['wrong'])}, faults {row['faults'] or 0}",
            flush=True,
        )
    sums = {
        library: {
            "products": len(mine),
            "runs": sum(row["solutions"] for row in mine),
            "kernels": len(seen[library]),
            "wmma": sum(kind_of_kernel(name)["wmma"] for name in seen[library]),
            "wrong": sum(len(row["wrong"]) for row in mine),
            "faults": dict(sum((Counter(row["faults"]) for row in mine), Counter())),
            "worst error over bound": max((row["worst error over bound"] for row in mine), default=0.0),
        }
        for library in LIBRARIES
        if (mine := [row for row in rows if row["library"] == library])
    }
    for library, found in sums.items():
        print(f"{library}: {found}")
    return {"sums": sums, "rows": rows}


def kernels(wanted: argparse.Namespace, argv: list[str]) -> Row:
    """Prints a line for each product and library."""
    rows = []
    for row in on_card(__file__, argv, SIMCARD_GFX1100_DRY="1"):
        rows.append(row)
        told = [
            f"{each['tile'] or 'after split-K'} {'WMMA' if each['wmma'] else 'no WMMA'} {each['workgroups']} workgroups"
            + (f" split {each['split']}" if each["split"] > 1 else "")
            for each in row["kernels"]
        ]
        said = "; ".join(told) or row.get("error", "")
        print(f"{row['rows']} rows, {row['product']}: {row['library']:9s} {said}", flush=True)
    for row in rows:  # their names fill hundreds of kilobytes
        for each in row["kernels"]:
            each["name"] = each["name"].partition("_MT")[0]
    return {"units": UNITS, "rows": rows}


def waves(wanted: argparse.Namespace, argv: list[str]) -> Row:
    """Kernels by library, kind of product and lanes of a wave, as their metadata has it."""
    from tests.gfx1100 import rocm_libs
    from tests.gfx1100.code_objects import elf_files

    counts: Counter[tuple[str, str, int]] = Counter()
    for path in sorted(rocm_libs.directory().rglob("*")):
        if path.suffix not in (".co", ".hsaco"):
            continue
        content = path.read_bytes()
        library = LIBRARIES["hipblaslt" in path.parts]
        kind = re.search(r"TensileLibrary_(?:Type_)?(.*?)_(?:HA|HPA|Contraction|Bias|UA)", path.name)
        for elf in [content] if content.startswith(b"\x7fELF") else elf_files(content):
            for (lanes,) in re.findall(rb"\.wavefront_size(.)", elf, re.DOTALL):
                counts[library, kind[1] if kind else "others", lanes] += 1
    rows = [
        {"library": library, "kind": kind, "lanes": lanes, "kernels": count}
        for (library, kind, lanes), count in sorted(counts.items())
    ]
    for row in rows:
        print(f"{row['library']:9s} {row['kind']:10s} waves of {row['lanes']}: {row['kernels']} kernels")
    return {"rows": rows}


def _shape(text: str) -> tuple[int, int, int]:
    m, k, n = map(int, text.split(","))
    return m, k, n


def _pair(text: str) -> tuple[str, str]:
    given, result = text.split(",")
    return given, result


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on-card", action="store_true", help=argparse.SUPPRESS)
    verbs = parser.add_subparsers(dest="verb", required=True)
    swept = verbs.add_parser("sweep", help="every kernel that is offered, against float64")
    swept.add_argument(
        "--shapes", nargs="+", type=_shape, metavar="M,K,N", default=[(37, 65, 131), (97, 136, 71), (130, 200, 33)]
    )
    swept.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    swept.add_argument("--pairs", nargs="+", type=_pair, metavar="GIVEN,RESULT", default=list(PAIRS))
    which = verbs.add_parser("kernels", help="which kernel each product of a LoRA step of an 8B model gets")
    which.add_argument("--rows", nargs="+", type=int, default=[512, 2048, 4096], help="of a micro-batch")
    counted = verbs.add_parser("waves", help="kernels by lanes of a wave")
    for each in (swept, which, counted):
        each.add_argument("--json", type=Path, metavar="FILE", help="the result goes here")
    wanted = parser.parse_args()
    if wanted.on_card:
        rows = {
            "sweep": lambda: _sweep(wanted.shapes, wanted.libraries, wanted.pairs),
            "kernels": lambda: _kernels(wanted.rows),
        }[wanted.verb]
        for row in rows():
            print(json.dumps(row), flush=True)
        return
    packages = packages_or_exit()
    found = {"sweep": sweep, "kernels": kernels, "waves": waves}[wanted.verb](wanted, sys.argv[1:])
    found = {
        "note": EXECUTED if wanted.verb == "sweep" else CHOSEN,
        "packages": packages,
        "command": sys.argv,
        **found,
    }
    if wanted.json is not None:
        wanted.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
