"""``hf-rocm-tune verify RESULT|REPO``: whether a result is what was written, and its base what it was trained on.

Each file is read and compared with the manifest; a weight that changed is named. The base's files are compared with
what the run recorded: with the hashes that the Hub states, or as they lie in a directory or in the Hub's cache. A GGUF
file is compared with the model that it was made of. What cannot be said is named as not known, never left out.

A manifest says what was written, and not by whom: who can change a file can write a manifest that fits it. For that
there is a signature, and `signing`.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, RepoFile, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from hf_rocm_tune.errors import FOREIGN_ERRORS, CommandParser, CorruptionError, UsageError, first_line, listed
from hf_rocm_tune.foreign import file_in, visible
from hf_rocm_tune.models import base_files
from hf_rocm_tune.models.base_files import BaseFile, BaseRecord
from hf_rocm_tune.models.files import hub_snapshot, sums
from hf_rocm_tune.paths import expand_user, is_local_model
from hf_rocm_tune.publish import signing
from hf_rocm_tune.publish.history import REPORT_NAME, read_json
from hf_rocm_tune.publish.readme import README_NAME
from hf_rocm_tune.publish.values import mapping, text
from hf_rocm_tune.publish.verdict import counted, judge
from hf_rocm_tune.redaction import hub_id_of, print_line
from hf_rocm_tune.survive import manifest
from hf_rocm_tune.survive.manifest import MANIFEST_NAME, FileProblem, Manifest
from hf_rocm_tune.survive.saved_adapter import CONFIG_FILE, above

# What programs load of a directory, whoever wrote it.
_LOADED = re.compile(
    rf"{re.escape(CONFIG_FILE)}|adapter_model\..*|(model|pytorch_model).*\.(safetensors|bin)(\.index\.json)?|.*\.gguf"
)
_UNREACHABLE = (OSError, HfHubHTTPError, HFValidationError)


@dataclass
class Findings:
    """What was findings, in lines."""

    right: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        kinds = (("as written", self.right), ("WRONG", self.wrong), ("not known", self.unknown))
        return [f"{kind + ':':<12}{line}" for kind, lines in kinds for line in lines]


def verify(name: str, *, base: str | None = None, revision: str | None = None, key: Path | None = None) -> Findings:
    """Compare a result, and its base, with what was recorded when they were used.

    Args:
        name: directory of a run, a checkpoint, an adapter or a merged model of ours, or the Hub id of one.
        base: directory or Hub id of the base; None for the one that the result names.
        revision: branch, tag or commit of a Hub id.
        key: a public key in PEM, with which the signature must have been made.

    Raises:
        UsageError: there is nothing that can be checked, or the key is none.
    """
    findings = Findings()
    directory = _directory(name, revision)
    checkpoints = sorted(file.parent for file in directory.glob(f"*/{MANIFEST_NAME}"))
    manifests = {part: manifest.read(part) for part in (directory, *checkpoints)}
    top = manifests[directory]
    if isinstance(top, FileProblem) and top.kind == "missing":
        raise UsageError(
            f"{name} has no {MANIFEST_NAME}, so nothing says what it should hold: give a result of hf-rocm-tune, or "
            "one of its checkpoints (checkpoint-N)"
        )
    for part, written in manifests.items():
        label = name if part == directory else f"{name}, {part.name}"
        if isinstance(written, FileProblem):
            findings.wrong.append(f"{label}: {written}")
        else:
            _check_files(label, part, written, findings)
            _check_gguf(part, directory, findings)
    if isinstance(top, Manifest):
        _check_base(directory, top, base, findings)
        _report_run(directory, top, findings)
    _check_signature(name, directory, key, findings)
    return findings


def _directory(name: str, revision: str | None) -> Path:
    if is_local_model(name):
        directory = expand_user(name)
        if not os.path.isdir(directory):
            raise UsageError(f"{name} is not a directory: give the directory of a result, or a Hub id")
        return directory
    try:
        return Path(snapshot_download(name, revision=revision))
    except _UNREACHABLE as error:
        raise UsageError(
            f"{name} is no directory and cannot be downloaded ({first_line(error)}): check the spelling, the network "
            "and HF_HUB_OFFLINE"
        ) from error


# ---- the result ------------------------------------------------------------------------------------------------------


def _check_files(label: str, directory: Path, written: Manifest, findings: Findings) -> None:
    """Every file that a manifest lists, and files that programs load and it does not list."""
    right = 0
    in_cache = hub_id_of(str(directory.resolve())) is not None
    for name, entry in written.files.items():
        problems = manifest.compare(directory, {name: entry})
        if not problems:
            right += 1
        for problem in problems:
            if name == README_NAME:
                findings.unknown.append(f"{label}: {problem}; a card may be edited, and no program loads it")
            elif problem.kind == "missing" and in_cache and constants.HF_HUB_OFFLINE:
                findings.unknown.append(f"{label}: {name} is not in the Hub's cache")
            else:
                findings.wrong.append(f"{label}: {problem}{_changed_tensors(directory, name, written)}")
    weights = [path.name for path in directory.iterdir() if _LOADED.fullmatch(path.name)]
    for name in sorted({*weights, *base_files.names_beside(directory)} - written.files.keys()):
        findings.wrong.append(f"{label}: {name} is not in its {MANIFEST_NAME}: another program wrote it")
    state = "the result" if written.status == "final" else "a checkpoint"
    when = f"{state} of run {written.run_id} after {written.step} steps, {written.created}"
    findings.right.append(f"{label}: {right} of {len(written.files)} files ({when})")


def _changed_tensors(directory: Path, name: str, written: Manifest) -> str:
    """Which tensors of a changed file differ from what was written; empty where that cannot be told."""
    before = {
        label.partition(":")[2]: digest for label, digest in written.tensors.items() if label.startswith(f"{name}:")
    }
    if not before or not name.endswith(".safetensors"):
        return ""
    try:
        content = sums(file_in(directory, name))
    except (OSError, ValueError):
        return ""
    now = {tensor: checksum.digest.hex() for tensor, checksum in content.tensors.items()}
    changed = [tensor for tensor in sorted(before.keys() | now.keys()) if before.get(tensor) != now.get(tensor)]
    if not changed:
        return ": its header differs"
    verb = "differs" if len(changed) == 1 else "differ"
    return f": {listed(changed)} {verb}"


def _check_gguf(part: Path, model: Path, findings: Findings) -> None:
    """A GGUF file says the same as the model in the directory above, beside its weights."""
    files = sorted(part.glob("*.gguf"))
    if not files or not (model / "config.json").is_file():
        return
    if importlib.util.find_spec("gguf") is None:
        findings.unknown.append(f"{files[0].name}: whether it says what the model says (`pip install gguf`)")
        return
    from hf_rocm_tune.publish import export, readback

    try:
        converted = readback.model_in(model)
    except UsageError as error:
        findings.unknown.append(f"{files[0].name}: whether it says what the model says: {error}")
        return
    for file in files:
        try:
            fields, tensors = readback.fields_of(file), export.tensors_of(file)
            wrong = readback.differences(fields, converted, tensors)
        except (*FOREIGN_ERRORS, OSError) as error:
            wrong = [f"it cannot be read ({first_line(error)})"]
        findings.wrong += [f"{file.name} differs from the model: {line}" for line in wrong]
        if not wrong:
            findings.right.append(f"{file.name}: vocabulary, special tokens, template and settings are the model's")


# ---- the base --------------------------------------------------------------------------------------------------------


def _check_base(directory: Path, written: Manifest, given: str | None, findings: Findings) -> None:
    merged = mapping(written.extra, "merged")
    try:
        recorded = base_files.read(written.extra.get("base_files") or merged.get("base_files"))
    except ValueError as error:
        findings.wrong.append(f"{MANIFEST_NAME}: {error}")
        return
    if recorded is None:
        findings.unknown.append(
            "the base: its files are not recorded (an earlier version wrote this, or a user's script)"
        )
        return
    config = read_json(directory / CONFIG_FILE)
    named = given or text(config, "base_model_name_or_path") or (recorded.name if "/" in recorded.name else "")
    revision = None if given else text(config, "revision") or None
    if not named:
        findings.unknown.append(f"the base {recorded.name}: where it is; name a directory or a Hub id with --base")
        return
    local = expand_user(named) if os.path.isdir(expand_user(named)) else above(directory, named)
    if local is not None:
        _compare_directory(f"the base {named}", local, recorded, findings, whole=recorded.commit is None)
        return
    if not constants.HF_HUB_OFFLINE:
        _compare_with_hub(named, revision, recorded, findings)
        return
    cached = hub_snapshot(named, revision)
    if cached is not None:
        _compare_directory(f"the base {named} in the Hub's cache", cached, recorded, findings, whole=False)
    else:
        findings.unknown.append(
            f"the base {named}: it is not in the Hub's cache, and the Hub is not asked (HF_HUB_OFFLINE); a directory "
            "can be named with --base"
        )


def _compare_directory(label: str, directory: Path, recorded: BaseRecord, findings: Findings, *, whole: bool) -> None:
    """Files on this disk; ``whole``: the run saw all files that there were."""
    right = 0
    for name, wanted in recorded.files.items():
        try:
            path = directory / name  # checked when it was read; a user's own base may have links
            said = base_files.difference(wanted, path) if path.is_file() else "it is missing"
        except LookupError as error:
            findings.unknown.append(f"{label}: {name}: {error.args[0]}")
            continue
        except OSError as error:
            said = str(error)
        if said is None:
            right += 1
        else:
            findings.wrong.append(f"{label} is not what was trained on: {name}: {said}")
    if whole:
        for name in base_files.names_beside(directory):
            if (directory / name).is_file() and name not in recorded.files:
                findings.wrong.append(f"{label} is not what was trained on: {name} was not there")
    findings.right.append(f"{label}: {right} of {len(recorded.files)} files are those that were trained on")


def _compare_with_hub(name: str, revision: str | None, recorded: BaseRecord, findings: Findings) -> None:
    """The hashes that the Hub states of large files; small ones are downloaded."""
    label = f"the base {name} on the Hub"
    try:
        info = HfApi().repo_info(name, revision=revision)
        tree = HfApi().list_repo_tree(name, recursive=True, revision=info.sha)
        there = {one.path: one for one in tree if isinstance(one, RepoFile)}
        said = {
            file: _difference_on_hub(name, str(info.sha), there.get(file), wanted)
            for file, wanted in recorded.files.items()
        }
    except _UNREACHABLE as error:
        findings.unknown.append(f"{label}: it cannot be asked ({first_line(error)})")
        return
    wrong = {file: line for file, line in said.items() if line}
    at = f" {str(info.sha)[:10]}"
    if recorded.commit:
        at += f" (recorded: {recorded.commit[:10]})"
    pinned = ""
    if recorded.commit not in (None, info.sha):
        pinned = f"; load the base with revision={recorded.commit}"
    for file, line in wrong.items():
        if line.startswith("?"):
            findings.unknown.append(f"{label}: {file}: {line[1:]}")
        else:
            findings.wrong.append(f"{label},{at}, is not what was trained on: {file}: {line}{pinned}")
    right = len(said) - len(wrong)
    findings.right.append(f"{label},{at}: {right} of {len(said)} files are those that were trained on")


def _difference_on_hub(name: str, commit: str, there: RepoFile | None, wanted: BaseFile) -> str:
    """What a file on the Hub has otherwise than recorded; empty if nothing, "?" and a reason if that is not known."""
    if there is None:
        return "it is missing"
    if there.size != wanted.bytes:
        return f"it has {there.size} bytes, {wanted.bytes} were recorded"
    if there.lfs is None:
        file = Path(hf_hub_download(name, there.path, revision=commit))
        return base_files.difference(wanted, file) or ""
    if wanted.sha256 is None:
        return "?its SHA-256 was not on record; download it, and name the directory with --base"
    if str(there.lfs.sha256) != wanted.sha256:
        return "its SHA-256 is not the recorded one"
    return ""


# ---- what else is known ----------------------------------------------------------------------------------------------


def _report_run(directory: Path, written: Manifest, findings: Findings) -> None:
    """What was verified while it was made."""
    merged = mapping(written.extra, "merged")
    if merged:
        what = f"merged in float32 from an adapter ({text(merged, 'method')}) into {text(merged, 'base')}"
        findings.right.append(f"{what}; adapter's SHA-256 {text(merged, 'adapter_sha256')}")
        return
    report: Mapping[str, Any] = {}
    for folder in (directory, directory.parent):  # of a checkpoint it is in the run's directory
        candidate = read_json(folder / REPORT_NAME)
        if text(candidate, "run_id") == written.run_id:
            report = candidate
            break
    verdict = judge(report, finished=written.status == "final")
    lines = {"bad": findings.wrong, "unknown": findings.unknown}.get(verdict.level, findings.right)
    lines.append(f"in the run: {verdict.headline}")
    for title, amount, wrong, recovered in counted(report):
        line = f"in the run: {title}: {amount}"
        if wrong != "0":
            line += f", {wrong} wrong"
            if recovered:
                line += f" ({recovered} recovered)"
        findings.right.append(line)
    findings.unknown += [f"in the run: {note}" for note in verdict.notes]


def _check_signature(name: str, directory: Path, key: Path | None, findings: Findings) -> None:
    if key is not None:
        problem = signing.problem_of(directory, key)
        if problem is None:
            findings.right.append(f"{name}: signed with the key of {key.name}, every file of it")
        else:
            findings.wrong.append(f"{name}: {problem}")
    elif (directory / signing.SIGNATURE_NAME).is_file():
        findings.unknown.append(f"{name}: who signed it; give the public key with --key")
    else:
        findings.unknown.append(f"{name}: who wrote it: it is not signed, and a manifest can be written by anybody")


# ---- the command -----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Run ``hf-rocm-tune verify``."""
    parser = CommandParser(
        prog="hf-rocm-tune verify",
        description="Whether a result is what was written, its base what it was trained on, and what was verified "
        "while it was made. Nothing is loaded or changed. Exit code 3 if something is not as it was.",
    )
    add = parser.add_argument
    add("result", metavar="RESULT|REPO", help="a run, a checkpoint, an adapter, a merged model, or a Hub id of one")
    add("--base", help="directory or Hub id of the base (default: the one that the result names)")
    add("--revision", help="branch, tag or commit of a Hub id")
    add("--key", type=Path, metavar="FILE", help="public key (PEM) with which it must be signed")
    wanted = parser.parse_args(list(argv))
    findings = verify(wanted.result, base=wanted.base, revision=wanted.revision, key=wanted.key)
    for line in findings.lines():
        print_line(visible(line))
    if findings.wrong:
        more = ""
        if len(findings.wrong) > 1:
            more = f" and {len(findings.wrong) - 1} more"
        raise CorruptionError(f"{findings.wrong[0]}{more}. Do not use it: get it again from who made it")
    print_line(f"{wanted.result}: nothing differs from what was recorded")
    return 0
