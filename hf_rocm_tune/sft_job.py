"""The story of a fine-tuning run, from settings to what is left on disk. Wiring only.

Whatever can be refused is refused before the model is loaded, and nothing in the output directory is touched before
that.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import EarlyStoppingCallback, PreTrainedTokenizerBase, set_seed
from trl import get_peft_config, get_quantization_config

from hf_rocm_tune import announce, auto_fit, machine_findings
from hf_rocm_tune import arguments as command_line
from hf_rocm_tune.arguments import Arguments
from hf_rocm_tune.cards import Cards
from hf_rocm_tune.data.formats import check_format
from hf_rocm_tune.data.mixture import load_mixture
from hf_rocm_tune.data.sources import Splits, load_source
from hf_rocm_tune.distributed.agree import on_main_process
from hf_rocm_tune.errors import MemoryFaultError
from hf_rocm_tune.models.adapter import check_targets, target_names
from hf_rocm_tune.models.factory import ModelSource, attest_files, check_source, load_model, load_tokenizer
from hf_rocm_tune.models.placement import release_memory
from hf_rocm_tune.process import check_world
from hf_rocm_tune.publish import hub_during as publishing
from hf_rocm_tune.publish.hub_during import Publisher
from hf_rocm_tune.publish.privacy import local_paths
from hf_rocm_tune.training import report
from hf_rocm_tune.training.crash import Crashes
from hf_rocm_tune.training.loggers import check_loggers, count_in_logs
from hf_rocm_tune.training.offload import check_offloads
from hf_rocm_tune.training.oom_faults import StepFaultSpec
from hf_rocm_tune.training.refusals import as_usage_errors
from hf_rocm_tune.training.run import Plan, prepare_output_dir
from hf_rocm_tune.training.supervised import tell_begun
from hf_rocm_tune.training.telemetry import Telemetry
from hf_rocm_tune.training.telemetry_callback import attach, of_device
from hf_rocm_tune.training.trainers import VerifiedSFTTrainer
from hf_rocm_tune.transfer import FaultSpec, Mover, TransferSettings

_WAYS_BACK = 3  # in one process; memory that fails more often is not to be trained in


@dataclass(kw_only=True)
class _Job:
    """What the parts of a run share."""

    arguments: Arguments
    asked: dict[str, Any]  # the settings before --auto_fit chose: by them a run is known
    plan: Plan
    fit: auto_fit.Fit | None
    source: ModelSource
    data: Splits
    tokenizer: PreTrainedTokenizerBase
    mover: Mover
    telemetry: Telemetry | None
    publisher: Publisher | None
    findings: tuple[dict[str, Any], ...] = ()


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
    asked = {**arguments.resolved(), "world_size": arguments.training.world_size}
    plan = _plan(arguments, asked)
    for note in plan.notes:
        announce.say(note)
    publisher = _publisher(arguments)
    if plan.action == "finished":
        announce.say(f"this run is finished in {plan.directory}; give --overwrite_output_dir to train again")
        if publisher is not None:
            publisher.result(plan.directory)  # its push may have failed; what is there is not sent again
        return 0
    job = _prepare(arguments, asked, plan, publisher)
    announce.say(*announce.settings(arguments, job.data.description, job.mover))
    job.findings = machine_findings.look(doctor=arguments.tune.doctor == "quick", say=announce.say_of_this_rank)
    with job.mover, closing(publisher) if publisher else nullcontext():
        _complete(job)
        if publisher is not None:
            publisher.result(plan.directory)
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
        job.plan = _plan(job.arguments, job.asked, going_back=True)
        where = job.plan.checkpoint.name if job.plan.checkpoint else "the start"
        announce.say(f"{fault}", f"all weights are loaded again and the run goes back to {where}")
        job.mover.report.settle_incidents("frozen", "recovered")


def _attempt(job: _Job, *, may_go_back: bool) -> str | None:
    """One way from loading to the finished result; the message of a memory fault that may be recovered from."""
    trainer, facts = _trainer(job)
    announce.say(*announce.model(trainer, facts))
    trainer.require_coverage()
    facts = _fitted(job, trainer, facts)
    if trainer.is_world_process_zero():
        job.plan.commit()
        resumed_from = job.plan.checkpoint.name if job.plan.checkpoint else None
        tell_begun(run_id=job.plan.run_id, output_dir=job.plan.directory, resumed_from=resumed_from)
    trainer.accelerator.wait_for_everyone()
    cards = _cards(job, trainer, facts)
    try:
        with trainer.stop_requests.installed():  # the save of the result is not torn by a Ctrl-C either
            _train(job, trainer, facts, cards)
    except BaseException as error:
        report.write_partial(trainer, facts, error)  # the evidence, whatever it was
        cards.leave_log(error)
        if may_go_back and isinstance(error, MemoryFaultError):
            return error.what
        raise
    return None


def _fitted(job: _Job, trainer: VerifiedSFTTrainer, facts: report.RunFacts) -> report.RunFacts:
    """The choice of --auto_fit, corrected where that was asked for, and kept for whoever continues the run."""
    if job.fit is None:
        return facts
    job.fit = auto_fit.probed(job.fit, trainer, say=announce.say)
    chosen = job.fit.choice.values()
    job.plan = replace(job.plan, record=replace(job.plan.record, auto_fit=chosen))
    return replace(facts, auto_fit=chosen)


def _plan(arguments: Arguments, asked: dict[str, Any], *, going_back: bool = False) -> Plan:
    """What to do in the output directory: rank 0 decides, all ranks hear it."""
    return on_main_process(
        lambda: prepare_output_dir(
            arguments.training.output_dir,
            asked,
            overwrite=arguments.tune.overwrite_output_dir and not going_back,
            resume=None if going_back else arguments.training.resume_from_checkpoint,
        )
    )


def _publisher(arguments: Arguments) -> Publisher | None:
    """Who pushes, on the first rank of a job that is to push. The token leaves the settings: they go to disk."""
    training = arguments.training
    token, training.hub_token = training.hub_token, None
    if not training.push_to_hub:
        return None
    if token:
        announce.say("others on this machine can read --hub_token while the run lasts: `hf auth login` hides the token")
    base = arguments.tune.hub_base_model_id
    local = dict.fromkeys(local_paths(arguments.resolved()), "") | {arguments.model.model_name_or_path: base or ""}
    wanted = publishing.Plan.of(training, base_model_id=base, verify=arguments.tune.hub_verify, local=local)
    publisher = Publisher(wanted, token=token, say=announce.say) if PartialState().is_main_process else None

    def repo_id() -> str:
        assert publisher is not None
        publisher.open()
        return publisher.repo_id

    training.hub_model_id = on_main_process(repo_id)
    return publisher


def _prepare(arguments: Arguments, asked: dict[str, Any], plan: Plan, publisher: Publisher | None) -> _Job:
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
    check_offloads(training)
    if crashes := Crashes().text:
        announce.say(f"crashes are injected on request: {crashes}")
    if step_faults := StepFaultSpec.from_environment():
        announce.say(f"steps are harmed on request: {step_faults}")
    data = _data(arguments)
    tokenizer = load_tokenizer(source, training.chat_template_path)
    _check_formats(arguments, data, tokenizer)
    fit = auto_fit.fit(arguments, plan.record.auto_fit, say=announce.say)
    mover = Mover(
        training.device,
        settings=TransferSettings(verify=tune.verify, on_corruption=tune.on_corruption),
        faults=FaultSpec.from_environment(),
    )
    telemetry = of_device(training.device, every_s=tune.telemetry_every, tell=announce.say_of_this_rank)
    return _Job(
        arguments=arguments,
        asked=asked,
        plan=plan,
        fit=fit,
        source=source,
        data=data,
        tokenizer=tokenizer,
        mover=mover,
        telemetry=telemetry if tune.telemetry_every > 0 else None,
        publisher=publisher,
    )


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
            on_oom=tune.on_oom,
            max_skipped_steps=tune.max_skipped_steps,
        )
    count_in_logs(trainer)
    if job.telemetry is not None:
        attach(trainer, job.telemetry)
    if job.publisher is not None:
        trainer.publisher = job.publisher
        job.publisher.alive = partial(trainer.beat, "save")
    trainer.run_id = job.plan.run_id
    trainer.skip_steps = frozenset(job.plan.record.skipped_steps)
    facts = report.RunFacts(
        run_id=job.plan.run_id,
        load_seconds=seconds,
        attested_files=records.attested,
        not_attested=records.unknown,
        findings=job.findings,
        telemetry=job.telemetry,
    )
    return trainer, facts


def _cards(job: _Job, trainer: VerifiedSFTTrainer, facts: report.RunFacts) -> Cards:
    cards = Cards(
        arguments=job.arguments,
        data=job.data.description,
        method=announce.method(trainer),
        trainer=trainer,
        facts=facts,
        say=announce.say,
    )
    trainer.card_writer = cards.write_card
    return cards


def _train(job: _Job, trainer: VerifiedSFTTrainer, facts: report.RunFacts, cards: Cards) -> None:
    training = job.arguments.training
    trainer.train(resume_from_checkpoint=str(job.plan.checkpoint) if job.plan.checkpoint else None)
    trainer.save_model(training.output_dir)
    content = report.build(trainer, facts, gather=True)
    if trainer.is_world_process_zero():
        report.write(content, Path(training.output_dir))
    trainer.seal_output(also=[report.FILE_NAME, *cards.finish(content)])
    announce.say(f"adapter and report are in {training.output_dir}", report.closing_line(content))
    if training.push_to_hub:
        trainer.beat("publish")  # everything is on disk, verified: a push that dies takes nothing with it
    trainer.end()
