"""What a fine-tuning run needs before it trains: everything that can be refused, then the model and its trainer.

Whatever can be refused without loading the model is refused by `prepare`; nothing here touches the output directory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import EarlyStoppingCallback, PreTrainedTokenizerBase, set_seed
from trl import get_peft_config, get_quantization_config

from hf_rocm_tune.data.formats import check_format
from hf_rocm_tune.data.sources import Splits, load_mixture, load_source
from hf_rocm_tune.job import announce, auto_fit
from hf_rocm_tune.job.card import Cards
from hf_rocm_tune.job.split import make_mover
from hf_rocm_tune.models.adapter import check_targets, target_names
from hf_rocm_tune.models.factory import ModelSource, attest_files, check_source, load_model, load_tokenizer
from hf_rocm_tune.models.split_loading import device_map
from hf_rocm_tune.publish.publisher import Publisher
from hf_rocm_tune.ranks.agree import on_main_process
from hf_rocm_tune.redaction import local_paths
from hf_rocm_tune.settings.arguments import Arguments
from hf_rocm_tune.training import report
from hf_rocm_tune.training.device_memory import warm_up
from hf_rocm_tune.training.faults import Crashes, StepFaultSpec
from hf_rocm_tune.training.ranks import is_wanted
from hf_rocm_tune.training.refusals import as_usage_errors, check_fsdp, check_loggers, check_offloads
from hf_rocm_tune.training.run import Plan
from hf_rocm_tune.training.stall import StallGuard
from hf_rocm_tune.training.telemetry import Telemetry, of_device
from hf_rocm_tune.training.trainer import VerifiedSFTTrainer
from hf_rocm_tune.transfer import Mover


@dataclass(kw_only=True)
class Job:
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
    guard: StallGuard
    findings: tuple[dict[str, Any], ...] = ()
    cards: Cards | None = None  # made with the trainer

    def write_card(self, directory: Path) -> None:
        """The model card of what is saved, once there is a run to tell of."""
        if self.cards is not None:
            self.cards.write_card(directory)


def open_publisher(arguments: Arguments) -> Publisher | None:
    """Who pushes, on the first rank of a job that is to push. The token leaves the settings: they go to disk."""
    training = arguments.training
    token, training.hub_token = training.hub_token, None
    if not training.push_to_hub:
        return None
    if token:
        announce.say("others on this machine can read --hub_token while the run lasts: `hf auth login` hides the token")
    base = arguments.tune.hub_base_model_id
    local = dict.fromkeys(local_paths(arguments.resolved()), "") | {arguments.model.model_name_or_path: base or ""}
    publisher: Publisher | None = None

    def repo_id() -> str:
        nonlocal publisher
        verify = arguments.tune.hub_verify
        publisher = Publisher.of(
            training, base_model_id=base, verify=verify, local=local, token=token, say=announce.say
        )
        publisher.open()
        return publisher.repo_id

    training.hub_model_id = on_main_process(repo_id)
    return publisher


def prepare(
    arguments: Arguments, asked: dict[str, Any], plan: Plan, publisher: Publisher | None, guard: StallGuard
) -> Job:
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
    check_fsdp(training, arguments.model, os.environ, others=_not_for_shards(arguments))
    if crashes := Crashes().text:
        announce.say(f"crashes are injected on request: {crashes}")
    if step_faults := StepFaultSpec.from_environment():
        announce.say(f"steps are harmed on request: {step_faults}")
    data = _data(arguments)
    tokenizer = load_tokenizer(source, training.chat_template_path)
    _check_formats(arguments, data, tokenizer)
    mover = make_mover(arguments, source, say=announce.say)
    libraries = _warm_up(mover, source)
    fit = auto_fit.fit(arguments, plan.record.auto_fit, libraries=libraries, say=announce.say)
    telemetry = of_device(training.device, every_s=tune.telemetry_every, tell=announce.say_of_this_rank)
    return Job(
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
        guard=guard,
    )


def _warm_up(mover: Mover, source: ModelSource) -> int:
    """Libraries take their memory of each card while there is some, and how much; see `training.device_memory`."""
    quantised = source.quantization
    bits = None if quantised is None else 4 if quantised.load_in_4bit else 8
    taken = sum(warm_up(device, bits=bits) for device in sorted(set(device_map(mover).values()), key=str))
    mover.report.count("memory", libraries_bytes=taken)
    return taken


def _not_for_shards(arguments: Arguments) -> dict[str, bool]:
    """Flags that do not go with FSDP2, and whether they are in use."""
    ranks, tune = arguments.ranks, arguments.tune
    return {
        "--auto_fit": tune.auto_fit != "off",
        "--compare_optimizer_every": tune.compare_optimizer_every > 0,
        "--grad_sync host": ranks.grad_sync == "host",
        "--grad_compression": ranks.grad_compression != "none",
        "--split_layers": ranks.split_layers is not None,
    }


def make_trainer(job: Job) -> tuple[VerifiedSFTTrainer, report.RunFacts]:
    """Loads the model, verified, and builds its trainer with everything that watches a run; collective.

    Returns:
        The trainer, ready to train, and what its report will say of the loading.
    """
    training, tune = job.arguments.training, job.arguments.tune
    set_seed(training.seed)  # as TRL does before it loads a model
    # A model that is to be sharded stays on the host: each card gets its own rows, when the trainer is built.
    on_host = is_wanted(os.environ) and job.source.quantization is None
    model, seconds = load_model(job.source, job.mover, on_host=on_host)
    records = on_main_process(lambda: attest_files(job.source, job.mover))
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
            grad_sync=job.arguments.grad_sync.way,
            grad_compression=job.arguments.grad_sync.compression,
            run_id=job.plan.run_id,
            skip_steps=job.plan.record.skipped_steps,
            publisher=job.publisher,
            card_writer=job.write_card,
            telemetry=job.telemetry,
            listener=job.guard.hear,
        )
    job.arguments = replace(job.arguments, training=trainer.args)  # a copy, with what is changed while it is built
    if job.publisher is not None:
        job.publisher.alive = partial(trainer.beat, "save")
    facts = report.RunFacts(
        run_id=job.plan.run_id,
        load_seconds=seconds + trainer.describe()["shard_seconds"],
        attested_files=records.attested,
        not_attested=records.unknown,
        findings=job.findings,
        preflight=job.arguments.preflight.to_dict() if job.arguments.preflight else None,
        telemetry=job.telemetry,
    )
    return trainer, facts


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
