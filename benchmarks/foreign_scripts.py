"""Training scripts of others, unmodified: stock beside `hf-rocm-tune script` and `VerifiedAccelerator`.

    python benchmarks/foreign_scripts.py --sources DIR --work DIR [--cases NAME ...] [--json FILE]

``--sources``: a directory with checkouts, each under its name: ``accelerate`` (``examples``,
``tests/test_samples``), ``diffusers`` (``examples``), ``transformers`` (``examples/pytorch``), ``evaluate``
(``metrics/glue``), ``pytorch-examples``, ``minGPT``. What is missing is left out and said. Accelerate's test scripts
come from the installed package. Needed besides the project's own packages: diffusers, torchvision, evaluate,
scikit-learn, scipy, schedulefree.

Nothing is downloaded: models and data are small, made here, and lie in the working directory of each run under the
names for which the scripts ask. Each script runs on the CPU and on the simulated card (`tests/simcard`), there also
with flipped and zeroed copies below everything. Compared with the stock run: exit code, standard output without times
and memory, every tensor in every file that it left, and the scalars of TensorBoard's files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import foreign_data
from benchmarks.common import main, print_table
from hf_rocm_tune.errors import UsageError

ROOT = Path(__file__).resolve().parent.parent
REPORT = "transfer_report.json"
CARD = {"SIMCARD": "1", "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests" / "simcard" / "boot")))}
HARM = {"SIMCARD_HARM": "flip,0.03,16", "SIMCARD_HARM_BACK": "zero,0.03,16", "SIMCARD_SEED": "5"}

# Accelerate's class replaced by ours before the script is run; the report is written when it ends.
DROP_IN = """
import atexit, json, runpy, sys, pathlib
import accelerate
import hf_rocm_tune
made = []
class Noted(hf_rocm_tune.VerifiedAccelerator):
    def __init__(self, *given, **more):
        super().__init__(*given, **more)
        made.append(self)
accelerate.Accelerator = accelerate.accelerator.Accelerator = Noted
sys.argv = sys.argv[1:]
sys.path[0] = str(pathlib.Path(sys.argv[0]).resolve().parent)
here = pathlib.Path.cwd()
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    for number, one in enumerate(made):
        one.transfers.write_report(here / f"engine{number}")
"""


@dataclass(frozen=True)
class Case:
    """A script, its arguments, what must lie in its working directory, and its environment.

    In ``arguments`` ``{out}`` stands for a directory that is compared, ``{data}`` for what `foreign_data` made.
    """

    name: str
    file: str  # below --sources, or of the installed package accelerate
    arguments: str = ""
    data: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    drop_in: bool = True  # whether it also runs with `VerifiedAccelerator`
    unordered: bool = False  # standard output comes from several threads


_WHEEL = "accelerate:test_utils/scripts"
_GLUE = ("bert", "glue")
_SD, _SDXL = ("stable-diffusion", "pictures"), ("stable-diffusion-xl", "pictures")
_INSTANCES = ("stable-diffusion", "instances")
_SMALL = "--resolution 64 --train_batch_size 2 --seed 3 --output_dir {out} --learning_rate 1e-3"
_TUNED = f"{_SMALL} --max_train_steps 4 --checkpointing_steps 2"

CASES = (
    *(Case(name, f"{_WHEEL}/{name}.py", drop_in=False) for name in ("test_script", "test_sync", "test_ops")),
    Case("test_checkpointing", f"{_WHEEL}/external_deps/test_checkpointing.py",
         "--model_name_or_path bert-base-cased --output_dir {out} --num_epochs 2", _GLUE),
    Case("test_metrics", f"{_WHEEL}/external_deps/test_metrics.py", data=_GLUE, drop_in=False),
    *(Case(name, f"accelerate/examples/{name}.py", more, _GLUE) for name, more in {
        "nlp_example": "",
        "complete_nlp_example": "--checkpointing_steps epoch --with_tracking --output_dir {out} --project_dir {out}",
        "by_feature/automatic_gradient_accumulation": "",
        "by_feature/checkpointing": "--checkpointing_steps 2 --output_dir {out}",
        "by_feature/cross_validation": "",
        "by_feature/ddp_comm_hook": "",
        "by_feature/early_stopping": "",
        "by_feature/gradient_accumulation": "--gradient_accumulation_steps 2",
        "by_feature/local_sgd": "--local_sgd_steps 2",
        "by_feature/memory": "",
        "by_feature/multi_process_metrics": "",
        "by_feature/profiler": "",
        "by_feature/schedule_free": "",
        "by_feature/tracking": "--with_tracking --project_dir {out}",
    }.items()),
    Case("cv_example", "accelerate/examples/cv_example.py", "--data_dir {data}/pets", ("pets", "resnet")),
    Case("by_feature/gradient_accumulation_for_autoregressive_models",
         "accelerate/examples/by_feature/gradient_accumulation_for_autoregressive_models.py",
         "--gradient_accumulation_steps 2", ("smollm", "wikitext")),
    Case("train_text_to_image_lora", "diffusers/examples/text_to_image/train_text_to_image_lora.py",
         "--pretrained_model_name_or_path {data}/stable-diffusion --train_data_dir {data}/pictures --random_flip "
         f"--snr_gamma 5 {_TUNED}", _SD),
    Case("train_text_to_image (EMA)", "diffusers/examples/text_to_image/train_text_to_image.py",
         "--pretrained_model_name_or_path {data}/stable-diffusion --train_data_dir {data}/pictures --use_ema "
         "--foreach_ema --validation_prompts picture "
         f"{_TUNED}", _SD),
    Case("train_text_to_image_lora_sdxl", "diffusers/examples/text_to_image/train_text_to_image_lora_sdxl.py",
         "--pretrained_model_name_or_path {data}/stable-diffusion-xl --train_data_dir {data}/pictures "
         f"--train_text_encoder {_TUNED}", _SDXL),
    Case("train_dreambooth", "diffusers/examples/dreambooth/train_dreambooth.py",
         "--pretrained_model_name_or_path {data}/stable-diffusion --instance_data_dir {data}/instances "
         f"--instance_prompt picture --train_text_encoder {_TUNED}", _INSTANCES),
    Case("train_dreambooth_lora", "diffusers/examples/dreambooth/train_dreambooth_lora.py",
         "--pretrained_model_name_or_path {data}/stable-diffusion --instance_data_dir {data}/instances "
         f"--instance_prompt picture --train_text_encoder {_TUNED}", _INSTANCES),
    Case("train_dreambooth_lora (prior)", "diffusers/examples/dreambooth/train_dreambooth_lora.py",
         "--pretrained_model_name_or_path {data}/stable-diffusion --instance_data_dir {data}/instances "
         "--instance_prompt picture --with_prior_preservation --class_prompt thing --class_data_dir {out}/class "
         f"--num_class_images 2 {_TUNED}", _INSTANCES),
    Case("textual_inversion", "diffusers/examples/textual_inversion/textual_inversion.py",
         "--pretrained_model_name_or_path {data}/stable-diffusion --train_data_dir {data}/instances "
         f"--learnable_property object --placeholder_token toy --initializer_token a --num_vectors 2 {_TUNED}",
         _INSTANCES),
    Case("run_glue_no_trainer", "transformers/examples/pytorch/text-classification/run_glue_no_trainer.py",
         "--model_name_or_path {data}/bert-base-cased --train_file {data}/pairs.csv --validation_file {data}/pairs.csv "
         "--num_train_epochs 2 --seed 4 --output_dir {out}", ("bert", "glue", "accuracy", "pairs")),
    Case("pytorch mnist", "pytorch-examples/mnist/main.py", "--epochs 2 --save-model", ("mnist",), drop_in=False),
    Case("pytorch vae", "pytorch-examples/vae/main.py", "--epochs 2 --batch-size 32", ("mnist",), drop_in=False),
    Case("pytorch word_language_model", "pytorch-examples/word_language_model/main.py",
         "--data {data}/words --model Transformer --epochs 2 --emsize 32 --nhid 32 --accel --save {out}/model.pt",
         ("words",), drop_in=False),
    Case("minGPT adder", "minGPT/projects/adder/adder.py",
         "--trainer.max_iters=12 --system.work_dir='{out}' --model.model_type=gpt-nano --trainer.num_workers=1",
         drop_in=False),
)  # fmt: skip

SIDES: dict[str, tuple[str, dict[str, str]]] = {
    "cpu stock": ("stock", {}),
    "cpu script": ("script", {}),
    "cpu drop-in": ("drop-in", {}),
    "card stock": ("stock", CARD),
    "card script": ("script", CARD),
    "card drop-in": ("drop-in", CARD),
    "card script, faults": ("script", {**CARD, **HARM}),
    "card drop-in, faults": ("drop-in", {**CARD, **HARM}),
}


# ---- a run --------------------------------------------------------------------------------------------------


@dataclass
class Ran:
    """What a run has left."""

    code: int
    cpu_seconds: float
    lines: list[str]
    error: str
    results: dict[str, str]  # digest of each tensor and scalar, by file and name
    reports: list[dict[str, Any]]


def run(case: Case, side: str, file: Path, work: Path, made: Path) -> Ran:
    """Run a case in a fresh directory that has the same path on every side, since scripts print it."""
    how, environment = SIDES[side]
    here = work / "run"
    shutil.rmtree(here, ignore_errors=True)
    cwd = here / "cwd"
    cwd.mkdir(parents=True)
    out = cwd / "out"
    out.mkdir()
    (cwd / "results").mkdir()  # of PyTorch's example
    foreign_data.link(case.data, made, cwd)
    words = [word.format(out=out, data=made) for word in case.arguments.split()]
    command = {
        "stock": [str(file)],
        "script": ["-m", "hf_rocm_tune.script", str(file)],
        "drop-in": ["-c", DROP_IN, str(file)],
    }[how]
    paths = [
        environment.get("PYTHONPATH", str(ROOT)),
        *([str(file.parents[2])] if case.file.startswith("minGPT") else []),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *command, *words],
        env={
            **os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore",
            "TOKENIZERS_PARALLELISM": "false", "HF_HOME": str(here / "cache"), "TQDM_DISABLE": "1",
            **environment, **case.environment, "PYTHONPATH": os.pathsep.join(paths),
        },
        cwd=cwd, capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found = sorted(here.rglob(REPORT))
    engines = [path for path in found if path.parent.name.startswith("engine")]  # not also what `end_training` writes
    reports = [json.loads(path.read_text()) for path in engines or found]
    lines = [cleaned(line) for line in done.stdout.splitlines() if not _VARIES.search(line)]
    results = {name: value for path in sorted(cwd.rglob("*")) for name, value in digests(path, cwd)}
    return Ran(done.returncode, cpu, lines, done.stderr, results, reports)


_VARIES = re.compile(r"ms/batch|it/s|seconds|iter_dt|[Mm]emory|CUDA time|CPU time|Self C|^-+|%  ")
_TIMES = re.compile(r"\d\d(?:/\d\d/\d{4} \d\d)?:\d\d:\d\d|\b0x[0-9a-f]+|\d+\.\d+(?= ?m?s\b)")


def cleaned(line: str) -> str:
    """A printed line without times and addresses."""
    return _TIMES.sub("*", line).rstrip()


_PICTURES = (".png", ".jpg")
_TENSORS = (".bin", ".pt", ".pth", ".pkl")


def digests(path: Path, above: Path) -> Iterator[tuple[str, str]]:
    """Name and digest of all that a run has computed and left in this file."""
    import torch
    from safetensors.torch import load_file

    if not path.is_file() or path.is_symlink() or any(parent.is_symlink() for parent in path.parents):
        return
    name = str(path.relative_to(above))
    if "events.out.tfevents" in path.name:
        yield from scalars(path, re.sub(r"[^/]*$|\d{10}\.\d+", "", name))
    elif path.suffix == ".safetensors":
        for key, tensor in load_file(path).items():
            yield f"{name}:{key}", of_tensor(tensor)
    elif path.suffix in _TENSORS:
        try:
            content = torch.load(path, map_location="cpu", weights_only=False)
        except Exception as error:
            yield name, f"not readable: {type(error).__name__}"
            return
        for key, value in flat(content):
            yield f"{name}:{key}", of_tensor(value) if isinstance(value, torch.Tensor) else repr(value)
    elif path.suffix in _PICTURES:
        yield name, hashlib.sha256(path.read_bytes()).hexdigest()
    elif path.suffix == ".json" and path.name.endswith("results.json"):
        yield name, path.read_text()


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested containers."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{name}/{key}")
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from flat(inner, f"{name}/{number}")
    elif isinstance(value, (int, float, str, bool)) or hasattr(value, "untyped_storage"):
        yield name, value


def of_tensor(tensor: Any) -> str:
    """Dtype, shape and digest of the bytes."""
    import torch

    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(data).hexdigest()}"


def scalars(path: Path, name: str) -> Iterator[tuple[str, str]]:
    """What a script has logged to TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path))
    events.Reload()
    for tag in events.Tags()["scalars"]:
        yield f"{name}{tag}", repr([(row.step, row.value) for row in events.Scalars(tag)])


# ---- what is compared ---------------------------------------------------------------------------------------


def differences(ours: Ran, stock: Ran, case: Case) -> list[str]:
    """In what a run differs from the stock run."""
    found = []
    if ours.code != stock.code:
        found.append(f"exit code {ours.code}, stock {stock.code}: {last_line(ours.error)}")
    lines, known = ours.lines, stock.lines
    if case.unordered:
        lines, known = sorted(lines), sorted(known)
    if lines != known:
        unlike = ((a, b) for a, b in zip(lines, known, strict=False) if a != b)
        pair = next(unlike, (f"{len(lines)} lines", f"{len(known)} lines"))
        found.append(f"output {pair[0][:200]!r}, stock {pair[1][:200]!r}")
    ours_results = {name: value for name, value in ours.results.items() if not name.startswith("engine")}
    for only, whose in ((ours_results.keys() - stock.results, "ours"), (stock.results.keys() - ours_results, "stock")):
        if only:
            found.append(f"{len(only)} results only in {whose}, first {min(only)}")
    changed = [name for name in stock.results if ours_results.get(name, stock.results[name]) != stock.results[name]]
    if changed:
        found.append(f"{len(changed)} results differ, first {changed[0]}")
    return found


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("frame")]
    told = [line for line in lines if re.match(r"\w*(Error|Exception)\b|hf-rocm-tune: ", line)]
    return (told or lines or [""])[-1][:300]


def coverage(ran: Ran) -> tuple[int, int, int, list[str]]:
    """Bytes that crossed, those verified, mismatches, and what the reports name as unverified."""
    crossed = sum(report["coverage"]["crossed_bytes"] for report in ran.reports)
    verified = sum(report["coverage"]["verified_bytes"] for report in ran.reports)
    wrong = sum(
        int(row["mismatches"])
        for report in ran.reports
        for row in report.values()
        if isinstance(row, dict) and "mismatches" in row
    )
    unverified = [str(row) for report in ran.reports for row in report["coverage"]["unverified"]]
    return crossed, verified, wrong, unverified


def source_of(case: Case, sources: Path) -> Path | None:
    if case.file.startswith("accelerate:"):
        import accelerate

        return Path(accelerate.__file__).parent / case.file.partition(":")[2]
    file = sources / case.file
    return file if file.is_file() else None


def measure(wanted: argparse.Namespace) -> dict[str, Any]:
    sources, work = wanted.sources.resolve(), wanted.work.resolve()
    if not sources.is_dir():
        raise UsageError(f"--sources {sources}: no such directory")
    chosen = [case for case in CASES if not wanted.cases or any(name in case.name for name in wanted.cases)]
    if not chosen:
        raise UsageError(f"--cases: none of {', '.join(case.name for case in CASES)}")
    from tests import simcard

    simcard.environment()  # built first
    made = work / "data"
    rows, table = [], []
    for case in chosen:
        file = source_of(case, sources)
        if file is None:
            print(f"{case.name}: {case.file} is not below --sources: left out", flush=True)
            continue
        foreign_data.make(case.data, made, sources)
        stock: dict[str, Ran] = {}
        for side, (how, _) in SIDES.items():
            compared = side.endswith("stock") and any(one.startswith(side.split()[0]) for one in wanted.sides)
            if wanted.sides and side not in wanted.sides and not compared:
                continue
            if how == "drop-in" and not case.drop_in:
                continue
            began = time.monotonic()
            ran = run(case, side, file, work, made)
            kind = side.split()[0]
            if how == "stock":
                stock[kind] = ran
                found = [] if ran.code == 0 else [f"exit code {ran.code}: {last_line(ran.error)}"]
            else:
                found = differences(ran, stock[kind], case)
                if stock[kind].code:
                    found.append("stock failed")
                if not ran.reports:
                    found.append("no report")
            crossed, verified, wrong, unverified = coverage(ran)
            if crossed != verified or unverified:
                found.append(f"{crossed - verified} bytes unverified: {unverified[:2]}")
            row = {
                "script": case.name, "side": side, "code": ran.code, "results": len(ran.results),
                "lines": len(ran.lines), "crossed_bytes": crossed, "verified_bytes": verified, "mismatches": wrong,
                "cpu_seconds": round(ran.cpu_seconds, 2), "differs": found,
            }  # fmt: skip
            rows.append(row)
            shown = "as stock" if not found else "; ".join(found)
            parts = (
                f"{time.strftime('%H:%M')} {case.name}", side, f"{time.monotonic() - began:.0f} s",
                f"{verified:,}/{crossed:,} verified, {wrong} wrong",
                f"{len(ran.results)} results, {len(ran.lines)} lines", shown,
            )  # fmt: skip
            print(" | ".join(parts), flush=True)
            if found and wanted.keep:
                kept = work / "kept" / f"{case.name} {side}".replace("/", "_").replace(" ", "_")
                kept.mkdir(parents=True, exist_ok=True)
                (kept / "stderr").write_text(ran.error)
                (kept / "stdout").write_text("\n".join(ran.lines))
        table.append((case.name, *summary([row for row in rows if row["script"] == case.name])))
    print()
    print_table(("script", "as stock", "crossed and verified", "faults found"), table)
    return {"rows": rows, "versions": describe_more()}


def summary(rows: list[dict[str, Any]]) -> tuple[str, str, str]:
    ours = [row for row in rows if "stock" not in row["side"]]
    same = sum(not row["differs"] for row in ours)
    crossed = max((row["crossed_bytes"] for row in ours), default=0)
    return f"{same} of {len(ours)}", f"{crossed:,}", str(sum(row["mismatches"] for row in ours))


def describe_more() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("diffusers", "torchvision", "evaluate", "schedulefree", "timm")}


if __name__ == "__main__":
    main(
        measure,
        __doc__,
        {
            "sources": {"type": Path, "required": True},
            "work": {"type": Path, "required": True, "help": "scratch directory; what runs leave there is removed"},
            "cases": {"nargs": "*", "default": [], "help": "parts of names; default: all"},
            "sides": {"nargs": "*", "default": [], "help": "beside the stock runs; default: all"},
            "keep": {"action": "store_true", "help": "keep the output of runs that differ, under --work"},
        },
    )
