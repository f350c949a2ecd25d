"""What a run prints, and the log, the picture of the loss and the model card (``README.md``) that it writes.

Rank 0 writes the files. A ``README.md`` that a person wrote or edited is kept. A picture or a ``README.md`` that cannot
be made is reported (with a traceback if it is our bug) and does not stop the save; a full disk does.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from hf_rocm_tune.doctor.diagnose import all_checks, crashed, diagnose
from hf_rocm_tune.doctor.findings import Evidence, Finding, unknown
from hf_rocm_tune.doctor.system import of_decision
from hf_rocm_tune.errors import TuneError, UsageError
from hf_rocm_tune.machine import variables
from hf_rocm_tune.machine.process import users_environ
from hf_rocm_tune.machine.software import Software, read_software
from hf_rocm_tune.machine.survey import survey
from hf_rocm_tune.models import products
from hf_rocm_tune.models.adapter import trainable_parameters
from hf_rocm_tune.models.experts import experts_of, is_packed
from hf_rocm_tune.models.files import GENERATION_FILE
from hf_rocm_tune.publish import readme, vocabulary
from hf_rocm_tune.publish.history import LOG_NAME, Run, write_log
from hf_rocm_tune.publish.page import loss_panel, write_png
from hf_rocm_tune.redaction import Private, local_paths, print_line
from hf_rocm_tune.survive.atomic import write_text_atomic
from hf_rocm_tune.survive.manifest import MANIFEST_NAME
from hf_rocm_tune.train import report, telemetry
from hf_rocm_tune.train.telemetry import describe_device
from hf_rocm_tune.transfer import triton_refusal

if TYPE_CHECKING:
    import torch

    from hf_rocm_tune.data.sources import Splits
    from hf_rocm_tune.settings.arguments import Arguments
    from hf_rocm_tune.train.trainer import VerifiedTransferMixin
    from hf_rocm_tune.transfer import Mover

PREFIX = "hf-rocm-tune: "


def say(*lines: str) -> None:
    """Prints lines on rank 0; of a quiet run warnings only."""
    if int(os.environ.get("RANK", "0")) == 0:
        _print("", [line for line in lines if not telemetry.is_quiet() or line.startswith("warning")])


_IN_OUR_WORDS: dict[str, str] = {
    "The tokenized prompt is not a prefix": "warning: the end of a prompt is tokenised otherwise alone than before its "
    "answer, and learned with it: end prompts where a token ends (a space belongs to the answer), or use chat messages",
    "Cloning chat template added new tokens": "warning: the output layer is not trained on the added tokens: give "
    "--lora_modules_to_save lm_head if the answers lack them",
    "Token indices sequence length is longer": "",  # what --max_length cuts is printed
    "The new embeddings will be initialized": "",
    "The new lm_head weights will be initialized": "",
    "Repo card metadata block": "",  # of a dataset's page
}
_SPEAKERS = (
    *(f"trl.trainer.{method}_trainer" for method in ("sft", "dpo", "kto", "reward", "grpo")),
    *("transformers.tokenization_utils_base", "transformers.modeling_utils", "huggingface_hub.repocard"),
)


def speak_for_libraries() -> None:
    """From now on what libraries log about rows and tokens is said in our words, or not at all."""
    for name in _SPEAKERS:
        logging.getLogger(name).addFilter(_said_in_our_words)  # adding it again changes nothing


def _said_in_our_words(record: logging.LogRecord) -> bool:
    """False for a message that is printed otherwise; a message of TRL's loses its rank."""
    message = re.sub(r"^\[RANK \d+\] ", "", record.getMessage())
    for begin, words in _IN_OUR_WORDS.items():
        if message.startswith(begin):
            if words:
                say(words)
            return False
    record.msg = message
    record.args = None
    return True


def say_of_this_rank(*lines: str) -> None:
    """Prints lines on every rank that calls it, for findings about this rank's own card."""
    rank = ""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        rank = f"rank {os.environ.get('RANK', '0')}: "
    _print(rank, lines)


def _print(rank: str, lines: Iterable[str]) -> None:
    for line in lines:
        with tqdm.external_write_mode():  # above the live line
            print_line(f"{PREFIX}{rank}{line}")


def settings(arguments: Arguments, data: str, mover: Mover) -> list[str]:
    """Lines printed before the model is loaded: data, device, batch, verification, defaults that differ from TRL's."""
    training = arguments.training
    ranks = training.world_size
    lines = [
        f"data {data}",
        f"device {_device_text(mover.device)}, {ranks} process{'es' if ranks > 1 else ''}, "
        f"batch {_batch_text(arguments)}, verification {mover.settings.verify}",
    ]
    sync = arguments.grad_sync
    if ranks > 1 and (sync.method, sync.compression) != ("ddp", "none"):
        where = "through host memory, over gloo" if sync.method == "host" else "by DistributedDataParallel"
        lines.append(f"gradients are averaged {where}, compression {sync.compression}")
    if mover.device.type != "cpu":
        refusal = triton_refusal(mover.device)
        if refusal:
            lines.append(f"{refusal}; loss and digests are computed without Triton, which is slower")
    if training.bf16:
        choice = products.choose(mover.device)
        if choice is not None:
            lines.append(choice.describe())
    faults = mover.fault_injection()
    if faults is not None:
        lines.append(f"faults are injected on request: {faults}")
    lines += _defaults_lines(arguments)
    return lines


def _device_text(device: torch.device) -> str:
    facts = describe_device(device)
    memory = ""
    if "memory_bytes" in facts:
        memory = f", {facts['memory_bytes'] / 2**30:.1f} GiB"
    return f"{facts['type']} ({facts['name']}{memory})"


def _batch_text(arguments: Arguments) -> str:
    training = arguments.training
    micro_batch = training.per_device_train_batch_size
    accumulation = training.gradient_accumulation_steps
    shares = training.world_size
    if arguments.strategy().shares_rows:  # all ranks get the same rows
        shares = 1
    effective = micro_batch * accumulation * shares
    return f"{micro_batch} x {accumulation} accumulated x {shares} = {effective} effective"


def _defaults_lines(arguments: Arguments) -> list[str]:
    """The defaults that differ from TRL's: in one line, or with ``-v`` a line with its reason for every one."""
    rows = arguments.differences
    if arguments.tune.verbose:
        return [f"default {row.name}={row.ours} (trl {arguments.method}: {row.trl}): {row.reason}" for row in rows]
    if not rows:
        return []
    ours = ", ".join(f"{row.name}={row.ours}" for row in rows)
    return [f"defaults other than trl's: {ours} (-v says why)"]


def resumption(checkpoint: Path) -> str:
    """The line of a run that continues; how far it is stands in the checkpoint's ``trainer_state.json``."""
    attested = "not attested: it has no manifest"
    if (checkpoint / MANIFEST_NAME).exists():
        attested = "verified"
    with suppress(OSError, ValueError, KeyError, TypeError):  # of another program, or damaged: loading it says so
        steps = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["max_steps"]
        return f"continues from {checkpoint.name} of {steps:,} steps ({attested})"
    return f"continues from {checkpoint.name} ({attested})"


def model(trainer: VerifiedTransferMixin, facts: report.RunFacts) -> str:
    """The line printed once the model is on its device: method, size, and how much was verified."""
    trainable, total = trainable_parameters(trainer.model)
    covered = trainer.weight_coverage()
    return (
        f"model {trainer.model.config.name_or_path}: {method(trainer)}, {trainable:,} of {total:,} parameters "
        f"({100 * trainable / max(total, 1):.3g} %) trained; loaded in {facts.load_seconds or 0:.1f} s, "
        f"{covered.share} of the bytes on the device verified"
    )


def method(trainer: VerifiedTransferMixin) -> str:
    configs = getattr(trainer.model, "peft_config", None)
    if not configs:
        return "full fine-tuning"
    config = next(iter(configs.values()))
    base = trainer.model.get_base_model()
    name = config.peft_type.value.replace("LORA", "LoRA")
    if getattr(config, "use_dora", False):
        name = "DoRA"
    if getattr(base, "is_loaded_in_4bit", False):
        name = f"Q{name} (4-bit)"
    elif getattr(base, "is_loaded_in_8bit", False):
        name = f"Q{name} (8-bit)"
    elif any(is_packed(experts) for _, experts in experts_of(base)):
        name += " (experts in MXFP4)"
    return f"{name}, r={getattr(config, 'r', '-')}, alpha={getattr(config, 'lora_alpha', '-')}"


# ---- this machine ---------------------------------------------------------------------------------------------

DEADLINE_S = 5.0
_VARIABLES = "variables"
_ON_THE_PROCESSOR = ("no_gpu", "no_card")
"""Findings that training would run on the processor, which the run has already printed."""


def check_machine(
    *, doctor: bool, say: Callable[[str], None], deadline_s: float = DEADLINE_S
) -> tuple[dict[str, Any], ...]:
    """Check this machine, on its first rank. Nothing runs on the card, and a failure does not stop the run."""
    if os.environ.get("LOCAL_RANK", "").strip() not in ("", "0", "-1"):
        return ()
    findings: list[Finding] = []
    if doctor:
        software = read_software(in_process=True)
        findings = _read_in_time(software, deadline_s)
        for finding in findings:
            known = not software.devices and finding.row in _ON_THE_PROCESSOR
            if finding.status in ("warn", "fail") and finding.check != _VARIABLES and not known:
                say(_warning(finding))
    printed = {finding.subject for finding in findings if finding.check == _VARIABLES}
    # Only this process knows of variables that were set too late, and of cards that could not be chosen.
    for decision in variables.DECISIONS:
        if decision.action in ("warn", "error") and decision.variable not in printed:
            findings.append(of_decision(decision))
    return tuple(finding.to_dict() for finding in findings)


def _read_in_time(software: Software, deadline_s: float) -> list[Finding]:
    """The findings of `_read`; after ``deadline_s`` one that says that it takes too long."""
    findings: list[Finding] = []
    reader = threading.Thread(target=lambda: findings.extend(_read(software)), name="doctor", daemon=True)
    reader.start()
    reader.join(deadline_s)
    if reader.is_alive():
        reason = f"reading the kernel's files took more than {deadline_s:g} seconds; try `hf-rocm-tune doctor`"
        return [replace(unknown(reason), check="machine")]
    return findings


def _warning(finding: Finding) -> str:
    """A finding in one line."""
    label = "warning" if finding.status == "warn" else "failure"
    fix = f"; {finding.fix}" if finding.fix else ""
    line = f"{label}: {finding.title}: {finding.text}{fix} ({finding.source})"
    return " ".join(line.split())


def _read(software: Software) -> list[Finding]:
    """The findings of all checks that only read."""
    try:
        evidence = Evidence(machine=survey(), software=software, environ=users_environ(os.environ))
        done = diagnose(evidence, [check for check in all_checks() if check.run and check.group != "after"])
    except Exception as error:  # our bug: reported as a finding, the run continues
        return [crashed("machine", error)]
    return [finding for finding in done.findings if finding.status != "skipped"]


# ---- on disk ---------------------------------------------------------------------------------------------------------

PICTURE_NAME = "loss.png"
# File readers of `datasets`, not names on the Hub.
_BUILDERS = frozenset({"json", "csv", "parquet", "arrow", "text", "xml", "webdataset", "imagefolder", "audiofolder"})


@dataclass(kw_only=True)
class RunOutputs:
    """The log, the picture and the ``README.md`` of one run."""

    arguments: Arguments
    data: Splits
    trainer: VerifiedTransferMixin
    facts: report.RunFacts
    tokenizer_base: Path | None = None  # where the base's tokenizer files are, for a whole model that was trained
    content: Mapping[str, Any] = field(default_factory=dict)  # of the final report

    def write_readme(self, directory: Path) -> None:
        """Write the current ``README.md``, and what its code reads, into a directory that is being saved."""
        self._write_generation(directory)
        with self._failures_reported("the model card"):
            own = readme.kept(self._output_dir / readme.README_NAME)
            if own is None:
                so_far = report.build(self.trainer, self.facts, gather=False)
                so_far["ranks"] = self.trainer.args.world_size  # the counts are of this rank
                own = self._readme(self._run(so_far)).encode()
            (directory / readme.README_NAME).write_bytes(own)

    def leave_log(self, error: BaseException) -> None:
        """Write the log after a failure; an error in writing it is added as a note to the failure."""
        if self.trainer.is_world_process_zero() and self.trainer.state.log_history:
            try:
                write_log(self._run({}))
            except (OSError, TuneError) as also:
                error.add_note(f"{LOG_NAME} could not be written either: {also}")

    def write_result(self, directory: Path) -> list[str]:
        """Write report, log, picture and ``README.md`` of the finished run; returns their names. Collective."""
        content = report.build(self.trainer, self.facts, gather=True)
        self.content = content
        if not self.trainer.is_world_process_zero():
            return []
        report.write(content, directory)
        written = [report.FILE_NAME, *self._write_texts(directory)]
        run = self._run(content, finished=True)
        with self._failures_reported(LOG_NAME):
            written.append(write_log(run).name)
        self.trainer.beat("save")  # the first picture takes seconds on a busy machine
        with self._failures_reported("the picture of the loss"):
            panel = loss_panel(run)
            if panel is not None:
                write_png(panel, self._output_dir / PICTURE_NAME)
                written.append(PICTURE_NAME)
        self.trainer.beat("save")
        with self._failures_reported("the model card"):
            file = self._output_dir / readme.README_NAME
            if readme.kept(file) is not None:
                say(f"{file} was written or edited by hand and is kept")
            else:
                picture = PICTURE_NAME if PICTURE_NAME in written else None
                # atomic: one that is torn by a kill would look like an edited one
                write_text_atomic(file, self._readme(run, picture))
            written.append(readme.README_NAME)
        return written

    def _write_texts(self, directory: Path) -> list[str]:
        """Write what other programs read: generation settings of an adapter, a whole model's complete tokenizer."""
        written = self._write_generation(directory)
        if self.tokenizer_base is None:
            return written
        trust = self.arguments.training.trust_remote_code
        files = vocabulary.tokenizer_files(self.tokenizer_base, directory, trust_remote_code=trust)
        for name, content in files.items():
            (directory / name).write_bytes(content)
        return [*written, *sorted(files)]

    def _write_generation(self, directory: Path) -> list[str]:
        """Write an adapter's ``generation_config.json``: a whole model's is written with the model."""
        model = self.trainer.accelerator.unwrap_model(self.trainer.model, keep_torch_compile=False)
        if not hasattr(model, "peft_config"):
            return []
        config = getattr(model.get_base_model(), "generation_config", None)
        if config is None:
            return []
        write_text_atomic(directory / GENERATION_FILE, config.to_json_string())
        return [GENERATION_FILE]

    @property
    def _output_dir(self) -> Path:
        return Path(self.arguments.training.output_dir)

    def _run(self, content: Mapping[str, Any], *, finished: bool = False) -> Run:
        state = self.trainer.state
        training = self.arguments.training
        return Run(
            directory=self._output_dir,
            run_id=self.facts.run_id,
            rows=state.log_history,
            step=state.global_step,
            max_steps=state.max_steps,
            trained=self._trained(),
            report=content,
            settings={**self.arguments.resolved(), "world_size": training.world_size},
            finished=finished,
        )

    def _readme(self, run: Run, picture: str | None = None) -> str:
        datasets = self.arguments.sources
        training = self.arguments.training
        local = dict.fromkeys(local_paths(run.settings), "")
        local[str(self._output_dir)] = training.hub_model_id if training.push_to_hub else ""
        return readme.build(
            run,
            Private.of_this_machine(os.environ, paths=local),
            method=self.arguments.method,
            datasets=[name for name in datasets if name and name not in _BUILDERS],
            columns=self.data.train.column_names or (),
            picture=picture,
            adapter=self._adapter_config(),
        )

    def _adapter_config(self) -> dict[str, Any] | None:
        """What PEFT writes to ``adapter_config.json``; None for a model that is trained in full."""
        model = self.trainer.accelerator.unwrap_model(self.trainer.model, keep_torch_compile=False)
        configs = getattr(model, "peft_config", None)
        if configs is None:
            return None
        written = json.dumps(next(iter(configs.values())).to_dict(), default=_as_list_or_text)
        content: dict[str, Any] = json.loads(written)
        return content

    def _trained(self) -> dict[str, Any]:
        """What was trained, without names and paths."""
        model = self.trainer.accelerator.unwrap_model(self.trainer.model, keep_torch_compile=False)
        base = model
        adapter_dtype = None
        resized_to = None
        if hasattr(model, "peft_config"):
            base = model.get_base_model()
            adapter_dtype = _adapter_dtype(model)
            rows = getattr(base.config.get_text_config(), "vocab_size", None)
            if rows != self.facts.vocabulary:
                resized_to = rows
        trainable, total = trainable_parameters(model)
        return {
            "method": method(self.trainer),
            "model_class": type(base).__name__,
            "trainable": trainable,
            "parameters": total,  # with the adapter
            "dtype": _bare(getattr(base.config, "dtype", None) or base.dtype),  # of the weights, or of computing
            "adapter_dtype": adapter_dtype,
            "quantization": _quantization(base.config),
            "resized_to": resized_to,  # token embeddings of the base
            "chat_template": bool(getattr(self.trainer.processing_class, "chat_template", None)),
            "packed_experts": any(is_packed(experts) for _, experts in experts_of(base)),  # only we load them
        }

    @contextmanager
    def _failures_reported(self, what: str) -> Iterator[None]:
        """Reports a failure of the block in one line; raises our own errors and a full disk."""
        try:
            yield
        except Exception as error:
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            if full or (isinstance(error, TuneError) and not isinstance(error, UsageError)):
                raise
            line = f"{what} could not be written: {error}"
            if not isinstance(error, OSError | UsageError):
                traceback.print_exc()
                line += f" ({type(error).__name__}), which is a bug: please report it"
            say(line)


def _as_list_or_text(value: Any) -> list[Any] | str:
    return sorted(value) if isinstance(value, set) else str(value)


def _adapter_dtype(model: Any) -> str:
    """The dtype of the trained parameters: the one beside float32, where there is one."""
    dtypes = {_bare(parameter.dtype) for parameter in model.parameters() if parameter.requires_grad}
    dtypes.discard("float32")
    return min(dtypes, default="float32")


def _quantization(config: Any) -> dict[str, Any] | None:
    """Arguments of BitsAndBytesConfig, as plain values."""
    values = getattr(config, "quantization_config", None)
    if values is None:
        return None
    if not isinstance(values, dict):
        values = values.to_dict()
    if values.get("load_in_4bit"):
        names = ("load_in_4bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant")
        arguments = {name: values[name] for name in names if values.get(name)}
        arguments["bnb_4bit_compute_dtype"] = _bare(values.get("bnb_4bit_compute_dtype", "float32"))
        return arguments
    if values.get("load_in_8bit"):
        return {"load_in_8bit": True}
    return None


def _bare(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
