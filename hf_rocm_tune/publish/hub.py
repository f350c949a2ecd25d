"""Push a finished run to the Hugging Face Hub, and show that the Hub serves what was trained.

    push("out", "user/my-adapter", settings=PushSettings(private=True))

A directory that is not what its run wrote, and a run that ended with wrong bytes, are refused before anything is sent
(`upload_refusals`). A copy without this machine's paths is prepared (`upload_stage`), brought to the Hub in one commit
and checked there (`hub_sync`). The local directory is only read.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, get_args

from huggingface_hub import get_token

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.publish.hub_client import HubClient, Patience
from hf_rocm_tune.publish.hub_sync import Pushed, Verify, bring
from hf_rocm_tune.publish.privacy import Private
from hf_rocm_tune.publish.upload_card import is_hub_id
from hf_rocm_tune.publish.upload_refusals import check_directory
from hf_rocm_tune.publish.upload_stage import Staged, stage

Checkpoints = Literal["none", "last", "all"]
LAST_CHECKPOINT = "last-checkpoint/"
_CHECKPOINT = re.compile(r"^checkpoint-(\d+)$")


@dataclass(frozen=True, kw_only=True)
class PushSettings:
    """How to push.

    Args:
        private: of the repository: True refuses one that is public, False makes a new one public; None makes a new
            one private and takes one that is there as it is.
        revision: branch; it is made where it is not there.
        tags: tags for the commit.
        message: first line of the commit.
        base_model_id: the base model's id on the Hub, where it was loaded from a directory.
        verify: "download" checks every byte that the Hub serves afterwards, "hashes" only what it states of the files.
        checkpoints: what to push beside the result: nothing, the newest one as ``last-checkpoint``, or all.
    """

    private: bool | None = None
    revision: str = "main"
    tags: tuple[str, ...] = ()
    message: str = "Upload with hf-rocm-tune"
    base_model_id: str | None = None
    verify: Verify = "download"
    checkpoints: Checkpoints = "none"

    def __post_init__(self) -> None:
        if self.base_model_id is not None and not is_hub_id(self.base_model_id):
            raise ValueError(f"base_model_id must be an id on the Hub such as ORG/NAME, got {self.base_model_id!r}")
        for name, allowed in (("verify", get_args(Verify)), ("checkpoints", get_args(Checkpoints))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if not self.message.strip() or not self.revision:
            raise ValueError("message and revision must not be empty")


def push(
    directory: str | Path,
    repo_id: str,
    *,
    settings: PushSettings | None = None,
    token: str | None = None,
    say: Callable[[str], None] = print,
    patience: Patience | None = None,
) -> Pushed:
    """Push a finished run, a checkpoint or a merged model.

    Args:
        directory: with the ``integrity.json`` of ours.
        repo_id: ``USER/NAME``, or ``NAME`` for one of the token's owner.
        settings: see `PushSettings`.
        token: with write access; None for HF_TOKEN or the one of `hf auth login`. It is never shown or stored.
        say: takes lines for the user.
        patience: how often to try again.

    Returns:
        What is now on the Hub, checked.

    Raises:
        UsageError: the directory, the name, the token or the card is wrong.
        CorruptionError: the run ended with wrong bytes, or the Hub serves others than were sent.
        HubError: the Hub does not take it now.
    """
    settings, directory = settings or PushSettings(), Path(directory)
    written = check_directory(directory)
    private = private_here(directory, repo_id=repo_id, base_model_id=settings.base_model_id, token=token)
    client = HubClient(
        repo_id=repo_id,
        private=private,
        say=say,
        token=token,
        revision=settings.revision,
        patience=patience or Patience(),
    )
    with TemporaryDirectory(prefix="hf-rocm-tune-push-") as scratch:
        top = Path(scratch, "top")
        top.mkdir()
        staged = [stage(directory, written, top, private=private, base_model_id=settings.base_model_id)]
        for prefix, checkpoint in _checkpoints(directory, settings.checkpoints):
            folder = Path(scratch, prefix)
            folder.mkdir()
            of_it = check_directory(checkpoint)
            staged.append(
                stage(
                    checkpoint,
                    of_it,
                    folder,
                    private=private,
                    prefix=prefix,
                    base_model_id=settings.base_model_id,
                    for_resume=True,
                )
            )
        amount = sum(one.bytes for each in staged for one in each.entries)
        say(f"push to {repo_id}, branch {settings.revision}: {amount / 1e6:.3g} MB")
        for each in staged:
            for line in told(each):
                say(line)
        client.open(private=settings.private)
        done = bring(client, staged, message=settings.message, verify=settings.verify)
    for tag in settings.tags:
        client.tag(tag, done.commit)
    return done


def private_here(
    directory: Path,
    *,
    repo_id: str,
    base_model_id: str | None,
    token: str | None,
    others: Mapping[str, str] | None = None,
) -> Private:
    """What is private of a run: this machine's own, and the paths that the run was given.

    Args:
        directory: the run's output directory, or a checkpoint in it.
        repo_id: what stands for the directory in public.
        base_model_id: what stands for the base model's directory.
        token: never to be shown, beside the one that the user has logged in with.
        others: more paths, by what stands for them ("" for their last name).
    """
    paths = dict(others or {})
    settings = {**_settings(directory.parent), **_settings(directory)}
    for key, value in settings.items():
        if isinstance(value, str) and os.path.isabs(value):
            paths.setdefault(value, (base_model_id or "") if key == "model_name_or_path" else "")
    with suppress(OSError, ValueError, AttributeError):
        config = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))
        base = config.get("base_model_name_or_path")
        if isinstance(base, str) and os.path.isabs(base):
            paths[base] = base_model_id or ""
    paths[str(directory.absolute())] = repo_id
    logged_in = get_token() if token is None else None
    return Private.of_this_machine(os.environ, paths=paths, secrets=[token, logged_in])


def told(staged: Staged) -> list[str]:
    """What the user should know of a prepared copy: what it holds, what differs from the local files, what stays."""
    where = f" in {staged.prefix}" if staged.prefix else ""
    names = ", ".join(one.path_in_repo.removeprefix(staged.prefix) for one in staged.entries)
    lines = [f"to be uploaded{where}: {names}"]
    lines += [f"{name}{where} is published without what is local: {what}" for name, what in staged.changed.items()]
    if staged.not_listed:
        lines.append(f"not uploaded, no manifest lists them: {', '.join(staged.not_listed)}")
    return lines


def summary(done: Pushed) -> str:
    """One line on a push that was checked."""
    sent = f"{done.sent} sent, {done.files - done.sent} there already"
    deleted = f", {done.deleted} of an earlier push deleted" if done.deleted else ""
    how = (
        "every byte downloaded again and compared"
        if done.verify == "download"
        else "the hashes that it states compared"
    )
    return (
        f"pushed to {done.url} (commit {done.commit[:10]}): {done.files} files, {done.bytes / 1e6:.3g} MB; {sent}"
        f"{deleted}; the Hub serves what was trained: {how}"
    )


def command_for(directory: Path, repo_id: str, settings: PushSettings) -> str:
    """The command line that does, or finishes, a push."""
    words = ["hf-rocm-tune", "push", str(directory), repo_id]
    words += [] if settings.private is None else ["--private"] if settings.private else ["--public"]
    words += ["--revision", settings.revision] if settings.revision != "main" else []
    words += ["--base_model_id", settings.base_model_id] if settings.base_model_id else []
    words += ["--checkpoints", settings.checkpoints] if settings.checkpoints != "none" else []
    return shlex.join(words)


def _settings(directory: Path) -> dict[str, object]:
    """What ``run.json`` keeps of a run's settings; nothing without one."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return dict(json.loads((directory / "run.json").read_text(encoding="utf-8"))["settings"])
    return {}


def _checkpoints(directory: Path, which: Checkpoints) -> list[tuple[str, Path]]:
    """Folder on the Hub and directory here of each checkpoint to push.

    Raises:
        UsageError: there is none.
    """
    if which == "none":
        return []
    found = [(int(match[1]), path) for path in directory.iterdir() if (match := _CHECKPOINT.match(path.name))]
    paths = [path for _, path in sorted(found) if path.is_dir()]
    if not paths:
        raise UsageError(f"--checkpoints {which}: there is no checkpoint-N in {directory}; leave the flag away")
    return [(LAST_CHECKPOINT, paths[-1])] if which == "last" else [(f"{path.name}/", path) for path in paths]
