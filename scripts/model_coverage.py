"""Tries every architecture of transformers by every method, and writes docs/models.md from what came of it.

    python scripts/model_coverage.py --shard 1/8 [--kind causal] [--cells LoRA plan] [--only NAME ...] [--redo]
    python scripts/model_coverage.py --page

Each is a small version of its own configuration (`small_versions.py`) with random weights, trained for two steps on
the CPU by the real command, every byte verified; planned for a 20 GB card; and its adapter merged, and written as
GGUF. What is refused or fails is kept with the first line that a user sees. Results are added to
`benchmarks/results/`, and what is there already is not tried again without ``--redo``; ``--only`` shows whole lines of
errors.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import small_processors  # noqa: E402
import small_versions  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
_KEPT = ROOT / "benchmarks" / "results" / "2026-11-30-cpu-model-coverage.json"
RESULTS = Path(os.environ.get("COVERAGE_RESULTS", _KEPT))
METHODS = {"LoRA": [], "QLoRA": ["--load_in_4bit"], "all weights": ["--use_peft", "false"]}
CELLS = (*METHODS, "plan", "merge", "GGUF")
GOOD = {**dict.fromkeys(METHODS, "trained"), "plan": "planned", "merge": "merged", "GGUF": "written"}
_OF_ADAPTER = {"merge": [], "GGUF": ["--gguf", "f16"]}
UNKNOWN = "unknown"  # to llama.cpp: not counted
_NOT_KNOWN = re.compile(r"Model \w+ is not supported")
KINDS = {"causal": "Language models", "image-text": "Models that read pictures"}
#: What a refusal says that trains all the same: it is given, and the cell says so.
_ADVICE = re.compile(
    r"give (--(?:gradient_checkpointing false|router_aux_loss_coef 0|bf16 true|dtype float32|pad_to_multiple_of \d+))"
)
SECONDS = float(os.environ.get("COVERAGE_SECONDS", 90.0))  # of one command
PLANNED = 256  # tokens of a planned row, at most


_TWO_PARTS = "an encoder and a decoder: TRL's SFTTrainer is for causal language models"
#: By model type: why what transformers lists is no causal language model that reads texts, or texts and pictures.
NO_LANGUAGE_MODEL = {
    **dict.fromkeys(
        ("florence2", "pix2struct", "pp_formulanet", "t5gemma2", "udop", "vision-encoder-decoder"), _TWO_PARTS
    ),
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"), "it drafts for another model, whose keys and values it reads"
    ),
    **dict.fromkeys(("musicgen", "musicgen_melody"), "it writes codes of sounds, no text"),
    "diffusion_gemma": "it fills blocks by diffusion: no causal language model",
    "evolla": "it reads proteins, which TRL's collator does not give",
    "instructblipvideo": "it reads videos of four frames, no pictures",
    "pi0": "it gives movements of a robot, no text",
    "shieldgemma2": "transformers lists it with Gemma 3's class, which does not find its tensors: a classifier's",
}
#: By model type: why it is not trained, or not planned, where the reason is upstream's and was found out.
REASONS = {
    **NO_LANGUAGE_MODEL,
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), "planned: its indexer loops over each token of each row"),
    "blt": "its patches follow from the content of a row",
    "fuyu": "its processor drops a row's first token, where Llama's tokenizer has one of its own",
    "git": "it puts a picture's states before the text's, so that TRL's loss has more states than labels",
    "llama4": "transformers' forward fails: the outputs of its language model have no image_outputs",
}


def try_one(model_type: str, kind: str, cells: list[str], place: Path, data: Path, server: Any) -> dict[str, Any]:
    """What came of an architecture: of each cell what a user sees."""
    row: dict[str, Any] = {"architecture": small_versions.model_types(kind)[model_type], "cells": {}}
    folder = place / model_type
    why = _built(model_type, kind, folder)
    if why is not None:
        return row | {"cells": dict.fromkeys(cells, f"not built: {why}")}
    for name in cells:
        begun = time.monotonic()
        row["cells"][name] = _cell(name, folder, place, data, server)
        row.setdefault("seconds", {})[name] = round(time.monotonic() - begun, 1)
    return row


def _built(model_type: str, kind: str, folder: Path) -> str | None:
    """Builds a model in a process of its own; why that failed, or None."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_build, args=(model_type, kind, folder, writer))
    child.start()
    writer.close()
    child.join(3 * SECONDS)
    if child.is_alive():
        child.kill()
        return f"it takes more than {3 * SECONDS:g} seconds"
    try:
        said: str | None = reader.recv()
    except EOFError:
        return f"its process ended with {child.exitcode}"
    return said


@cache
def _tokenizer() -> Any:
    from tests import tiny

    return tiny.build_tokenizer()


def _build(model_type: str, kind: str, folder: Path, writer: Any) -> None:
    import torch
    import transformers

    from tests import pictures

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        small_versions.build(model_type, kind, folder, _tokenizer(), pictures.TEMPLATE)
        if not small_processors.has_template(folder):
            _write_texts(folder, None if kind == "causal" else small_processors.placeholder(folder))
        writer.send(None)
    except Exception as error:  # whatever an architecture raises
        text = str(error).strip().splitlines()
        writer.send(f"{type(error).__name__}: {' '.join(text)[:300] if text else ''}")


def _write_texts(folder: Path, placeholder: str | None) -> None:
    """Rows without conversations, for a processor that has no chat template; None: without pictures."""
    from tests import pictures

    names = pictures.write_files(folder / "rows", 16)
    rows = [
        {"prompt": f"{placeholder or ''}{pictures.question(number)}", "completion": pictures.answer(number)}
        | ({} if placeholder is None else {"images": [name]})
        for number, name in enumerate(names)
    ]
    pictures.write_jsonl(folder / "rows" / "train.jsonl", rows)


def _cell(name: str, model: Path, place: Path, data: Path, server: Any) -> str:
    output = place / f"{model.name}-out"
    own = model / "rows"
    data = own if own.is_dir() else data
    length = small_versions.LENGTH if data.name == "data" else small_processors.LENGTH
    if name in METHODS:
        shutil.rmtree(output, ignore_errors=True)
        words = ["--model", model, "--dataset", data, "--output_dir", output, "--max_steps", 2, "--save_strategy", "no"]
        words += ["--batch_size", 2, "--max_seq_length", length, "--disable_tqdm", "true"]
        done = _ended(server, [*map(str, words), *METHODS[name]], {})
        given = ""
        if done.code and (advice := _ADVICE.search(_line(done))):
            given = advice[1]
            output = output.with_name(f"{output.name}-again")  # the first may still be written to
            shutil.rmtree(output, ignore_errors=True)
            words[words.index("--output_dir") + 1] = output
            done = _ended(server, [*map(str, words), *METHODS[name], *given.split()], {})
        if name == "LoRA" and not done.code:
            shutil.copytree(output, place / f"{model.name}-adapter", dirs_exist_ok=True)
        if done.code:
            return _line(done)
        return f"{_trained(output)} ({given})" if given else _trained(output)
    if name == "plan":
        words = ["--model", model, "--gpu", "rx7900xt", "--seq", min(length, PLANNED), "--json"]
        done = _ended(server, [*map(str, words)], {"VERB": "plan"})
        if done.code and "give --dataset with rows" in done.stderr:
            done = _ended(server, [*map(str, words), "--dataset", str(data)], {"VERB": "plan"})
            return _line(done) if done.code else f"{GOOD[name]} (--dataset)"
        return _line(done) if done.code else GOOD[name]
    adapter = place / f"{model.name}-adapter"
    if not adapter.is_dir():
        return "no adapter"
    merging = [str(adapter), str(place / f"{model.name}-merged"), *_OF_ADAPTER[name]]
    if name == "GGUF":
        merging += ["--llama_cpp", str(_converter(place / "converter"))]
    done = _ended(server, merging, {"VERB": "merge"})
    shutil.rmtree(place / f"{model.name}-merged", ignore_errors=True)
    if name == "GGUF" and _NOT_KNOWN.search(_line(done)):
        return UNKNOWN
    return _line(done) if done.code else GOOD[name]


def _converter(folder: Path) -> Path:
    """A folder with llama.cpp's converter, which is told that the small tokenizer splits text as GPT-2's does: it
    knows tokenizers by a fingerprint of their vocabulary."""
    known = shutil.which("convert_hf_to_gguf.py")
    if known is None:
        known = str(Path(sys.executable).parent / "convert_hf_to_gguf.py")
    folder.mkdir(exist_ok=True)
    lines = [
        f"import sys; sys.path[0] = {str(Path(known).parent)!r}",
        "import conversion.base, convert_hf_to_gguf",
        "conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: 'gpt-2'",
        "convert_hf_to_gguf.main()",
    ]
    (folder / "convert_hf_to_gguf.py").write_text("\n".join(lines), encoding="utf-8")
    return folder


def _ended(server: Any, words: list[str], env: dict[str, str]) -> Any:
    from tests.e2e.command import Result

    try:
        return server.start(*words, env={"OMP_NUM_THREADS": "1", **env}).wait(timeout=SECONDS)
    except AssertionError:
        return Result(code=-9, stdout="", stderr=f"TimeoutError: more than {SECONDS:g} seconds")


def _trained(output: Path) -> str:
    covered = json.loads((output / "transfer_report.json").read_text())["coverage"]
    whole = covered["verified_bytes"] == covered["device_bytes"] > 0
    return "trained" if whole else f"fails: trained, {covered['unverified']} unverified"


def _line(done: Any) -> str:
    """What a user sees of a refusal, or the last line of a failure."""
    lines = done.error_lines or [line for line in done.stderr.strip().splitlines() if line.strip()][-1:] or ["?"]
    text = re.sub(r"/(?:tmp|dev/shm)/\S*?(?=[:;,'\s]|$)", "MODEL", lines[0].removeprefix("hf-rocm-tune: error: "))
    return f"{'refused' if done.error_lines and done.code == 2 else 'fails'}: {text.replace('|', '/').strip()[:400]}"


# ---- the page -------------------------------------------------------------------------------------------------------


def page(found: dict[str, Any]) -> str:
    """The page of all results, by kind and family."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines = [
        "# Models",
        "",
        f"Written by `scripts/model_coverage.py` on {found['date']} from what it tried: architectures of transformers, "
        "each as a small version of its own configuration",
        "with random weights, on a CPU, by the real commands. *trained*: two steps of `sft`, all verified, with"
        " pictures in the rows where a model reads them.",
        "*planned*: for a 20 GB card, rows of at most 256 tokens (1,200 in some cells with pictures). "
        "*merged*: the adapter of LoRA into the weights. Words after *yes* are a flag"
        " that the refusal of the bare command names.",
        "Where a reason stands before what was said, it was found out; else sizes of a small version may not fit each"
        " other.",
        "Something else: an encoder with a decoder, a draft model, a model of sounds, videos, proteins or robots, a "
        "classifier.",
        "*GGUF*: written in float16 by the converter of the package convert-hf-to-gguf, which is told that the small"
        " tokenizer is GPT-2's, and read back; *unknown* to that converter is not counted; whether llama.cpp computes"
        " as transformers does: see [serving.md](serving.md).",
        f"No architecture is refused by name. With {versions}; timm and scipy were installed, which a few towers need.",
        "",
        f"| of those tried | {' | '.join(CELLS)} | LoRA and plan |",
        "|---|" + "---|" * (len(CELLS) + 1),
    ]
    for kind, title in KINDS.items():
        known = len(small_versions.model_types(kind))
        models = {name: row["cells"] for name, row in found[kind].items() if name not in NO_LANGUAGE_MODEL}
        others = len(found[kind]) - len(models)
        lines.append(f"| {title.lower()}, of {known} | {_shares(row['cells'] for row in found[kind].values())} |")
        lines.append(f"| without {others} that are something else | {_shares(models.values())} |")
    for kind, title in KINDS.items():
        lines += ["", f"## {title}", "", f"| family | architecture | {' | '.join(CELLS)} |"]
        lines.append("|---|---|" + "---|" * len(CELLS))
        reasons: dict[str, list[str]] = {}
        for name in sorted(found[kind], key=lambda each: (family(each), each)):
            row = found[kind][name]
            cells = [_short(row["cells"].get(cell, "not tried"), cell) for cell in CELLS]
            lines.append(f"| {family(name)} | {row['architecture']} | {' | '.join(cells)} |")
            for cell in CELLS:
                said = row["cells"].get(cell, "")
                if ": " in said and not is_good(said, cell):
                    if name in REASONS:
                        said = f"{REASONS[name]}. Said was: {said}"
                    reasons.setdefault(f"{row['architecture']}: {said}", []).append(cell)
        if reasons:
            lines += ["", "Why not:", ""]
            lines += [f"- {', '.join(cells)} of {_escaped(said)}" for said, cells in reasons.items()]
    return "\n".join(lines) + "\n"


def _shares(rows: Iterable[dict[str, str]]) -> str:
    """How many are good of each cell, and of LoRA and plan together: columns of a table."""
    rows = list(rows)
    shares = []
    for cell in CELLS:
        results = [row[cell] for row in rows if row.get(cell, UNKNOWN) != UNKNOWN]
        shares.append(_share([is_good(result, cell) for result in results]) if results else "not tried")
    both = [all(is_good(row.get(cell, ""), cell) for cell in ("LoRA", "plan")) for row in rows]
    return " | ".join([*shares, _share(both)])


def _share(good: list[bool]) -> str:
    return f"{sum(good)} of {len(good)} ({100 * sum(good) / max(len(good), 1):.0f} %)"


def is_good(said: str, cell: str) -> bool:
    """Whether a cell is good, with a flag that the refusal of the bare command names or without."""
    return said == GOOD[cell] or said.startswith(f"{GOOD[cell]} (")


def _short(said: str, cell: str) -> str:
    return said.replace(GOOD[cell], "yes") if is_good(said, cell) else said.split(":")[0]


def _escaped(text: str) -> str:
    return re.sub(r"([<>*_`])", r"\\\1", text)


def family(model_type: str) -> str:
    """The letters with which a model type begins: ``qwen`` of ``qwen3_moe``."""
    found = re.match(r"[a-z]+", model_type)
    return found.group() if found else model_type


def stored() -> dict[str, Any]:
    empty: dict[str, Any] = {"benchmark": "model_coverage", **{kind: {} for kind in KINDS}}
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else empty


def store(found: dict[str, Any]) -> None:
    names = ("transformers", "trl", "peft", "bitsandbytes", "convert-hf-to-gguf")
    found |= {"date": time.strftime("%Y-%m-%d"), "versions": {each: metadata.version(each) for each in names}}
    text = json.dumps(found, indent=1, sort_keys=True) + "\n"
    RESULTS.write_text(text, encoding="utf-8")


def main() -> int:
    """Tries a shard, or writes the page. Returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard", default="1/1", help="the first of eight parts: 1/8")
    parser.add_argument("--kind", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--cells", choices=CELLS, nargs="+", default=list(CELLS))
    parser.add_argument("--only", nargs="+", help="these model types, printed in full")
    parser.add_argument("--redo", action="store_true", help="try again what failed")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no other architecture after so many")
    parser.add_argument("--page", action="store_true", help="write docs/models.md from the results")
    wanted = parser.parse_args()
    if wanted.page:
        PAGE.write_text(page(stored()), encoding="utf-8")
        return 0
    from tests import pictures, tiny
    from tests.e2e.command import CommandServer

    part, parts = map(int, wanted.shard.split("/"))
    begun = time.monotonic()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokenizer()  # and what it imports, once: each model is built in a forked process
    importlib.import_module("transformers.models.auto.modeling_auto")
    importlib.import_module("transformers.modeling_utils")
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        texts, seen = tiny.write_dataset_dir(place / "data"), pictures.write_rows(place / "pictures")
        server = CommandServer(place / "server")
        for kind in wanted.kind:
            names = [each for each in small_versions.model_types(kind) if not wanted.only or each in wanted.only]
            for name in names[part - 1 :: parts]:
                if time.monotonic() - begun > wanted.seconds:
                    break
                known = stored()[kind].get(name, {}).get("cells", {})
                again = wanted.redo or bool(wanted.only)
                cells = [
                    each for each in wanted.cells if each not in known or (again and not is_good(known[each], each))
                ]
                if not _OF_ADAPTER.keys().isdisjoint(cells) and "LoRA" not in cells:
                    cells.insert(0, "LoRA")
                if not cells:
                    continue
                reads_text = kind == "causal" or small_processors.processor_class(name) is None
                row = try_one(name, kind, cells, place, texts if reads_text else seen, server)
                found = stored()
                row["cells"] = known | row["cells"]
                found[kind][name] = row
                store(found)
                print(
                    f"{name:<32} " + " | ".join(f"{k}: {v}" for k, v in row["cells"].items() if k in cells), flush=True
                )
                for each in place.glob(f"{name}*"):
                    shutil.rmtree(each, ignore_errors=True)
        server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
