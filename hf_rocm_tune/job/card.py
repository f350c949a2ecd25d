"""What a run leaves for people: its log, a picture of the loss, and the model card. Training and publishing joined.

Rank 0 writes them. A card that a person wrote or edited is kept. That a picture or a card cannot be made is told, with
its traceback where it is a bug of ours, and never costs the adapter: a full disk alone ends a save, as everywhere.
"""

from __future__ import annotations

import errno
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_rocm_tune.errors import TuneError, UsageError
from hf_rocm_tune.integrity.atomic import write_text_atomic
from hf_rocm_tune.models.factory import trainable_parameters
from hf_rocm_tune.publish import card
from hf_rocm_tune.publish.history import LOG_NAME, Trained, write_log
from hf_rocm_tune.publish.page import loss_panel, write_png
from hf_rocm_tune.redaction import Private, local_paths
from hf_rocm_tune.training import report
from hf_rocm_tune.training.run import deciding_settings

if TYPE_CHECKING:
    from hf_rocm_tune.settings.arguments import Arguments
    from hf_rocm_tune.training.trainer import VerifiedTransferMixin

PICTURE_NAME = "loss.png"
# Names by which `datasets` reads files, not datasets of the Hub.
_BUILDERS = frozenset({"json", "csv", "parquet", "arrow", "text", "xml", "webdataset", "imagefolder", "audiofolder"})


@dataclass(kw_only=True)
class Cards:
    """The cards of one run.

    Args:
        arguments: of the command line.
        data: one line about the rows.
        method: of the training, in a few words.
        trainer: whose run it is.
        facts: see `report.RunFacts`.
        say: takes lines for the user.
    """

    arguments: Arguments
    data: str
    method: str
    trainer: VerifiedTransferMixin
    facts: report.RunFacts
    say: Callable[[str], None]
    _told: set[str] = field(default_factory=set)

    def write_card(self, directory: Path) -> None:
        """Put the card as it is now into a directory that is being saved.

        Raises:
            OSError: the disk is full.
        """
        with self._told_if_wrong("the model card"):
            own = card.kept(self._output_dir / card.CARD_NAME)
            if own is None:
                so_far = report.build(self.trainer, self.facts, gather=False)
                so_far["ranks"] = self.trainer.args.world_size  # of which this one has counted
                own = self._card(so_far, final=False, picture=None).encode()
            (directory / card.CARD_NAME).write_bytes(own)

    def leave_log(self, error: BaseException) -> None:
        """On the way out of a failure: leave the log as it is; that it cannot be written is noted on the failure."""
        if not self.trainer.is_world_process_zero() or not self.trainer.state.log_history:
            return
        try:
            with self._told_if_wrong(LOG_NAME):
                self._write_log()
        except OSError as also:
            error.add_note(f"{LOG_NAME} could not be written either: {also}")

    def finish(self, content: Mapping[str, Any]) -> list[str]:
        """Write log, picture and card of the finished run.

        Args:
            content: the transfer report of all ranks.

        Returns:
            Names of the files that are there now, for the manifest.

        Raises:
            OSError: the disk is full.
        """
        if not self.trainer.is_world_process_zero():
            return []
        written = []
        with self._told_if_wrong(LOG_NAME):
            written.append(self._write_log().name)
        self.trainer.beat("save")  # the first picture takes seconds on a busy machine
        with self._told_if_wrong("the picture of the loss"):
            written += self._draw(content)
        self.trainer.beat("save")
        with self._told_if_wrong("the model card"):
            file = self._output_dir / card.CARD_NAME
            if card.kept(file) is not None:
                self.say(f"{file} was written or edited by hand and is kept")
            else:
                picture = PICTURE_NAME if PICTURE_NAME in written else None
                # A card that a kill has torn would pass for one that somebody has edited.
                write_text_atomic(file, self._card(content, final=True, picture=picture))
            written.append(card.CARD_NAME)
        return written

    @property
    def _output_dir(self) -> Path:
        return Path(self.arguments.training.output_dir)

    def _write_log(self) -> Path:
        state = self.trainer.state
        return write_log(
            self._output_dir,
            run_id=self.facts.run_id,
            step=state.global_step,
            max_steps=state.max_steps,
            trained=self._trained(),
            rows=state.log_history,
        )

    def _draw(self, content: Mapping[str, Any]) -> list[str]:
        panel = loss_panel(self.trainer.state.log_history, content)
        if panel is None:
            return []
        write_png(panel, self._output_dir / PICTURE_NAME)
        return [PICTURE_NAME]

    def _card(self, content: Mapping[str, Any], *, final: bool, picture: str | None) -> str:
        model, training, state = self.arguments.model, self.arguments.training, self.trainer.state
        repo_id = training.hub_model_id if training.push_to_hub else None
        name = repo_id.rpartition("/")[2] if repo_id else self._output_dir.absolute().name
        facts = card.CardFacts(
            name=name,
            verb=self.arguments.method,
            base_model=model.model_name_or_path,
            base_model_id=self.arguments.tune.hub_base_model_id,
            revision=model.model_revision,
            datasets=self._datasets(),
            data=self.data,
            trained=self._trained(),
            settings=deciding_settings({**self.arguments.resolved(), "world_size": training.world_size}),
            rows=state.log_history,
            step=state.global_step,
            final=final,
            report=content,
            picture=picture,
            repo_id=repo_id,
        )
        local = dict.fromkeys(local_paths(self.arguments.resolved()), "") | {str(self._output_dir): repo_id or ""}
        return card.build(facts, Private.of_this_machine(os.environ, paths=local))

    def _datasets(self) -> tuple[str, ...]:
        parts = [part.path for part in self.arguments.mixture.datasets] or [self.arguments.script.dataset_name]
        return tuple(name for name in parts if name and name not in _BUILDERS)

    def _trained(self) -> Trained:
        model = self.trainer.accelerator.unwrap_model(self.trainer.model, keep_torch_compile=False)
        adapted = hasattr(model, "peft_config")
        base = model.get_base_model() if adapted else model
        trainable, total = trainable_parameters(model)
        tokenizer = self.trainer.processing_class
        return Trained(
            method=self.method,
            model_class=type(base).__name__,
            trainable=trainable,
            parameters=total,
            dtype=_bare(getattr(base.config, "dtype", None) or base.dtype),
            adapter_dtype=_adapter_dtype(model) if adapted else None,
            quantization=_quantization(base.config),
            chat_template=bool(getattr(tokenizer, "chat_template", None)),
        )

    @contextmanager
    def _told_if_wrong(self, what: str) -> Iterator[None]:
        """The block's failure becomes a line, but for a full disk."""
        try:
            yield
        except UsageError as error:
            self._say_once(f"{what} could not be made: {error}")
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._say_once(f"{what} could not be written: {error}")
        except TuneError:
            raise
        except Exception as error:
            traceback.print_exc()
            self._say_once(
                f"{what} could not be made, which is a bug: {type(error).__name__}: {error}. Please report it"
            )

    def _say_once(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self.say(line)


def _adapter_dtype(model: Any) -> str:
    """Of the adapter's matrices; DoRA's magnitudes are always float32 beside quantised weights."""
    found = {p.dtype for n, p in model.named_parameters() if p.requires_grad and "magnitude" not in n}
    names = sorted(map(_bare, found))
    return next((name for name in names if name != "float32"), "float32")


def _quantization(config: Any) -> dict[str, Any] | None:
    """Arguments of BitsAndBytesConfig, as plain values."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    values = found if isinstance(found, dict) else found.to_dict()
    wanted = ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant")
    plain = {name: values[name] for name in wanted if values.get(name)}
    return plain | {"bnb_4bit_compute_dtype": _bare(values.get("bnb_4bit_compute_dtype", "float32"))}


def _bare(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
