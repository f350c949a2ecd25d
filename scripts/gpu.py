"""What only a card can show, in ten minutes: `make gpu`. Results go to benchmarks/results/ as JSON and text.

    python scripts/gpu.py [--minutes 10] [--only PART ...] [--wheels DIRECTORY] [--out DIRECTORY]
    python scripts/gpu.py --pack DIRECTORY [--library cuda130]     fetches what an image made for torch lacks

The parts run in the order of what is most worth knowing, each in a process of its own with a deadline, which is shorter
where there are fewer minutes. A part that fails stops no other, what there was no time for is named, and both files are
written again after each part, so that an interrupted run leaves what it has seen. Names of this machine and paths are
redacted. Exit code 1 where a part failed, 2 without a card. It takes the torch and the libraries that this Python has,
below our lower bounds too: the result says what was lowered. ``--wheels`` installs what is missing from a directory of
wheels, without a network, beside the Python and not into it.

On a machine without a card it can be tried on the simulated one: ``SIMCARD=1 PYTHONPATH=$PWD:$PWD/tests/simcard/boot``,
with small sizes, three of the methods and six times the time.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
OURS = [sys.executable, "-m", "hf_rocm_tune"]
SIMULATED = os.environ.get("SIMCARD") == "1"
SLOWER = 6 if SIMULATED else 1  # every time limit; there a processor plays the card
KILL_SECONDS = 10.0
LEARNING_RATE, STEPS_APART = 2e-4, 2.0  # of the methods; how far a resumed run may end from the other, in rates
LEAST_SECONDS = 20.0  # with less than this left a part is not begun
FULL_MINUTES = 10.0  # in which every part has the time that it is given below
SECONDS = "HF_ROCM_TUNE_GPU_SECONDS"  # tells a part its deadline

LEFT_OUT = "left out for time"

#: Method: its flags beside the common ones.
METHODS: dict[str, tuple[str, ...]] = {
    "LoRA, float32": ("--dtype", "float32", "--bf16", "false"),
    "QLoRA, NF4": ("--load_in_4bit", "true"),
    "LoRA, bf16, recomputation, fused AdamW": ("--gradient_checkpointing", "true", "--optim", "adamw_torch_fused"),
    "full fine-tuning": ("--use_peft", "false"),
    "LoRA, 8-bit": ("--load_in_8bit", "true"),
    "DoRA": ("--use_dora", "true"),
    "rsLoRA": ("--use_rslora", "true"),
    "modules_to_save": ("--lora_modules_to_save", "lm_head"),
    "packing": ("--packing", "true"),
}


#: What an image that was made for torch lacks; bitsandbytes is carried with one of its native libraries.
PACKED = (
    *("transformers", "trl", "peft", "datasets", "dill", "multiprocess", "xxhash", "pandas", "python-dateutil", "six"),
    *("tzdata", "huggingface_hub", "httpx2", "httpcore2", "truststore", "bitsandbytes", "matplotlib", "contourpy"),
    *("cycler", "fonttools", "kiwisolver", "pillow", "pyparsing", "tokenizers", "safetensors", "pytest", "pluggy"),
    *("iniconfig", "typing_extensions", "packaging"),
)


class Part(NamedTuple):
    """A part of the run: its name, its deadline, what is run ("{out}" is a directory of its own), accepted codes."""

    name: str
    seconds: float
    command: tuple[str, ...]
    accepted: tuple[int, ...] = (0,)


def parts(minutes: float = FULL_MINUTES) -> list[Part]:
    """In the order of what is most worth knowing; the deadlines add up to `FULL_MINUTES`."""
    short = minutes < FULL_MINUTES
    own, tests = (
        (sys.executable, __file__, "--inside"),
        (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
    )
    small = ("--simulated", "--only", "Qwen3") if SIMULATED else ("--only", "Llama-3.2-1B")
    # on the simulated card a processor computes: what a card does in seconds must be small to end at all
    width = ("--hidden", "1024", "--layers", "8", "--batch", "4", "--seq", "1024") if short else ()
    width = ("--hidden", "64", "--layers", "1", "--batch", "1", "--seq", "16") if SIMULATED else width
    size, gb, count = ("1", "0.01", "100") if SIMULATED else ("256", "1" if short else "2", "500" if short else "1000")
    shortage = (*own, "shortage") if SIMULATED else (*tests, "-m", "gpu", "tests/train/test_oom.py")
    json_to = ("--json", "{out}/result.json")
    # the simulated card's memory is the host's: the doctor, which fills what is free, gets 4 of its 20 GiB
    doctor = (*(("env", f"SIMCARD_OCCUPIED={16 << 30}") if SIMULATED else ()), *OURS, "doctor", "--json")
    doctor += ("--seconds", str(int(_share(60, minutes) * SLOWER)))

    def bench(name: str, *flags: str) -> tuple[str, ...]:
        return (sys.executable, f"benchmarks/{name}.py", "--device", "cuda", *flags, *json_to)

    steps = "8" if short else "12"
    found = [
        Part("versions", 30, (*own, "versions")),
        Part("loss gradient", 15, (*own, "products")),
        Part("methods", 150, (*own, "methods")),
        Part("bench transfer", 30, bench("transfer", "--max_mib", size, "--repeats", "3")),
        Part("drill", 40, (*OURS, "doctor", "--drill", "--faults", count, "--clean", count, *json_to)),
        Part("doctor", 75, doctor, accepted=(0, 1, 2)),
        Part("bench sft", 110, bench("sft", *width, "--turns", "1", "--steps", steps, "--sides", "off", "full")),
        Part("shortage of memory", 25, shortage),
        Part("bench load", 30, bench("load", "--gb", gb, "--repeats", "1")),
        Part("plan errors", 40, (sys.executable, "benchmarks/plan_errors.py", "--device", "cuda", *small, *json_to)),
        Part("transfer tests", 50, (*tests, "-m", "gpu or not long", "tests/transfer/test_mutants_on_card.py")),
    ]
    return [part._replace(seconds=_share(part.seconds, minutes)) for part in found]


def _share(seconds: float, minutes: float) -> float:
    """What a part gets of fewer minutes: its share, but enough to start Python and its imports."""
    return max(LEAST_SECONDS, seconds * min(1.0, minutes / FULL_MINUTES))


def main() -> int:
    """Runs the parts and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes", type=float, default=FULL_MINUTES, help="stop after this many minutes in all (default: 10)"
    )
    parser.add_argument("--only", nargs="+", choices=[part.name for part in parts()], help="run these parts only")
    parser.add_argument("--wheels", type=Path, help="take what this Python lacks from a directory of wheels")
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "benchmarks" / "results",
        help="write the results here (default: %(default)s)",
    )
    parser.add_argument("--pack", type=Path, metavar="DIRECTORY", help="fetch these wheels into a new directory")
    parser.add_argument(
        "--library", default="cuda130", help="keep this library of bitsandbytes with --pack: cuda130, rocm72 ..."
    )
    parser.add_argument("--inside", choices=INSIDE, help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.inside:
        return INSIDE[wanted.inside]()
    if wanted.pack is not None:
        return pack(wanted.pack, wanted.library)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the part that runs is ended too
    wanted.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hf-rocm-tune-gpu-", ignore_cleanup_errors=True) as scratch:
        return _run(wanted, Path(scratch))


def _run(wanted: argparse.Namespace, scratch: Path) -> int:
    began, deadline = datetime.now(UTC), time.monotonic() + 60 * SLOWER * wanted.minutes
    environ = _environ(wanted, scratch)
    result: dict[str, Any] = {
        "benchmark": "gpu",
        "card": "unknown",
        "date": began.isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "minutes": wanted.minutes,
        "versions": {},
        "left_out": [],
        "parts": [],
    }
    target = wanted.out
    for part in parts(wanted.minutes):
        if wanted.only and part.name not in wanted.only and part.name != "versions":
            continue
        left = deadline - time.monotonic()
        if left < LEAST_SECONDS:
            result["left_out"].append(part.name)
            continue
        row = _part(part, min(SLOWER * part.seconds, left), environ, scratch / part.name.replace(" ", "_"))
        result["parts"].append(row)
        print(_line(row), flush=True)
        if part.name == "versions":
            if row["outcome"] != "ok" or row["result"] is None:
                last = (row["printed"].strip().splitlines() or ["nothing was printed"])[-1]
                why = "no card" if row["outcome"] == "exit code 1" else row["outcome"]
                print(f"make gpu: {why}, so nothing else was tried: {last}", file=sys.stderr)
                return 2
            result |= {"card": row["result"]["card"], "versions": row["result"]}
            card = re.sub(r"[^a-z0-9]+", "-", result["card"].lower()).strip("-")
            target = wanted.out / f"{result['date'][:10]}-gpu-{card}.json"
        _write(result, target)
    print(_text(result) + f"\nattach these two files: {target} and {target.with_suffix('.txt').name}")
    return int(any(row["outcome"] != "ok" for row in result["parts"]))


def pack(directory: Path, library: str) -> int:
    """Fetches wheels for this Python into a directory, and prints them with their sizes."""
    if directory.exists():
        print(f"make gpu: {directory} exists: give a new directory", file=sys.stderr)
        return 2
    needed = [Requirement(text) for text in _dependencies()]
    bounds = {requirement.name.lower(): str(requirement.specifier) for requirement in needed}
    wheels = [f"{name}{bounds.get(name, '')}" for name in PACKED]
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(directory),
    ]
    if code := subprocess.run([*pip, *wheels], check=False).returncode:
        return code
    (whole,) = directory.glob("bitsandbytes-*.whl")
    if not _keep_one_library(whole, library):
        print(f"make gpu: {whole.name} has no library {library}", file=sys.stderr)
        return 2
    files = sorted(directory.glob("*.whl"), key=lambda file: -file.stat().st_size)
    for file in files:
        print(f"{file.stat().st_size / 1e6:8.2f} MB  {file.name}")
    print(f"{sum(file.stat().st_size for file in files) / 1e6:8.2f} MB  together\n")
    print(f"there: python scripts/gpu.py --wheels {directory.name}")
    return 0


def _keep_one_library(wheel: Path, library: str) -> bool:
    """Leave of the native libraries of a bitsandbytes wheel this one and the processor's; False: it is not there."""
    kept = (f"libbitsandbytes_{library}.so", "libbitsandbytes_cpu.so")
    with zipfile.ZipFile(wheel) as archive:
        content = {info: archive.read(info) for info in archive.infolist()}
    if not any(info.filename.endswith(kept[0]) for info in content):
        return False

    def is_dropped(name: str) -> bool:
        return "libbitsandbytes" in name and not name.endswith(kept)

    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for info, data in content.items():
            if info.filename.endswith(".dist-info/RECORD"):
                lines = data.decode("utf-8").splitlines()
                data = "\n".join(line for line in lines if not is_dropped(line.partition(",")[0])).encode() + b"\n"
            if not is_dropped(info.filename):
                archive.writestr(info.filename, data)
    return True


def _dependencies() -> list[str]:
    found: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    return found


def _environ(wanted: argparse.Namespace, scratch: Path) -> dict[str, str]:
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HOME": str(scratch / "hf")}
    path = [str(ROOT), environ.get("PYTHONPATH", "")]
    if wanted.wheels is not None:  # nothing is fetched, and no dependency is followed
        target, files = str(scratch / "wheels"), sorted(map(str, wanted.wheels.glob("*.whl")))
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        subprocess.run([*pip, "--target", target, *files], check=True)
        path.insert(1, target)
    sys.path[:0] = filter(None, path)  # for the redaction, where the package is not installed
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return environ


def _write(result: dict[str, Any], target: Path) -> None:
    """Both files, without names and paths of this machine; an interruption leaves the ones before."""
    from hf_rocm_tune.redaction import Private, scrub_json, scrub_text

    private = Private.of_this_machine(os.environ, paths={str(ROOT): "."})
    texts = {target: json.dumps(scrub_json(result, private), indent=1) + "\n"}
    texts[target.with_suffix(".txt")] = scrub_text(_text(result), private)
    for file, text in texts.items():
        fresh = file.with_suffix(".part")
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(file)


def _part(part: Part, seconds: float, environ: dict[str, str], out: Path) -> dict[str, Any]:
    """One part to its end or its deadline, then every process of it is gone."""
    out.mkdir(parents=True)
    command = [word.format(out=out) for word in part.command]
    began = time.monotonic()
    with (out / "printed").open("w+", encoding="utf-8", errors="replace") as printed:
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environ, SECONDS: str(seconds)},
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_us,
        )
        try:
            code: int | None = child.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # a process in the driver's hands may not end at all
                child.wait(KILL_SECONDS)
        printed.seek(0)
        text = printed.read()
    ok = code in part.accepted
    row = {
        "part": part.name,
        "outcome": "ok" if ok else f"no end within {seconds:.0f} s" if code is None else f"exit code {code}",
        "seconds": round(time.monotonic() - began, 1),
        "command": " ".join(command).replace(str(out), "OUT").replace(str(ROOT) + "/", ""),
        "result": _result(out / "result.json", text),
    }
    return row if ok else {**row, "printed": text[-3000:]}


def _end_with_us() -> None:
    """In a part's process: it is killed when this script is, so that none is left on the card."""
    pr_set_pdeathsig = 1  # linux/prctl.h
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)


def _result(file: Path, text: str) -> Any:
    """What the part wrote, or the last JSON object that it printed; None for none."""
    found = file.read_text(encoding="utf-8") if file.exists() else text[text.find("{\n") :] if "{\n" in text else ""
    for candidate in (found, *reversed(text.splitlines()[-20:])):
        try:
            value = json.loads(candidate)
        except ValueError:
            continue
        if isinstance(value, dict):
            return value
    return None


def _line(row: dict[str, Any]) -> str:
    return f"{row['part']:26} {row['outcome']:24} {row['seconds']:7.1f} s"


def _text(result: dict[str, Any]) -> str:
    versions = result["versions"]
    packages = ", ".join(f"{name} {version}" for name, version in versions.get("packages", {}).items())
    lines = [
        f"{result['card']} ({versions.get('architecture')}), {result['date']}",
        f"{result['command']} ({result['minutes']:g} minutes)",
        f"{versions.get('platform')}, {versions.get('runtime')}: {packages}",
        f"digests on the card: {versions.get('digest')}",
        f"below our lower bounds: {', '.join(versions.get('lowered', [])) or 'nothing'}",
    ]
    for row in result["parts"]:
        lines.append(_line(row))
        if row["part"] == "methods" and row["result"]:
            lines += [f"  {each['method']}: {each['outcome']}" for each in row["result"]["methods"]]
        if row["part"] == "doctor" and row["result"]:
            found = (each for each in row["result"]["findings"] if each["status"] in ("fail", "warn"))
            lines += [f"  {each['status'].upper()} {each['title']}: {each['text'][:160]}" for each in found]
        if "printed" in row:
            said = [line for line in row["printed"].splitlines() if line.strip() and line[0] != "{"]
            lines += [f"  {line[:240]}" for line in said[-3:]]
    lines += [f"left out for time: {', '.join(result['left_out']) or 'nothing'}", "", *_headlines(result)]
    return "\n".join(lines) + "\n"


def _headlines(result: dict[str, Any]) -> list[str]:
    """Five figures; "not measured" where a part has not left its own."""
    found = {row["part"]: row["result"] for row in result["parts"]}

    def figure(part: str, show: Callable[[Any], str]) -> str:
        try:
            return show(found[part])
        except (KeyError, TypeError, IndexError, StopIteration):
            return "not measured"

    def verified(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return next(row for row in rows if row.get("side", row.get("way")) == "ours, verified")

    shown = {
        "verified, tokens a second": (
            "bench sft", lambda it: f"{verified(it['rows'])['tokens_per_second']['median']:,.0f}",
        ),
        "verified to unverified, time a token": (
            "bench sft", lambda it: f"{1 / verified(it['rows'])['tokens_per_second_to_unverified']['median']:.3f}",
        ),
        "verified transfers, GB/s at the largest size": (
            "bench transfer", lambda it: f"{verified(it['rows'][::-1])['gb_per_s']['median']:.1f}",
        ),
        "product of the loss gradient, TFLOP/s": (
            "loss gradient", lambda it: ", ".join(f"{name} {rate:.3g}" for name, rate in it["rates"].items()),
        ),
        "methods that trained, were killed and resumed equal": (
            "methods", lambda it: f"{sum(each['outcome'] == 'ok' for each in it['methods'])} of {len(it['methods'])}",
        ),
    }  # fmt: skip
    return [f"{title}: {figure(part, show)}" for title, (part, show) in shown.items()]


# ---- what runs inside a part --------------------------------------------------------------------------------------


def _versions() -> int:
    """The card, what is installed, and what of it is below our lower bounds."""
    import torch

    if not torch.cuda.is_available():
        print("torch sees no CUDA or HIP card")
        return 1
    packages, lowered = {}, []
    for needed in map(Requirement, _dependencies()):
        try:
            packages[needed.name] = metadata.version(needed.name)
        except metadata.PackageNotFoundError:
            packages[needed.name] = "missing"
        if not needed.specifier.contains(packages[needed.name].replace("missing", "0"), prereleases=True):
            lowered.append(f"{needed.name} {packages[needed.name]} instead of {needed.specifier}")
    from hf_rocm_tune.machine.software import missing_for_triton
    from hf_rocm_tune.transfer.digest import device_method

    properties, digest = torch.cuda.get_device_properties(0), device_method(torch.device("cuda", 0))
    found = {
        "card": properties.name,
        "architecture": getattr(properties, "gcnArchName", None),
        "digest": f"{digest.name}: {digest.reason}",
        "missing_for_triton": missing_for_triton() or None,
        "cards": torch.cuda.device_count(),
        "memory_bytes": properties.total_memory,
        "runtime": f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}",
        "platform": f"Python {platform.python_version()}, {platform.platform()}",
        "packages": packages,
        "lowered": lowered,
    }
    print(json.dumps(found))
    return 0


def _products() -> int:
    """How fast each way multiplies the loss's gradient, and which one a run takes."""
    import torch

    from hf_rocm_tune.models import products

    device = torch.device("cuda", 0)
    choice = products.choose(device)
    taken = "upstream's way: no AMD card" if choice is None else choice.describe()
    print(json.dumps({"rates": products.measure(device), "chosen": taken}))
    return 0


def _methods() -> int:
    """Each method to its end, once undisturbed and once killed after its checkpoint and started again.

    A method is left out where the one that took longest would not fit into the time that is left.
    """
    rows: list[dict[str, Any]] = []
    ends, longest = time.monotonic() + float(os.environ.get(SECONDS, "inf")), 0.0
    with _server() as (server, common, scratch):
        chosen = dict(list(METHODS.items())[:3] if SIMULATED else METHODS.items())
        for number, (method, flags) in enumerate(chosen.items()):
            began = time.monotonic()
            if began + longest > ends - 1:
                rows.append({"method": method, "outcome": LEFT_OUT, "seconds": 0.0})
                continue
            try:
                outcome, facts = _method(server, [*common, *flags], scratch / str(number))
            except Exception as error:
                outcome, facts = f"{type(error).__name__}: {error}"[:500], {}
            longest = max(longest, time.monotonic() - began)
            row = {"method": method, "outcome": outcome, "seconds": round(time.monotonic() - began, 1), **facts}
            rows.append(row)
            print(json.dumps({"methods": rows}), flush=True)
    print(json.dumps({"methods": rows}), flush=True)
    return int(any(row["outcome"] not in ("ok", LEFT_OUT) for row in rows))


def _method(server: Any, argv: list[str], out: Path) -> tuple[str, dict[str, Any]]:
    import torch
    from safetensors.torch import load_file

    clean, again = out / "clean", out / "again"
    first = server.run(*argv, "--output_dir", str(clean))
    if first.code:
        return _said(first), {}
    crash = {"HF_ROCM_TUNE_CRASH": "step=4,kind=kill"}
    killed = server.run(*argv, "--output_dir", str(again), env=crash)
    if killed.code != -signal.SIGKILL:
        return f"was to be killed and was not: {_said(killed)}", {}
    resumed = server.run(*argv, "--output_dir", str(again), env=crash)
    if resumed.code:
        return f"resume: {_said(resumed)}", {}
    report = json.loads((clean / "transfer_report.json").read_text(encoding="utf-8"))
    name = "adapter_model.safetensors" if (clean / "adapter_model.safetensors").exists() else "model.safetensors"
    ours, theirs = load_file(again / name), load_file(clean / name)
    apart = max(float((ours[key].float() - theirs[key].float()).abs().max()) for key in theirs)
    facts = {
        "coverage": report["coverage"]["verified_bytes"] / report["coverage"]["device_bytes"],
        "mismatches": sum(report[stage]["mismatches"] for stage in ("weights", "batches", "frozen", "files")),
        "resumed_equal": all(torch.equal(ours[key], theirs[key]) for key in theirs),
        "resumed_apart_in_learning_rates": apart / LEARNING_RATE,
    }
    if facts["coverage"] < 1 or facts["mismatches"]:
        return "not all verified", facts
    # atomic sums of split products differ from run to run, and AdamW turns a differing sign into a step of 2 rates
    return "ok" if apart <= STEPS_APART * LEARNING_RATE else "the resumed run ends elsewhere", facts


def _shortage() -> int:
    """A micro-batch that does not fit is split, on a simulated card of which others hold nearly all."""
    with _server() as (server, common, scratch):
        big = [*common, "--max_length", "256", "--per_device_train_batch_size", "16", "--attn_implementation", "eager"]
        outcome = {}
        for name, environ in {"plenty": {}, "short": {"SIMCARD_OCCUPIED": str((20 << 30) - (48 << 20))}}.items():
            done = server.run(*big, "--output_dir", str(scratch / name), env=environ)
            if done.code:
                print(_said(done))
                return 1
            outcome[name] = json.loads((scratch / name / "transfer_report.json").read_text(encoding="utf-8"))["memory"]
    print(json.dumps(outcome))
    return int(outcome["plenty"]["shortages"] > 0 or outcome["short"]["shortages"] == 0)


def _said(result: Any) -> str:
    lines = result.error_lines or result.stderr.strip().splitlines()[-1:]
    return f"exit code {result.code}: {lines[-1] if lines else 'nothing was said'}"[:500]


@contextmanager
def _server() -> Iterator[tuple[Any, list[str], Path]]:
    """Commands forked from one process that has imported everything; the flags that all have, and a directory."""
    sys.path.insert(0, str(ROOT))
    from tests import tiny
    from tests.e2e.command import CommandServer

    with tempfile.TemporaryDirectory(prefix="hf-rocm-tune-gpu-") as made:
        scratch = Path(made)
        model = tiny.build("llama3", scratch / "models")
        data = tiny.write_dataset_dir(scratch / "data", train=48, test=4)
        common = ["--model_name_or_path", str(model), "--dataset_name", str(data), "--max_steps", "5"]
        common += ["--per_device_train_batch_size", "2", "--max_length", "64", "--save_steps", "2", "--doctor", "off"]
        common += [
            "--learning_rate",
            str(LEARNING_RATE),
            "--eval_strategy",
            "no",
            "--logging_steps",
            "1",
            "--disable_tqdm",
            "true",
            "--lora_dropout",
            "0",
        ]
        server = CommandServer(scratch / "commands")
        try:
            yield server, common, scratch
        finally:
            server.close()


INSIDE = {"versions": _versions, "products": _products, "methods": _methods, "shortage": _shortage}

if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("make gpu: interrupted; what was measured before is in the results directory", file=sys.stderr)
        sys.exit(130)
