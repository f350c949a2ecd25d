"""Pushes a run's checkpoints while it trains, and its result when it has ended.

A checkpoint is linked (or copied) beside the output directory when it is in place, and uploaded by a thread while the
training goes on; a rotation that deletes it meanwhile takes nothing from the upload. A push that fails is said at once
and ends nothing: what it was to bring is brought with the next one, and the last one, of the result, must succeed.

``hub_strategy`` as transformers has it: "end" pushes only the result; "every_save" the model of each checkpoint;
"checkpoint" also the whole of the newest one, as ``last-checkpoint``; "all_checkpoints" the whole of each. Checkpoints
that come faster than they can be uploaded are pushed together, in one commit, and of several models the newest counts;
``hub_always_push`` makes the training wait for each. Checkpoints are checked by the hashes that the Hub states, the
result byte by byte unless the user wants hashes only.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from hf_rocm_tune.errors import CorruptionError, Interrupted, TuneError, UsageError
from hf_rocm_tune.integrity import manifest
from hf_rocm_tune.integrity.atomic import create_staging
from hf_rocm_tune.integrity.manifest import Manifest
from hf_rocm_tune.publish.hub import (
    LAST_CHECKPOINT,
    HubError,
    Patience,
    Pushed,
    PushSettings,
    Repository,
    Say,
    Verify,
    command_for,
    private_here,
)
from hf_rocm_tune.publish.staging import Staged, check_directory, stage

Strategy = Literal["end", "every_save", "checkpoint", "all_checkpoints"]
_EARLY_ATTEMPTS = 2
_HEARTBEAT_S = 5.0
_LAST_SECONDS = 10.0
_CHECKPOINTS_FLAG: Mapping[Strategy, Literal["none", "last", "all"]] = {
    "end": "none",
    "every_save": "none",
    "checkpoint": "last",
    "all_checkpoints": "all",
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run pushes.

    Args:
        output_dir: the run's.
        repo_id: ``USER/NAME``, or ``NAME``.
        strategy: see the module's description.
        settings: for the result.
        wait_for_each: the training waits until a checkpoint is pushed.
        local: paths that the run was given, by what stands for them in public ("" for their last name).
    """

    output_dir: Path
    repo_id: str
    strategy: Strategy = "every_save"
    settings: PushSettings = field(default_factory=PushSettings)
    wait_for_each: bool = False
    local: Mapping[str, str] | None = None

    @classmethod
    def of(
        cls,
        args: Any,
        *,
        base_model_id: str | None = None,
        verify: Verify = "download",
        local: Mapping[str, str] | None = None,
    ) -> Plan:
        """The plan that ``TrainingArguments`` describe with their ``hub_*`` settings.

        Raises:
            UsageError: a setting cannot be.
        """
        try:
            settings = PushSettings(
                private=args.hub_private_repo,
                revision=args.hub_revision or "main",
                message="End of training",
                base_model_id=base_model_id,
                verify=verify,
            )
        except ValueError as error:
            raise UsageError(f"--{error}") from error
        return cls(
            output_dir=Path(args.output_dir),
            repo_id=args.hub_model_id or Path(args.output_dir).absolute().name,
            strategy=getattr(args.hub_strategy, "value", args.hub_strategy),
            settings=settings,
            wait_for_each=bool(args.hub_always_push),
            local=local,
        )


class Publisher:
    """Pushes one run. Only the first rank of a job has one.

    Args:
        plan: see `Plan`.
        token: None for HF_TOKEN or the one of `hf auth login`.
        say: takes lines for the user, from any thread.
        alive: called every few seconds while the training waits for a push.
        patience: how often to try again.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        token: str | None = None,
        say: Say = print,
        alive: Callable[[], None] | None = None,
        patience: Patience | None = None,
    ) -> None:
        self._plan, self._say, self.alive = plan, say, alive
        self._base = plan.settings.base_model_id
        self._private = private_here(
            plan.output_dir, repo_id=plan.repo_id, base_model_id=self._base, token=token, others=plan.local
        )
        self._repository = Repository(
            plan.repo_id, self._private, say, token=token, revision=plan.settings.revision, patience=patience
        )
        self._opened = False
        self._changed = threading.Condition()
        self._waiting: dict[str, Staged] = {}  # by prefix
        self._new = self._busy = self._closed = False
        self._thread: threading.Thread | None = None
        self._told: set[str] = set()

    @property
    def repo_id(self) -> str:
        """Of the repository; complete once it has been opened."""
        return self._repository.repo_id

    def open(self) -> None:
        """Make the repository, before anything else takes time. A Hub that does not answer is said, and asked later.

        Raises:
            UsageError: token, name or settings are wrong.
        """
        try:
            self._repository.open(private=self._plan.settings.private, attempts=_EARLY_ATTEMPTS)
        except HubError as error:
            self._say(f"{error}. Training starts nevertheless, and the push is tried at each save and at the end")
            return
        self._opened = True

    def checkpoint(self, directory: Path) -> None:
        """Push a checkpoint that is in place, or what the strategy wants of it. The Hub's failures are said."""
        if self._plan.strategy == "end":
            return
        wanted = {"": False}
        if self._plan.strategy != "every_save":
            wanted[LAST_CHECKPOINT if self._plan.strategy == "checkpoint" else f"{directory.name}/"] = True
        try:
            written = manifest.read(directory)
            if not isinstance(written, Manifest):
                raise UsageError(str(written))
            for prefix, whole in wanted.items():
                self._prepare(directory, written, prefix, for_resume=whole)
        except (TuneError, OSError) as error:
            self._say(f"{directory.name} could not be prepared for its push: {error}. Training goes on")
            return
        with self._changed:
            self._new = True
            if self._thread is None or not self._thread.is_alive():
                # A daemon: an upload that hangs must not keep the process from ending.
                self._thread = threading.Thread(target=self._work, name="push", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        if self._plan.wait_for_each:
            self._wait_until_idle()

    def result(self, directory: Path) -> Pushed:
        """Push the finished run, and what earlier pushes could not bring; returns when all of it was checked.

        Raises:
            TuneError: it could not be brought; the message says where the result is and how to finish.
        """
        settings = replace(self._plan.settings, checkpoints=_CHECKPOINTS_FLAG[self._plan.strategy])
        try:
            with self._changed:
                self._new = False  # the result takes the place of a model that waits
            self._wait_until_idle()
            self._prepare(directory, check_directory(directory), "", for_resume=False)
            done = self._bring(self._take([""]), message=settings.message, verify=settings.verify)
            if rest := self._take():
                self._bring(rest, message="Checkpoints", verify="hashes")
        except KeyboardInterrupt as stop:
            raise Interrupted(f"the push was stopped. {self._how_to_finish(directory, settings)}") from stop
        except (UsageError, HubError, CorruptionError) as error:
            said = f"the push failed: {error}. {self._how_to_finish(directory, settings)}"
            raise type(error)(said) from error
        finally:
            self._end()
        self._say(done.summary)
        return done

    def close(self) -> None:
        """End the thread, and say what was not brought. May be called more than once."""
        if self._end():
            self._say("the newest checkpoint is not on the Hub; the run, when it goes on, pushes the next one")

    def _end(self) -> bool:
        """Whether something is left undone. An upload that is under way gets some seconds more."""
        with self._changed:
            if self._closed:
                return False
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._busy, timeout=_LAST_SECONDS)
            unfinished = self._busy or bool(self._waiting)
            left = [*self._waiting.values()]
            self._waiting.clear()
        for each in left:
            each.drop()
        return unfinished

    def _work(self) -> None:
        """The thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._new or self._closed)
                if self._closed:
                    return
                taken = self._take()
                self._new, self._busy = False, True
            step = max(each.manifest.step for each in taken)
            try:
                self._bring(taken, message=f"Training in progress, step {step}", verify="hashes")
                self._say(f"step {step} is on the Hub: {self._repository.url}")
            except TuneError as error:
                self._say(f"the push of step {step} failed: {error}. Training goes on; the next save tries again")
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _bring(self, taken: list[Staged], *, message: str, verify: Verify) -> Pushed:
        """Push prepared copies; those that could not be brought wait for the next push, unless a newer one is there."""
        try:
            if not self._opened:
                self._repository.open(private=self._plan.settings.private)
                self._opened = True
            done = self._repository.bring(taken, message=message, verify=verify)
        except BaseException:
            with self._changed:
                for each in taken:
                    if each.prefix in self._waiting or self._closed:
                        each.drop()
                    else:
                        self._waiting[each.prefix] = each
            raise
        for each in taken:
            each.drop()
        return done

    def _prepare(self, directory: Path, written: Manifest, prefix: str, *, for_resume: bool) -> None:
        """Add a copy to those that wait, in the place of an older one of its folder."""
        root = create_staging(self._plan.output_dir / "push")
        try:
            prepared = stage(
                directory,
                written,
                root,
                private=self._private,
                prefix=prefix,
                base_model_id=self._base,
                for_resume=for_resume,
                durable=True,
            )
        except BaseException:
            shutil.rmtree(root, ignore_errors=True)
            raise
        for line in replace(prepared, prefix="").described():  # what holds for one folder holds for all
            if line not in self._told:
                self._told.add(line)
                self._say(line)
        with self._changed:
            older = self._waiting.pop(prefix, None)
            self._waiting[prefix] = prepared
        if older is not None:
            older.drop()

    def _take(self, prefixes: Iterable[str] | None = None) -> list[Staged]:
        with self._changed:
            return [self._waiting.pop(one) for one in list(self._waiting if prefixes is None else prefixes)]

    def _wait_until_idle(self) -> None:
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: not (self._busy or self._new), timeout=_HEARTBEAT_S):
                    return
            if self.alive is not None:
                self.alive()

    def _how_to_finish(self, directory: Path, settings: PushSettings) -> str:
        command = command_for(directory, self.repo_id, settings)
        return f"The result is complete in {directory} and nothing of it is lost: `{command}` finishes the push"
