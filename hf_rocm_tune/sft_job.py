"""The story of a fine-tuning run, from settings to what is left on disk. Wiring only.

Whatever can be refused is refused before the model is loaded, and nothing in the output directory is touched before
that.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import EarlyStoppingCallback, PreTrainedTokenizerBase, set_seed
from trl import get_peft_config, get_quantization_config

from hf_rocm_tune import announce, environ
from hf_rocm_tune import arguments as command_line
from hf_rocm_tune.arguments import Arguments
from hf_rocm_tune.data.formats import check_format
from hf_rocm_tune.data.mixture import load_mixture
from hf_rocm_tune.data.sources import Splits, load_source
from hf_rocm_tune.distributed.agree import on_main_process
from hf_rocm_tune.errors import MemoryFaultError
from hf_rocm_tune.models.adapter import check_targets, target_names
from hf_rocm_tune.models.factory import ModelSource, attest_files, check_source, load_model, load_tokenizer
from hf_rocm_tune.models.placement import release_memory
from hf_rocm_tune.process import check_world
from hf_rocm_tune.training import report
from hf_rocm_tune.training.loggers import check_loggers
from hf_rocm_tune.training.refusals import as_usage_errors
from hf_rocm_tune.training.run import Plan, prepare_output_dir
from hf_rocm_tune.training.trainers import VerifiedSFTTrainer
from hf_rocm_tune.transfer import FaultSpec, Mover, TransferSettings

_WAYS_BACK = 3  # in one process; memory that fails more often is not to be trained in


@dataclass(kw_only=True)
class _Job:
    """What the parts of a run share."""

    arguments: Arguments
    plan: Plan
    source: ModelSource
    data: Splits
    tokenizer: PreTrainedTokenizerBase
    mover: Mover


def run(argv: Sequence[str]) -> int:
    """Runs one job.

    Args:
        argv: the command line without the program's name.

    Returns:
        0; whatever goes wrong is raised.
    """
    arguments = command_line.parse(argv)
    if arguments.tune.print_config:
        print(arguments.to_yaml(), end="")
        return 0
    check_world(arguments.training.world_size, os.environ)
    plan = _plan(arguments)
    for note in plan.notes:
        announce.say(note)
    if plan.action == "finished":
        announce.say(f"this run is finished in {plan.directory}; give --overwrite_output_dir to train again")
        return 0
    job = _prepare(arguments, plan)
    announce.say(*announce.settings(arguments, job.data.description, job.mover))
    with job.mover:
        _complete(job)
    release_memory()  # suspected, not proven: a process group held in a cycle can abort the interpreter at its end
    return 0


def _complete(job: _Job) -> None:
    """Trains to the end. Where frozen weights changed in memory, they are loaded again and the run goes back.

    Each way back loads every weight anew, verified, and continues from the newest checkpoint: all checkpoints were
    written after a look at every frozen weight. With several ranks the job ends instead, and starting it again does the
    same: a rank alone cannot take the others back.
    """
    recoverable = job.arguments.tune.on_corruption == "recover" and job.arguments.training.world_size == 1
    for attempt in range(_WAYS_BACK + 1):
        fault = _attempt(job, may_go_back=recoverable and attempt < _WAYS_BACK)
        if fault is None:
            return
        release_memory()
        job.plan.lock.release()
        job.plan = _plan(job.arguments, going_back=True)
        where = job.plan.checkpoint.name if job.plan.checkpoint else "the start"
        announce.say(f"{fault}", f"all weights are loaded again and the run goes back to {where}")
        job.mover.report.settle_incidents("frozen", "recovered")


def _attempt(job: _Job, *, may_go_back: bool) -> str | None:
    """One way from loading to the finished result; the message of a memory fault that may be recovered from."""
    trainer, facts = _trainer(job)
    announce.say(*announce.model(trainer, facts))
    trainer.require_coverage()
    if trainer.is_world_process_zero():
        job.plan.commit()
    trainer.accelerator.wait_for_everyone()
    try:
        _train(job, trainer, facts)
    except BaseException as error:
        report.write_partial(trainer, facts, error)  # the evidence, whatever it was
        if may_go_back and isinstance(error, MemoryFaultError):
            return error.what
        raise
    return None


def _plan(arguments: Arguments, *, going_back: bool = False) -> Plan:
    """What to do in the output directory: rank 0 decides, all ranks hear it."""
    return on_main_process(
        lambda: prepare_output_dir(
            arguments.training.output_dir,
            {**arguments.resolved(), "world_size": arguments.training.world_size},
            overwrite=arguments.tune.overwrite_output_dir and not going_back,
            resume=None if going_back else arguments.training.resume_from_checkpoint,
        )
    )


def _prepare(arguments: Arguments, plan: Plan) -> _Job:
    """Everything that can be refused without loading the model."""
    training, tune = arguments.training, arguments.tune
    source = ModelSource(
        name=arguments.model.model_name_or_path,
        revision=arguments.model.model_revision,
        trust_remote_code=training.trust_remote_code,
        init={
            "attn_implementation": arguments.model.attn_implementation,
            "dtype": arguments.model.dtype,
            **(training.model_init_kwargs or {}),
        },
        quantization=get_quantization_config(arguments.model),
    )
    check_source(source, training.device)
    check_loggers(training.report_to)
    data = _data(arguments)
    tokenizer = load_tokenizer(source, training.chat_template_path)
    _check_formats(arguments, data, tokenizer)
    mover = Mover(
        training.device,
        settings=TransferSettings(verify=tune.verify, on_corruption=tune.on_corruption),
        faults=FaultSpec.from_environment(),
    )
    return _Job(arguments=arguments, plan=plan, source=source, data=data, tokenizer=tokenizer, mover=mover)


def _data(arguments: Arguments) -> Splits:
    script, training = arguments.script, arguments.training
    need_eval = training.eval_strategy != "no"
    if arguments.mixture.datasets:
        return load_mixture(
            arguments.mixture,
            train_split=script.dataset_train_split,
            test_split=script.dataset_test_split,
            need_eval=need_eval,
        )
    return load_source(
        script.dataset_name,
        config=script.dataset_config,
        streaming=script.dataset_streaming,
        train_split=script.dataset_train_split,
        test_split=script.dataset_test_split,
        need_eval=need_eval,
        eval_split_size=arguments.tune.eval_rows,
        seed=training.seed if training.data_seed is None else training.data_seed,
    )


def _check_formats(arguments: Arguments, data: Splits, tokenizer: PreTrainedTokenizerBase) -> None:
    training = arguments.training
    for split, rows in (("train", data.train), ("evaluation", data.eval)):
        if rows is not None:
            found = check_format(
                rows,
                assistant_only_loss=training.assistant_only_loss,
                completion_only_loss=training.completion_only_loss,
                dataset_text_field=training.dataset_text_field,
                has_chat_template=bool(training.chat_template_path or getattr(tokenizer, "chat_template", None)),
                model_name=arguments.model.model_name_or_path,
                split=split,
            )
            if found.unusual_roles:
                roles = ", ".join(found.unusual_roles)
                announce.say(f"the {split} rows have roles that a chat template may not know: {roles}")


def _trainer(job: _Job) -> tuple[VerifiedSFTTrainer, report.RunFacts]:
    training, tune = job.arguments.training, job.arguments.tune
    set_seed(training.seed)  # as TRL does before it loads a model
    model, seconds = load_model(job.source, job.mover)
    records = on_main_process(lambda: attest_files(job.source))
    peft_config = get_peft_config(job.arguments.model)
    if peft_config is not None:
        peft_config.target_modules = target_names(peft_config.target_modules)
        check_targets(model, peft_config.target_modules)
    training.model_init_kwargs = None  # they are in the model
    callbacks = []
    if tune.early_stopping_patience is not None:
        callbacks.append(EarlyStoppingCallback(tune.early_stopping_patience, tune.early_stopping_threshold))
    with as_usage_errors():
        trainer = VerifiedSFTTrainer(
            model=model,
            args=training,
            train_dataset=job.data.train,
            eval_dataset=job.data.eval,
            processing_class=job.tokenizer,
            peft_config=peft_config,
            callbacks=callbacks,
            mover=job.mover,
            sentinel_every=tune.sentinel_every,
            prefetch_batches=tune.prefetch_batches,
            compare_optimizer_every=tune.compare_optimizer_every,
            consent_unverified=tune.consent_unverified,
        )
    trainer.run_id = job.plan.run_id
    findings = tuple(
        {"variable": one.variable, "level": one.action, "reason": one.reason, "source": one.source}
        for one in environ.DECISIONS
        if one.action in ("warn", "error")
    )
    facts = report.RunFacts(
        run_id=job.plan.run_id,
        load_seconds=seconds,
        attested_files=records.attested,
        not_attested=records.unknown,
        findings=findings,
    )
    return trainer, facts


def _train(job: _Job, trainer: VerifiedSFTTrainer, facts: report.RunFacts) -> None:
    training = job.arguments.training
    trainer.train(resume_from_checkpoint=str(job.plan.checkpoint) if job.plan.checkpoint else None)
    push = training.push_to_hub
    training.push_to_hub = False  # first everything is on disk, verified; then it is pushed
    trainer.save_model(training.output_dir)
    training.push_to_hub = push
    content = report.build(trainer, facts, gather=True)
    if trainer.is_world_process_zero():
        report.write(content, Path(training.output_dir))
    trainer.seal_output(also=[report.FILE_NAME])
    announce.say(f"adapter and report are in {training.output_dir}", report.closing_line(content))
    if push:
        trainer.push_to_hub(dataset_name=job.arguments.script.dataset_name)
    trainer.end()
