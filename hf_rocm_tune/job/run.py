"""The story of a fine-tuning run, from settings to what is left on disk. Wiring only.

Whatever can be refused is refused before the model is loaded, and nothing in the output directory is touched before
that.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hf_rocm_tune import exits, upstream
from hf_rocm_tune.errors import MemoryFaultError
from hf_rocm_tune.job import announce, auto_fit
from hf_rocm_tune.job import findings as machine_findings
from hf_rocm_tune.job.card import Cards
from hf_rocm_tune.job.setup import Job, make_trainer, open_publisher, prepare
from hf_rocm_tune.machine.process import check_world, several_machines
from hf_rocm_tune.models.placement import release_memory
from hf_rocm_tune.ranks.agree import highest, on_main_process
from hf_rocm_tune.settings import arguments as command_line
from hf_rocm_tune.settings import ranks as ranks_arguments
from hf_rocm_tune.settings.arguments import Arguments
from hf_rocm_tune.training import report, seam_probe, stall
from hf_rocm_tune.training.device_memory import explain_native_exits
from hf_rocm_tune.training.run import Plan, prepare_output_dir
from hf_rocm_tune.training.stall import StallGuard
from hf_rocm_tune.training.supervised import tell_begun
from hf_rocm_tune.training.trainer import VerifiedSFTTrainer

_WAYS_BACK = 3  # in one process; memory that fails more often is not to be trained in


def run(argv: Sequence[str]) -> int:
    """Runs one job.

    Args:
        argv: the command line without the program's name.

    Returns:
        0; whatever goes wrong is raised.
    """
    met_at = exits.meeting_place()
    place = met_at.with_name(f"{met_at.name}-preflight") if met_at is not None else None
    preflight = partial(ranks_arguments.decide, environ=os.environ, place=place, say=announce.say)
    arguments = command_line.parse(argv, before_meeting=preflight)
    if arguments.tune.print_config:
        print(arguments.to_yaml(), end="")
        return 0
    check_world(arguments.training.world_size, os.environ)
    if newer := upstream.untested():
        on_main_process(lambda: seam_probe.require(newer, announce.say))
    explain_native_exits(exits.speak)
    several = arguments.training.world_size > 1
    if several_machines(os.environ):
        announce.say(
            "several machines: torch, gloo and RCCL listen on all interfaces, unencrypted, and who reaches their ports "
            f"can run code as you: let no other host reach {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} and "
            "the ports that the system gives out (/proc/sys/net/ipv4/ip_local_port_range)"
        )
    with stall.watched(
        arguments.ranks.stall_timeout,
        place=exits.meeting_place(),
        tell=exits.speak,
        collective_s=arguments.training.ddp_timeout if several else None,
    ) as guard:
        return _run(arguments, guard)


def _run(arguments: Arguments, guard: StallGuard) -> int:
    asked = {**arguments.resolved(), "world_size": arguments.training.world_size}
    restarted = bool(highest([int(exits.is_restart(os.environ))])[0])
    plan = _plan(arguments, asked, restarted=restarted)
    with closing(plan):
        return _with_directory(arguments, asked, plan, guard, restarted=restarted)


def _with_directory(
    arguments: Arguments, asked: dict[str, Any], plan: Plan, guard: StallGuard, *, restarted: bool
) -> int:
    for note in plan.notes:
        announce.say(note)
    if restarted:
        where = plan.checkpoint.name if plan.checkpoint else "the start"
        why = (exits.last_ending(os.environ) or "a process ended without a word").partition(". ")[0]
        announce.say(f"the launcher has started all processes again ({why}): the run goes on from {where}")
    publisher = open_publisher(arguments)
    if plan.action == "finished":
        announce.say(f"this run is finished in {plan.directory}; give --overwrite_output_dir to train again")
        if publisher is not None:
            publisher.result(plan.directory)  # its push may have failed; what is there is not sent again
        return 0
    job = prepare(arguments, asked, plan, publisher, guard)
    announce.say(*announce.settings(arguments, job.data.description, job.mover))
    job.findings = machine_findings.look(doctor=arguments.tune.doctor == "quick", say=announce.say_of_this_rank)
    try:
        with job.mover, closing(publisher) if publisher else nullcontext():
            _complete(job)
            if publisher is not None:
                publisher.result(plan.directory)
            exits.complete()
    finally:
        job.plan.close()  # after a way back it is another one
    release_memory()  # suspected, not proven: a process group held in a cycle can abort the interpreter at its end
    return 0


def _complete(job: Job) -> None:
    """Trains to the end. Where memory changed what was right, everything is loaded again and the run goes back.

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
        job.plan.close()
        job.plan = _plan(job.arguments, job.asked, going_back=True)
        where = job.plan.checkpoint.name if job.plan.checkpoint else "the start"
        announce.say(f"{fault}", f"all weights are loaded again and the run goes back to {where}")
        job.mover.report.settle_incidents(("frozen", "trained", "batches"), "recovered")


def _attempt(job: Job, *, may_go_back: bool) -> str | None:
    """One way from loading to the finished result; the message of a memory fault that may be recovered from."""
    job.guard.starting()
    trainer, facts = make_trainer(job)
    announce.say(*announce.model(trainer, facts))
    trainer.require_coverage()
    facts = _fitted(job, trainer, facts)
    if trainer.is_world_process_zero():
        job.plan.commit()
    if trainer.is_local_process_zero():  # each machine may have a supervisor
        tell_begun(
            run_id=job.plan.run_id,
            output_dir=job.plan.directory,
            resumed_from=job.plan.checkpoint.name if job.plan.checkpoint else None,
            leads=trainer.is_world_process_zero(),
        )
    trainer.accelerator.wait_for_everyone()
    job.guard.watch(trainer, facts, job.plan.directory)
    cards = job.cards = _cards(job, trainer, facts)
    try:
        with trainer.stop_requests.installed():  # the save of the result is not torn by a Ctrl-C either
            _train(job, trainer, facts, cards)
            if not job.arguments.training.push_to_hub:
                exits.complete()
    except BaseException as error:
        report.write_partial(trainer, facts, error)  # the evidence, whatever it was
        cards.leave_log(error)
        if may_go_back and isinstance(error, MemoryFaultError):
            return error.what
        raise
    return None


def _fitted(job: Job, trainer: VerifiedSFTTrainer, facts: report.RunFacts) -> report.RunFacts:
    """The choice of --auto_fit, corrected where that was asked for, and kept for whoever continues the run."""
    if job.fit is None:
        return facts
    job.fit = auto_fit.probed(job.fit, trainer, say=announce.say)
    chosen = job.fit.choice.values()
    job.plan = replace(job.plan, record=replace(job.plan.record, auto_fit=chosen))
    return replace(facts, auto_fit=chosen)


def _plan(arguments: Arguments, asked: dict[str, Any], *, going_back: bool = False, restarted: bool = False) -> Plan:
    """What to do in the output directory: rank 0 decides, all ranks hear it."""
    return on_main_process(
        lambda: prepare_output_dir(
            arguments.training.output_dir,
            asked,
            overwrite=arguments.tune.overwrite_output_dir and not going_back,
            resume=None if going_back else arguments.training.resume_from_checkpoint,
            restarted=restarted or None,
        )
    )


def _cards(job: Job, trainer: VerifiedSFTTrainer, facts: report.RunFacts) -> Cards:
    return Cards(
        arguments=job.arguments,
        data=job.data.description,
        method=announce.method(trainer),
        trainer=trainer,
        facts=facts,
        say=announce.say,
    )


def _train(job: Job, trainer: VerifiedSFTTrainer, facts: report.RunFacts, cards: Cards) -> None:
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
