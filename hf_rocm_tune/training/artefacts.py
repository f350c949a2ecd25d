"""Which files in an output directory a run has written: what another run may replace, and what overwriting deletes.

A run is known by its ``run.json`` and its manifests alone. A file that neither names is somebody else's and is never
touched, whatever it is called.
"""

from __future__ import annotations

import contextlib
import filecmp
import os
import re
import stat
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.integrity import manifest
from hf_rocm_tune.training.run_record import RUN_FILE, read_record, write_record

CHECKPOINT_NAME = re.compile(r"^checkpoint-(\d+)$")
EVIDENCE_DIRECTORY = "_out_of_memory"
_WEIGHTS = re.compile(
    r"^(adapter_model\.(safetensors|bin)"
    r"|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
    r"|pytorch_model(-\d+-of-\d+)?\.bin|pytorch_model\.bin\.index\.json)$"
)
_OWN = frozenset(
    [
        "run.json",
        "integrity.json",
        "transfer_report.json",
        "training_log.json",
        "loss.png",
        "survival.jsonl",
        "stall_report.txt",
        "stall_report.json",
        "_crashes.json",
        "_step_down.json",
    ]
)
"""What any run of ours may write at the top of its directory, beside its result."""
_UPSTREAM = frozenset(
    [
        "adapter_config.json",
        "trainer_state.json",
        "training_args.bin",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "tokenizer.model",
        "chat_template.jinja",
        "preprocessor_config.json",
        "processor_config.json",
        "train_results.json",
        "eval_results.json",
        "all_results.json",
    ]
)
"""What upstream's saves leave; further names of tokenizers are met when the result is saved, see `claim`."""
_LISTED_DIRECTORY = re.compile(r"^(damaged-|kept-)?checkpoint-\d+(\.\d+)?$")
_EVIDENCE_FILE = re.compile(r"^step-\d+-rank-\d+-\d+\.(pt|pickle)$")


def in_the_way(directory: Path, owned: Collection[str] | None) -> list[str]:
    """Names in ``directory`` that a run would replace although no run of ours has written them, sorted.

    Args:
        directory: of a run; it need not be there.
        owned: what the run in it has written at the top, see `RunRecord`; None where there is no run of ours. Its
            checkpoints are told from others by their manifests, not here.
    """
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    found = set()
    for name in names:
        # On a disk that does not tell cases apart, another spelling is the same file.
        spelled = name if _may_be_written(name) else name.lower()
        if not _may_be_written(spelled) or not os.path.lexists(directory / spelled):
            continue
        if owned is None:
            found.add(name)
        elif spelled in _OWN or spelled == EVIDENCE_DIRECTORY:
            # Written by every run; a link of that name would lead out of the directory.
            found |= {name} if os.path.islink(directory / name) else set()
        elif spelled not in owned and not CHECKPOINT_NAME.match(spelled):
            found.add(name)
    return sorted(found)


def _may_be_written(name: str) -> bool:
    fixed = name in _OWN or name in _UPSTREAM or name == EVIDENCE_DIRECTORY
    return fixed or bool(_WEIGHTS.match(name) or CHECKPOINT_NAME.match(name))


def written_by(directory: Path, run_id: str, names: Iterable[str]) -> list[Path]:
    """The files in ``directory`` that a run has written: those at the top, and what its checkpoints' manifests list.

    The manifest of the result comes first, so that what is half deleted does not look finished. Links and what lies
    behind them are never among them, nor are ``run.json``, by which the rest is known, and ``README.md``, which is kept
    where a person has edited it.

    Args:
        directory: of the run.
        run_id: of the run; a manifest of another one lists nothing here.
        names: at the top, beside those that every run may write.
    """
    found = [directory / name for name in sorted({*names, *_OWN} - {"README.md", RUN_FILE, manifest.MANIFEST_NAME})]
    if listed_by(directory, run_id) is not None:
        found.insert(0, directory / manifest.MANIFEST_NAME)
    for path in sorted(directory.iterdir()):
        if path.is_symlink() or not path.is_dir():
            continue
        if path.name == EVIDENCE_DIRECTORY:
            found += [each for each in sorted(path.iterdir()) if _EVIDENCE_FILE.match(each.name)]
        elif _LISTED_DIRECTORY.match(path.name) and (listed := listed_by(path, run_id)) is not None:
            found += [path / name for name in (manifest.MANIFEST_NAME, *listed)]
    return [path for path in found if _is_plain(path)]


def listed_by(directory: Path, run_id: str) -> tuple[str, ...] | None:
    """Names that the manifest of this run in ``directory`` lists and that lie in it; None without such a manifest."""
    found = manifest.read(directory)
    if not isinstance(found, manifest.Manifest) or found.run_id != run_id:
        return None
    inside = directory.resolve()
    return tuple(name for name in found.files if "\0" not in name and (inside / name).resolve().is_relative_to(inside))


def remove(paths: Sequence[Path], top: Path) -> None:
    """Delete files, and the directories below ``top`` that are empty then.

    Raises:
        OSError: as the operating system gave it.
    """
    for path in paths:
        path.unlink(missing_ok=True)
    folders = {parent for path in paths for parent in path.parents if parent != top and top in parent.parents}
    for folder in sorted(folders, key=lambda each: len(each.parts), reverse=True):
        with contextlib.suppress(OSError):  # somebody else's files are in it
            folder.rmdir()


def make_room(final: Path, run_id: str) -> Path | None:
    """Move what is in the place of a new checkpoint aside, unless a run has written all of it itself.

    Returns:
        Where it is now; None where nothing was moved.
    """
    if not os.path.lexists(final) or (not final.is_symlink() and not unlisted(final, run_id)):
        return None
    aside = free_name(final.with_name(f"kept-{final.name}"))
    final.rename(aside)
    return aside


def unlisted(directory: Path, run_id: str) -> list[str]:
    """Names below a directory that the manifest of this run in it does not list; all of them where there is none."""
    if not directory.is_dir():
        return [directory.name]
    listed = listed_by(directory, run_id)
    ours = set() if listed is None else {*listed, manifest.MANIFEST_NAME}
    found = []
    for folder, folders, files in os.walk(directory):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        found += [Path(folder, name).relative_to(directory).as_posix() for name in (*files, *links)]
    return sorted(name for name in found if name not in ours)


def free_name(path: Path) -> Path:
    """``path``, or with the first number behind it that is not taken."""
    number, candidate = 1, path
    while os.path.lexists(candidate):
        candidate, number = path.with_name(f"{path.name}.{number}"), number + 1
    return candidate


def claim(staging: Path, directory: Path) -> list[str]:
    """Note in ``run.json`` what is about to be moved from ``staging`` to ``directory``, where a run is recorded.

    A file that is there with the same bytes (a card that a person has written) is left as it is.

    Returns:
        Names that were taken out of ``staging``, because their bytes are in place.

    Raises:
        UsageError: a file would be replaced that the run has not written.
        OSError: ``run.json`` cannot be written.
    """
    record = read_record(directory)
    if record is None:
        return []
    names = [path.relative_to(staging).as_posix() for path in staging.rglob("*") if path.is_file()]
    foreign, in_place = [], []
    for name in names:
        if name in record.files or not os.path.lexists(directory / name):
            continue
        if _is_plain(directory / name) and filecmp.cmp(staging / name, directory / name, shallow=False):
            (staging / name).unlink()
            in_place.append(name)
        else:
            foreign.append(name)
    if foreign:
        raise UsageError(f"{not_ours(directory, foreign)}; then start the same command again")
    ours = {*record.files, *names} - set(in_place)
    write_record(directory, replace(record, files=tuple(sorted(ours))))
    return in_place


def not_ours(directory: Path, names: Sequence[str]) -> str:
    """What is wrong with files that are `in_the_way`, and what to do."""
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    return (
        f"{directory} holds files that no run of ours has written and that this one would replace ({shown}): choose "
        "another --output_dir, or move them away"
    )


def _is_plain(path: Path) -> bool:
    """Whether it is a file, and no link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def is_checkpoint(directory: Path) -> bool:
    """Whether there is something to resume from: a trainer state, and weights in a form that the Trainer reads."""
    if not (directory / "trainer_state.json").is_file():
        return False
    for path in directory.iterdir():
        if _WEIGHTS.match(path.name) or path.name.startswith(("pytorch_model_fsdp", "global_step")):
            return True
        if path.is_dir() and any(_WEIGHTS.match(inner.name) for inner in path.iterdir()):
            return True
    return False
