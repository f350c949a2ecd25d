"""A fine-tuning run from its settings to the files it writes: the order of the steps, and their wiring.

Everything that can be refused is refused before the model is loaded and before the output directory is touched.
"""

from __future__ import annotations

import copy
import importlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from transformers import (
    EarlyStoppingCallback,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    set_seed,
)
from trl import get_peft_config, get_quantization_config
from typing_extensions import override

from hf_rocm_tune import upstream
from hf_rocm_tune.cards.agree import max_over_ranks, on_main_process
from hf_rocm_tune.data.formats import Method
from hf_rocm_tune.data.rendering import lacking_tokens
from hf_rocm_tune.data.sources import Splits, fault_of_stream
from hf_rocm_tune.data.summary import lengths_of
from hf_rocm_tune.data.trl_calls import as_trl_calls
from hf_rocm_tune.errors import MemoryFaultError, PictureError, TuneError, UsageError
from hf_rocm_tune.job import announce, preview, rows
from hf_rocm_tune.job.fit import Choice, before_loading, check_recomputation, make_mover, streamed_layers
from hf_rocm_tune.job.refusals import (
    check,
    check_adapter,
    check_model,
    check_rewards,
    check_router_loss,
    decide,
    leave_out_missing_routers,
    reward_functions,
)
from hf_rocm_tune.lifecycle import exits, stall
from hf_rocm_tune.lifecycle.heartbeat import Supervised, report_begun
from hf_rocm_tune.lifecycle.stall import StallGuard
from hf_rocm_tune.lifecycle.watchdog import briefly
from hf_rocm_tune.machine.process import check_world, several_machines
from hf_rocm_tune.models import own_head, recompute
from hf_rocm_tune.models.adapter import LearningRates, beside_experts, check_targets, kept_out, target_names
from hf_rocm_tune.models.classes import architecture_of
from hf_rocm_tune.models.factory import (
    ModelSource,
    attest_files,
    check_source,
    load_model,
    load_tokenizer,
    named_templates,
    require_writer,
    tokens_for,
)
from hf_rocm_tune.models.placement import release_memory
from hf_rocm_tune.models.quantised import too_narrow_on_cpu
from hf_rocm_tune.models.split import device_map
from hf_rocm_tune.models.streamed import Streamed
from hf_rocm_tune.paths import expand_user
from hf_rocm_tune.publish import serving
from hf_rocm_tune.publish.history import read_json
from hf_rocm_tune.publish.push import Publisher
from hf_rocm_tune.publish.verdict import verdict_line
from hf_rocm_tune.publish.vocabulary import end_tokens, tokenizer_directory
from hf_rocm_tune.settings import arguments as command_line
from hf_rocm_tune.settings.arguments import Arguments
from hf_rocm_tune.settings.verbs import VERBS
from hf_rocm_tune.survive.run_directory import ADDED, StartPlan, prepare_output_dir
from hf_rocm_tune.survive.saved_adapter import Adapter, attach_for_training, open_adapter
from hf_rocm_tune.train import report, telemetry
from hf_rocm_tune.train.device_memory import warm_up
from hf_rocm_tune.train.faults import Crashes, StepFaultSpec
from hf_rocm_tune.train.refusals import as_usage_errors, check_settings, first_step_as_usage_error
from hf_rocm_tune.train.samples import SampledAnswers, open_pictures
from hf_rocm_tune.train.settings import JobServices, TrainerSettings
from hf_rocm_tune.train.telemetry import Telemetry
from hf_rocm_tune.train.trainer import VerifiedSFTTrainer, VerifiedTransferMixin
from hf_rocm_tune.transfer import Mover

_ROLLBACKS = 3  # per process; memory that fails more often cannot be trusted


@dataclass(kw_only=True)
class Job:
    """What the parts of a run share."""

    arguments: Arguments
    asked: dict[str, Any]  # the settings before --auto_fit chose; they identify a run
    plan: StartPlan
    fit: Choice | None
    source: ModelSource
    streamed: Streamed | None
    data: Splits
    tokenizer: PreTrainedTokenizerBase
    mover: Mover
    telemetry: Telemetry | None
    publisher: Publisher | None
    guard: StallGuard
    adapter: Adapter | None = None  # to continue training
    rewards: list[Any] | None = None  # GRPO's reward functions, and the name of a reward model
    findings: tuple[dict[str, Any], ...] = ()
    files: announce.RunOutputs = field(init=False)  # made with the trainer


def run(argv: Sequence[str], *, method: Method = "sft") -> int:
    """Runs one job."""
    group = exits.RankGroup.of(os.environ)
    rendezvous = None
    if group:
        rendezvous = group.rendezvous()  # before the ranks connect
    preflight = partial(decide, environ=os.environ, say=announce.say)
    arguments = command_line.parse(argv, method=method, before_joining=preflight)
    if arguments.tune.print_config:
        print(arguments.to_yaml(), end="")
        return 0
    check_world(arguments.training.world_size, os.environ)
    announce.speak_for_libraries()
    if arguments.tune.dry_run:
        _show_rows(arguments, arguments.tune.dry_run)
        return 0
    if arguments.training.disable_tqdm or not sys.stderr.isatty():
        telemetry.quieten_bars()
    newer = upstream.untested()
    if newer:
        announce.say(f"newer than the tested versions: {', '.join(newer)}; a seam that has moved is an error")
    if several_machines(os.environ):
        announce.say(
            "several machines: torch, gloo and RCCL listen on all interfaces, unencrypted, and a host that reaches "
            f"their ports can run code as you: block {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} and the "
            "local port range (/proc/sys/net/ipv4/ip_local_port_range) for all other hosts"
        )
    collective_s = None
    if arguments.training.world_size > 1:
        collective_s = arguments.training.ddp_timeout
    limit = arguments.ranks.stall_timeout
    with stall.watched(limit, rendezvous=rendezvous, report=_speak_of_stall, collective_s=collective_s) as guard:
        return _run(arguments, guard)


def _speak_of_stall(error: TuneError) -> None:
    briefly(telemetry.clear_live_line, 2.0)  # a terminal that hangs too must not keep the line back
    exits.speak(error)


def _show_rows(arguments: Arguments, form: str) -> None:
    """What ``--dry_run`` prints, on the first rank."""
    trainer = _without_weights(arguments, "--dry_run")
    if int(os.environ.get("RANK", "0")) == 0:
        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        print(preview.shown(trainer, form, colour=colour))


def read_rows(argv: Sequence[str], method: Method) -> tuple[list[int], dict[str, Any], tuple[int, tuple[Any, ...]]]:
    """The training rows of a command, for `hf-rocm-tune plan --dataset`.

    Returns the tokens of each, their summary, and what the planner counts of their pictures.
    """
    trainer = _without_weights(command_line.parse(argv, method=method), "--dataset")
    summary = trainer.data_summaries["train"].to_dict()
    if trainer.pictures is None:
        return lengths_of(trainer.train_dataset), summary, (0, ())
    return list(trainer.pictures.lengths["train"]), summary, trainer.pictures.largest


def _without_weights(arguments: Arguments, flag: str) -> Any:
    """A trainer with its rows prepared, around a model without weights. Standard output is the caller's."""
    if VERBS[arguments.method].makes_rows:
        raise UsageError(
            f"{flag} shows the rows of sft, dpo, kto and reward; {arguments.method} makes its own: drop it"
        )
    if arguments.is_streamed:
        streams = "a mixture with streaming: true" if arguments.mixture.datasets else "--dataset_streaming"
        raise UsageError(f"{flag} counts all rows, and {streams} reads them on the way: drop one of them")
    telemetry.quieten_bars()
    with redirect_stdout(sys.stderr):
        source, config = _source(arguments)
        tokenizer = _tokenizer(arguments, source, config)
        check(arguments, config)
        check_router_loss(arguments, config)
        vocabulary = getattr(config.get_text_config(), "vocab_size", None)
        data = rows.load_rows(arguments, tokenizer, source, vocabulary)
        trainer = preview.prepared(arguments, source, data, tokenizer)
        trainer.data_summaries = rows.finish_rows(arguments, trainer, data)
        return trainer


def _run(typed: Arguments, guard: StallGuard) -> int:
    world_size = typed.training.world_size
    settings = {**typed.resolved(), "world_size": world_size, "method": typed.method}
    restarted = _is_restarted_by_launcher()
    plan = _plan(typed, settings, restarted=restarted)

    with closing(plan):
        # What a run of an earlier version was begun with is used, not recorded as what this command line says.
        arguments = _as_begun(typed, plan)
        announce.say(*plan.notes)
        if restarted:
            reason = _reason_of_restart()
            start = _continues_from(plan)
            announce.say(f"the launcher has restarted all processes ({reason}): the run continues from {start}")
        elif plan.checkpoint is not None:
            announce.say(announce.resumption(plan.checkpoint))
        publisher = _open_publisher(arguments)
        if plan.action == "finished":
            announce.say(
                f"{plan.directory} already holds this finished run. --overwrite_output_dir trains again; with a "
                "constant learning rate a larger --max_steps or --num_train_epochs extends it."
            )
            if publisher is not None:  # an earlier push may have failed; files already there are not sent again
                publisher.result(plan.directory)
            return 0

        job = _prepare(arguments, settings, plan, publisher, guard)
        announce.say(*announce.settings(arguments, job.data.description, job.mover))
        job.findings = announce.check_machine(doctor=arguments.tune.doctor == "quick", say=announce.say_of_this_rank)
        try:
            with job.mover:
                _complete(job)
                if publisher is not None:
                    publisher.result(plan.directory)
                exits.complete()
        finally:
            job.plan.close()  # not always the first one, after a rollback

        release_memory()  # suspected, not proven: a process group held in a cycle can abort the interpreter at exit
        return 0


def _is_restarted_by_launcher() -> bool:
    """Whether torch's agent has started the processes again, on any rank. Collective."""
    restart_count = exits.number(os.environ, "TORCHELASTIC_RESTART_COUNT")
    (most_restarts,) = max_over_ranks([restart_count])
    return most_restarts > 0


def _reason_of_restart() -> str:
    """What the process said that ended before the launcher restarted all."""
    group = exits.RankGroup.of(os.environ)
    if group:
        for ended in group.earlier():
            return ended.message.partition(". ")[0]
    return "a process ended without a message"


def _continues_from(plan: StartPlan) -> str:
    if plan.checkpoint is None:
        return "the start"
    return plan.checkpoint.name


def _complete(job: Job) -> None:
    """Trains to the end. After a memory fault everything is loaded again and the run rolls back.

    A rollback loads every weight again, verified, and continues from the newest checkpoint: each checkpoint was written
    after a check of every frozen weight. With several ranks the job ends instead, because one rank cannot roll the
    others back; starting it again has the same effect.
    """
    recoverable = job.arguments.tune.on_corruption == "recover" and job.arguments.training.world_size == 1
    for attempt in range(_ROLLBACKS + 1):
        fault = _attempt(job, may_roll_back=recoverable and attempt < _ROLLBACKS)
        if fault is None:
            return
        release_memory()
        job.plan.close()
        job.plan = _plan(job.arguments, job.asked, restarted=True)
        where = _continues_from(job.plan)
        announce.say_of_this_rank(fault, f"all weights are loaded again and the run goes back to {where}")
        job.mover.report.close_incidents(("frozen", "trained", "batches", "streamed"), "recovered")


def _attempt(job: Job, *, may_roll_back: bool) -> str | None:
    """Load, train and save once; returns the message of a memory fault that a rollback may recover."""
    job.guard.beat(step=0, phase="start")  # a trainer that is being made sends none
    trainer, facts = _make_trainer(job)
    announce.say(announce.model(trainer, facts))
    trainer.require_coverage()
    record = replace(job.plan.record, auto_fit=facts.auto_fit, data=facts.data)  # the choice is for a resumed run
    job.plan = replace(job.plan, record=record)
    if trainer.is_world_process_zero():
        job.plan.commit()
        resumed = None
        if job.plan.checkpoint is not None:
            resumed = job.plan.checkpoint.name
        report_begun(run_id=job.plan.run_id, output_dir=job.plan.directory, resumed_from=resumed)
    trainer.accelerator.wait_for_everyone()
    job.guard.watch(job.plan.directory, record=partial(report.write_incident, trainer, facts))
    tokenizer_base = None
    if not job.arguments.model.use_peft:
        tokenizer_base = on_main_process(partial(tokenizer_directory, job.source))
    job.files = announce.RunOutputs(
        arguments=job.arguments, data=job.data, trainer=trainer, facts=facts, tokenizer_base=tokenizer_base
    )
    try:
        exits.interrupt_if_asked()
        with trainer.stop_requests.installed():  # so that Ctrl-C does not interrupt the final save
            _train(job, trainer)
            if not job.arguments.training.push_to_hub:
                exits.complete()
    except BaseException as error:
        telemetry.clear_live_line()
        report.write_partial(trainer, facts, error)
        job.files.leave_log(error)
        if may_roll_back and isinstance(error, MemoryFaultError):
            return error.what
        raise
    return None


def _plan(arguments: Arguments, asked: dict[str, Any], *, restarted: bool) -> StartPlan:
    """What to do in the output directory, decided by rank 0 for all ranks."""
    supervised = Supervised.of()
    return on_main_process(
        lambda: prepare_output_dir(
            arguments.training.output_dir,
            asked,
            overwrite=arguments.tune.overwrite_output_dir,
            resume=arguments.training.resume_from_checkpoint,
            restarted=restarted,
            restart_of=None if supervised is None else supervised.restart_of,
        )
    )


def _as_begun(arguments: Arguments, plan: StartPlan) -> Arguments:
    """The arguments with the way in which a run of an earlier version was begun, where the user leaves it out."""
    left_out = {}
    for name in ADDED:
        begun = plan.record.settings.get(name)
        if begun is not None and getattr(arguments.tune, name) is None:
            left_out[name] = begun
    return replace(arguments, tune=replace(arguments.tune, **left_out))


@contextmanager
def _late_faults(job: Job) -> Iterator[None]:
    """Within the block an error of the file of a stream is one line."""
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        fault = fault_of_stream(job.arguments.sources, error) if job.arguments.is_streamed else None
        if fault is None:
            raise
        raise fault from error
    except UsageError as error:
        of_worker = re.search(r"^Caught UsageError in DataLoader worker.*errors\.UsageError: (.*)", str(error))
        if of_worker is None:
            raise
        raise UsageError(of_worker[1]) from error


def _train(job: Job, trainer: VerifiedTransferMixin) -> None:
    training = job.arguments.training
    try:
        checkpoint = None
        if job.plan.checkpoint:
            checkpoint = str(job.plan.checkpoint)
        with _late_faults(job), first_step_as_usage_error(trainer):
            trainer.train(resume_from_checkpoint=checkpoint)
    except UsageError as error:
        # of a streamed row or a picture: what was learned from those before it is not lost
        late = job.arguments.is_streamed or isinstance(error, PictureError)
        if not (late and trainer.state.global_step and training.world_size == 1):
            raise
        trainer._save_checkpoint(trainer.model, trial=None)
        raise UsageError(
            f"{error}; checkpoint-{trainer.state.global_step} is written: mend the row, and go on with "
            f"--resume_from_checkpoint {training.output_dir}/checkpoint-{trainer.state.global_step} and another "
            "--output_dir"
        ) from error
    if not trainer.state.global_step:
        raise UsageError(
            "nothing was trained: no batch could be made; give more rows, a larger --max_length or smaller batches"
        )
    trainer.save_model(training.output_dir)
    what = "adapter" if hasattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config") else "model"
    content = job.files.content
    adapter = read_json(expand_user(training.output_dir) / "adapter_config.json")
    announce.say(
        f"{what} and report are in {training.output_dir}",
        *serving.lines(adapter, training.output_dir),
        f"integrity: {verdict_line(content)}: {report.closing_line(content)}",
    )
    if training.push_to_hub:
        trainer.beat("publish")  # everything is on disk and verified before the push
    trainer.end()


# ---- before the model is loaded -------------------------------------------------------------------------------


def _open_publisher(arguments: Arguments) -> Publisher | None:
    """The publisher of a job that pushes, on its first rank. Removes the token from the settings, which go to disk."""
    training = arguments.training
    token = training.hub_token
    training.hub_token = None
    if not training.push_to_hub:
        return None
    if token:
        announce.say("other users of this machine can read --hub_token during the run: use `hf auth login` instead")
    base = arguments.tune.hub_base_model_id
    publisher = Publisher(training, base_model_id=base, token=token, say=announce.say)

    def repo_id() -> str:
        publisher.open()
        return publisher.repo_id

    training.hub_model_id = on_main_process(repo_id)
    if int(os.environ.get("RANK", "0")) != 0:
        return None
    return publisher


def _prepare(
    arguments: Arguments, asked: dict[str, Any], plan: StartPlan, publisher: Publisher | None, guard: StallGuard
) -> Job:
    """Everything that can be checked without loading the model."""
    training, tune = arguments.training, arguments.tune
    say = announce.say
    source, config = _source(arguments)
    check(arguments, config)
    check_router_loss(arguments, config)
    check_recomputation(arguments, source)
    adapter = open_adapter(tune.adapter_name_or_path) if tune.adapter_name_or_path else None
    check_adapter(arguments.method, adapter)
    check_settings(training)
    rewards = reward_functions(arguments.script) if arguments.method == "grpo" else None
    injected = (Crashes().text, StepFaultSpec.from_environment())
    if any(injected):
        say(f"crashes and faults in steps are injected on request: {', '.join(str(spec) for spec in injected if spec)}")
    tokenizer = _tokenizer(arguments, source, config)
    # an adapter may have added tokens to the vocabulary
    known = None if tune.adapter_name_or_path else getattr(config.get_text_config(), "vocab_size", None)
    open_pictures(tune.sample_images or (), tokenizer)  # a bad one is refused before the model is loaded
    data = rows.load_rows(arguments, tokenizer, source, known)
    check_rewards(rewards or (), data.train.column_names)
    mover = make_mover(arguments, source, say=say)
    # libraries are initialised on each card before memory is short
    bits = None
    if source.quantization is not None:
        bits = 4 if source.quantization.load_in_4bit else 8
    devices = sorted(set(device_map(mover).values()), key=str)
    libraries = sum(warm_up(device, bits=bits) for device in devices)
    mover.report.count("memory", libraries_bytes=libraries)
    largest: tuple[int, tuple[Any, ...]] = (0, ())
    if data.pictures is not None:
        largest = data.pictures.largest
    fit = before_loading(arguments, plan.record.auto_fit, libraries=libraries, say=say, pictures=largest)
    watched = telemetry.of_device(training.device, every_s=tune.telemetry_every, say=announce.say_of_this_rank)
    return Job(
        arguments=arguments,
        asked=asked,
        plan=plan,
        fit=fit,
        source=source,
        streamed=streamed_layers(arguments, source, fit, libraries=libraries, say=say, pictures=largest),
        data=data,
        tokenizer=tokenizer,
        mover=mover,
        telemetry=watched if tune.telemetry_every > 0 else None,
        publisher=publisher,
        guard=guard,
        adapter=adapter,
        rewards=rewards,
    )


def _source(arguments: Arguments) -> tuple[ModelSource, Any]:
    """The model to load, and its checked configuration."""
    training = arguments.training
    name = arguments.model.model_name_or_path
    if os.path.isdir(expand_user(name)):
        # The adapter's configuration names it, for programs that are started elsewhere.
        name = os.path.abspath(expand_user(name))
    init = {"attn_implementation": arguments.model.attn_implementation, "dtype": arguments.model.dtype}
    source = ModelSource(
        name=name,
        revision=arguments.model.model_revision,
        trust_remote_code=training.trust_remote_code,
        reward=arguments.method == "reward",
        init=init | (training.model_init_kwargs or {}),
        quantization=get_quantization_config(arguments.model),
    )
    config = check_source(source, training.device)
    if not source.reward:
        require_writer(source.name, config)
    return source, config


def _tokenizer(arguments: Arguments, source: ModelSource, config: Any) -> PreTrainedTokenizerBase:
    """The tokenizer or processor; TRL is not told of a chat template by name, which the tokenizer then has."""
    training = arguments.training
    path = getattr(training, "chat_template_path", None)
    tokenizer = load_tokenizer(source, path)
    if path in named_templates() and not os.path.exists(path):
        lacking, end = lacking_tokens(tokenizer)
        training.chat_template_path = None
        if lacking:
            # TRL adds tokens with a template that it takes from a tokenizer, and trains their embeddings
            training.chat_template_path = tokens_for(tokenizer.chat_template, lacking, end)
            announce.say(f"tokens that the chat template needs are added and trained: {', '.join(lacking)}")
    readable: PreTrainedTokenizerBase = as_trl_calls(tokenizer, architecture_of(config))
    return readable


class _EarlyStopping(EarlyStoppingCallback):
    """Upstream's, whose count of evaluations without progress is continued from a checkpoint."""

    @override
    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        super().on_train_begin(args, state, control, **more)
        saved = state.stateful_callbacks.get(type(self).__name__)
        if isinstance(saved, dict):
            self.early_stopping_patience_counter = saved["attributes"]["early_stopping_patience_counter"]


def _make_trainer(job: Job) -> tuple[VerifiedTransferMixin, report.RunFacts]:
    """Loads the model, verified, and builds its trainer. Collective."""
    training, tune = job.arguments.training, job.arguments.tune
    set_seed(training.seed)  # as TRL does before loading
    # a model to be sharded stays on the host: each card gets its part when the trainer is built
    strategy = job.arguments.strategy()
    on_host = strategy.on_host and job.source.quantization is None
    before = torch.get_rng_state()
    model, seconds = load_model(job.source, job.mover, on_host=on_host, streamed=job.streamed)
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", None)
    drawn = not torch.equal(before, torch.get_rng_state())
    if drawn and job.arguments.model.use_peft and job.adapter is None:
        announce.say(
            "loading this model draws random numbers, from which TRL's adapter would go on; here the seed is set again "
            "after it: with the same seed the adapter starts from other values than TRL's"
        )
    if job.arguments.model.load_in_4bit and training.device.type == "cpu":
        _say_narrow(model)
    leave_out_missing_routers(job.arguments, model)
    check_model(job.arguments.method, model)
    with_own_head = job.arguments.method == "sft" and bool(own_head.why_own_head(model))
    _fit_checkpointing(job, model)
    if job.arguments.model.use_peft and recompute.is_reversible(model):
        model.enable_input_require_grads()
    model, peft_config = _adapted(job, model)
    extra: dict[str, Any] = {}
    if job.arguments.method in ("dpo", "kto") and not job.arguments.model.use_peft:
        extra["ref_model"] = load_model(job.source, job.mover)[0]
    if job.rewards is not None:
        extra["reward_funcs"] = list(job.rewards)
    training.model_init_kwargs = None  # they are in the model
    callbacks: list[TrainerCallback] = []
    if tune.early_stopping_patience is not None:
        callbacks.append(_EarlyStopping(tune.early_stopping_patience, tune.early_stopping_threshold))
    if tune.sample_every is not None:
        prompts, images = tune.sample_prompts or (), tune.sample_images or ()
        callbacks.append(SampledAnswers(tune.sample_every, prompts, job.mover, announce.say, images))
    with as_usage_errors():
        trainer = _trainer_class(job.arguments.method)(
            model=model,
            args=training,
            train_dataset=job.data.train,
            eval_dataset=job.data.eval,
            processing_class=copy.deepcopy(job.tokenizer),  # TRL adds tokens to it, and a rollback comes here again
            peft_config=peft_config,
            callbacks=callbacks,
            mover=job.mover,
            strategy=strategy,
            settings=_trainer_settings(job),
            services=JobServices(
                publisher=job.publisher,
                write_readme=lambda directory: job.files.write_readme(directory),
                write_result=lambda directory: job.files.write_result(directory),
                telemetry=job.telemetry,
                listener=job.guard.beat,
            ),
            **extra,
        )
    if with_own_head:
        own_head.use_own_head(model)
    _learn_end_tokens(trainer)
    if job.data.pictures is not None:
        job.data.pictures.attach(trainer)
        if trainer.is_world_process_zero():
            job.data.pictures.write_small(expand_user(training.output_dir), job.plan.run_id)
    records = on_main_process(lambda: attest_files(job.source, job.mover))  # of models that TRL has loaded, too
    summaries = rows.finish_rows(job.arguments, trainer, job.data)
    rows.report_rows(summaries, job.data, announce.say)
    job.arguments = replace(job.arguments, training=trainer.args)  # the trainer's own, changed copy
    if job.publisher is not None:
        job.publisher.alive = partial(trainer.beat, "save")
    preflight = job.arguments.preflight
    facts = report.RunFacts(
        run_id=job.plan.run_id,
        load_seconds=seconds,
        attested_files=records.attested,
        not_attested=records.unknown,
        findings=job.findings,
        vocabulary=vocabulary,
        preflight=preflight.to_dict() if preflight else None,
        telemetry=job.telemetry,
        auto_fit=dict(vars(job.fit)) if job.fit is not None else None,
        data=tuple(summary.to_dict() for summary in summaries.values()),
    )
    return trainer, facts


def _say_narrow(model: Any) -> None:
    """Which layers of a model in 4 bits a CPU has in 16."""
    head = model.get_output_embeddings()  # which is in 16 bits everywhere
    names = {name.rpartition(".")[2] for name in too_narrow_on_cpu(model) if model.get_submodule(name) is not head}
    if names:
        announce.say(
            f"not in 4 bits: {', '.join(sorted(names))}, whose rows bitsandbytes would dequantise wrongly on a CPU, as "
            "they are no multiple of its blocks"
        )


def _fit_checkpointing(job: Job, model: Any) -> None:
    """Turns activation checkpointing off, TRL's default, for a model that cannot do it.

    Raises:
        UsageError: the user has asked for it.
    """
    training = job.arguments.training
    if not recompute.is_chosen(training) or getattr(model, "supports_gradient_checkpointing", True):
        return
    name = type(model).__name__
    if {"activation_checkpointing", "gradient_checkpointing"} & {*job.arguments.given}:
        raise UsageError(f"--gradient_checkpointing: {name} does not support it: leave it out")
    recompute.choose(training, on=False)
    announce.say(f"{name} does not support gradient checkpointing: activations are kept, not recomputed")


def _trainer_settings(job: Job) -> TrainerSettings:
    tune = job.arguments.tune
    return TrainerSettings(
        sentinel_every=tune.sentinel_every,
        check_arithmetic=tune.check_arithmetic,
        prefetch_batches=tune.prefetch_batches,
        consent_unverified=tune.consent_unverified,
        recompute_layers=job.fit.recompute if job.fit else tune.recompute,
        one_pass_loss=job.arguments.one_pass_loss,
        on_oom=tune.on_oom,
        max_skipped_steps=tune.max_skipped_steps,
        skip_steps=job.plan.record.skipped_steps,
        plain_lora=tune.rewrites_base,
        rates=LearningRates(lora_b=tune.loraplus_lr_ratio, embeddings=tune.embedding_learning_rate),
        run_id=job.plan.run_id,
    )


def _learn_end_tokens(trainer: VerifiedTransferMixin) -> None:
    """Have a model that writes text stop, and be saved to stop, at the end tokens that it is trained with."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if hasattr(model, "peft_config"):
        model = model.get_base_model()
    config = getattr(model, "generation_config", None)
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    if config is not None and tokenizer is not None:
        config.eos_token_id = end_tokens(config.eos_token_id, tokenizer) or None


def _adapted(job: Job, model: Any) -> tuple[Any, Any]:
    """The model, with the adapter whose training continues; and PEFT's configuration of a new one."""
    if job.adapter is not None:
        return attach_for_training(job.adapter, model, job.mover), None
    config = get_peft_config(job.arguments.model)
    if config is None:
        return model, None
    targets = beside_experts(model, config.target_modules)
    if targets != config.target_modules:
        _say_left_out(model, targets or ())
    config.target_modules = target_names(targets)
    _choose_vision(job.arguments, model, config)
    check_targets(model, config.target_modules, saved=config.modules_to_save)
    if job.arguments.tune.init_lora_weights != "default":
        config.init_lora_weights = job.arguments.tune.init_lora_weights
    return model, config


def _say_left_out(model: Any, targets: Iterable[str]) -> None:
    """Which layers ``all-linear`` leaves out, and what has adapters."""
    kinds = kept_out(model)
    chosen = ", ".join(targets)
    if "experts" in kinds:
        announce.say(
            f"mixture of experts: adapters on {chosen}; --lora_target_parameters "
            "experts.gate_up_proj experts.down_proj trains the experts too, with adapters of several GB"
        )
    why = {
        "state space": "Mamba-like layers, whose kernels read these weights themselves",
        "indexer": "the attention's indexer, which gets no gradient",
        "other product": "layers that compute something else than their product",
    }
    for kind in kinds.keys() & why.keys():
        announce.say(f"adapters on {chosen}; left out: {', '.join(kinds[kind])} of {why[kind]}")


def _choose_vision(arguments: Arguments, model: Any, config: Any) -> None:
    """Leave the vision tower and the projector out of a new adapter's targets, unless the user wants them.

    UsageError: they are wanted of a model that has none.
    """
    tune = arguments.tune
    tower, projector = tune.train_vision_tower, tune.train_projector
    # A resumed run of an earlier version has values that nobody gave, whatever its model is: see `_as_begun`.
    asked = not {"train_vision_tower", "train_projector"}.isdisjoint(arguments.given)
    reads_text_only = model.config.get_text_config() is model.config
    if reads_text_only and not (asked and (tower or projector)):
        return
    from hf_rocm_tune.models.vision import (  # not imported for text
        has_linear,
        parameters_of,
        vision_parts,
        whole_modules,
    )

    parts = vision_parts(model)
    if parts is None:
        if asked and (tower or projector):
            raise UsageError(f"--train_vision_tower, --train_projector: {type(model).__name__} has no vision tower")
        return
    if "lora_target_modules" in arguments.given and not asked:
        return  # the user's own
    if asked and projector in ("lora", "whole") and not parts.projector:
        raise UsageError(f"--train_projector: no layer of {type(model).__name__} is one of a projector")
    if asked and projector == "lora" and not has_linear(model, parts.projector):
        raise UsageError(
            f"--train_projector lora: the projector of {type(model).__name__} has no linear layer for an adapter; "
            "--train_projector whole trains it"
        )
    config.exclude_modules = parts.left_out(tower=tower == "lora", projector=projector == "lora")
    whole = whole_modules(model, parts, tower=tower == "whole", projector=projector == "whole")
    if whole:
        config.modules_to_save = [*(config.modules_to_save or ()), *whole]
    left_out = []
    if tower in (None, "no"):
        left_out.append(f"the vision tower ({parameters_of(model, parts.tower, parts.projector):,} parameters)")
    inside = tuple(f"{top}." for top in parts.tower)
    outside = [name for name in parts.projector if not name.startswith(inside)]
    if projector in (None, "no") and parts.projector and (tower != "whole" or outside):
        left_out.append(f"the projector ({parameters_of(model, parts.projector):,})")
    if left_out:
        announce.say(
            f"not trained: {' and '.join(left_out)}; TRL would adapt their linear layers too: --train_vision_tower "
            "lora, --train_projector lora"
        )


def _trainer_class(method: Method) -> type[VerifiedTransferMixin]:
    if method == "sft":
        return VerifiedSFTTrainer
    verb = VERBS[method]
    stock = getattr(importlib.import_module(verb.library or "trl"), verb.trainer)
    return type(f"Verified{verb.trainer}", (VerifiedTransferMixin, stock), {})
