"""Predicted against measured peak memory of a training step.

Real steps of the verified trainer (TRL's loss, PEFT, the optimizer) on models with random weights. On a CPU every
allocation of torch's allocator is counted by its profiler, kernels' own buffers included; on a GPU the allocator's peak
is read, with the card limited to 20 GiB. The prediction knows the configuration only. Prints a table and, as the last
line, one JSON object.

    python benchmarks/plan_errors.py [--device cpu|cuda] [--only TEXT] [--json FILE]

On the CPU the prediction counts the CPU's kernels (attention, dropout, head without Triton), so this proves the
recording, its growth with batch and length, and the arithmetic; what is different on a card only a card can prove.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.plan_cases import CPU_CASES, SIMULATED_CASES, Case, gpu_cases  # noqa: E402
from hf_rocm_tune.plan import (  # noqa: E402
    GIB,
    CardMemory,
    Estimate,
    PlanRequest,
)

CARD_GIB = 20.0
STEPS = 2  # the second one has the optimizer's state from the start


def predict(case: Case, *, device: str) -> Estimate:
    """What the planner says, from the configuration alone."""
    from hf_rocm_tune.plan import config_of, plan_for

    request = case.request
    if device == "cpu":
        request = replace(request, platform="cpu")
    card = CardMemory(name="any", usable=1 << 40, desktop=0, context=0)
    plan = plan_for(request, card=card, config=config_of(case.fields))
    return next(each for each in plan.grid if each.case.length == request.length)


def measure(case: Case, *, device: str) -> dict[str, float]:
    """A real step: bytes at the peak, and on a GPU what the allocator had reserved."""
    import trl

    from hf_rocm_tune.train.trainer import VerifiedTransferMixin

    torch.manual_seed(0)
    stock = getattr(trl, f"{case.request.trainer.upper()}Trainer")
    with tempfile.TemporaryDirectory() as scratch, quiet():
        job = job_of(case, device, Path(scratch))
        trainer = type(f"Verified{stock.__name__}", (VerifiedTransferMixin, stock), {})(
            **job | (streamed_model(case, job["model"], Path(scratch), device) if case.request.stream else {}),
            recompute_layers=case.request.recompute,
            one_pass_loss=case.request.one_pass_loss,
            consent_unverified=True,
            sentinel_every=0,
        )
        found = (_count_on_gpu if device == "cuda" else _count_on_cpu)(trainer, evaluates=bool(case.request.eval_batch))
    del trainer
    gc.collect()
    return found


def job_of(case: Case, device: str, scratch: Path, *, steps: int = STEPS) -> dict[str, Any]:
    """The arguments of a trainer."""
    import trl
    from peft import LoraConfig

    asked = case.request
    lora = asked.methods[0] != "full"
    more: dict[str, Any] = {"packing": asked.packing} if asked.trainer == "sft" else {}
    if asked.eval_batch:
        more |= {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": asked.eval_batch}
    args = getattr(trl, f"{asked.trainer.upper()}Config")(
        output_dir=str(scratch),
        per_device_train_batch_size=asked.micro_batch,
        gradient_accumulation_steps=case.accumulation,
        max_steps=steps,
        max_length=asked.length,
        train_sampling_strategy="sequential",  # so that each batch has a row of full length
        gradient_checkpointing=asked.checkpointing,
        bf16=asked.autocast,
        use_cpu=device == "cpu",
        optim=asked.optim,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **more,
    )
    adapters = LoraConfig(
        task_type="CAUSAL_LM",
        r=asked.rank,
        lora_dropout=asked.dropout,
        target_modules=asked.targets if isinstance(asked.targets, str) else list(asked.targets),
        target_parameters=list(asked.target_parameters) or None,
        modules_to_save=list(asked.modules_to_save) or None,
        use_dora=asked.dora,
    )
    found = {
        "model": _random_model(case, device),
        "args": args,
        "train_dataset": _rows(case, asked.effective_batch * steps, asked.micro_batch or 1),
        "eval_dataset": _rows(case, asked.eval_batch, asked.eval_batch) if asked.eval_batch else None,
        "processing_class": _tokenizer(),
        "peft_config": adapters if lora else None,
    }
    return found | ({"ref_model": _random_model(case, device)} if asked.trainer != "sft" and not lora else {})


def _random_model(case: Case, device: str) -> Any:
    from transformers import AutoModelForCausalLM

    from hf_rocm_tune.plan import config_of

    asked = case.request
    method = asked.methods[0]
    more = {} if asked.attention == "sdpa" else {"attn_implementation": asked.attention}
    with torch.device("cpu" if asked.stream else device):
        model = AutoModelForCausalLM.from_config(
            config_of(case.fields), dtype=getattr(torch, asked.dtype_of(method)), **more
        )
    return _quantised(model, asked, device) if method == "qlora" and not asked.stream else model


def _quantised(model: Any, asked: PlanRequest, device: str) -> Any:
    """The model's linear layers and experts in 4 bits, as loading leaves them."""
    import bitsandbytes
    from transformers import BitsAndBytesConfig
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.auto import AutoHfQuantizer
    from transformers.quantizers.base import get_keys_to_not_convert

    from hf_rocm_tune.models.experts import experts_of, pack_nf4, use_packed, weights_of

    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=asked.nested,
        bnb_4bit_compute_dtype=getattr(torch, asked.dtype_of("qlora")),
    )
    weights = {name: module.weight.data for name, module in model.named_modules() if hasattr(module, "weight")}
    biases = {name: module.bias for name, module in model.named_modules() if getattr(module, "bias", None) is not None}
    replace_with_bnb_linear(model, get_keys_to_not_convert(model), settings)
    for name, module in model.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.weight = bitsandbytes.nn.Params4bit(
                weights.pop(name),
                requires_grad=False,
                compress_statistics=asked.nested,
                quant_type="nf4",
                module=module,
            ).to(device)
            module.bias = biases.get(name)
    for _, experts in experts_of(model):
        for name in weights_of(experts):
            setattr(experts, name, pack_nf4(name, getattr(experts, name).data, settings))
    use_packed(model)
    model.is_loaded_in_4bit = model.is_quantized = True
    model.hf_quantizer = AutoHfQuantizer.from_config(settings)
    model.config.quantization_config = settings
    return model


def streamed_model(case: Case, model: Any, scratch: Path, device: str) -> dict[str, Any]:
    """The model written to disk and loaded again, with some of its layers streamed, and the mover that brings them."""
    from transformers import BitsAndBytesConfig

    from hf_rocm_tune.models.factory import ModelSource, load_model
    from hf_rocm_tune.models.streamed import Streamed, spread
    from hf_rocm_tune.transfer import Mover

    asked = case.request
    dtype = getattr(torch, asked.dtype_of(asked.methods[0]))
    quantised = asked.methods[0] == "qlora"
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=asked.nested,
        bnb_4bit_compute_dtype=dtype,
    )
    model.save_pretrained(scratch / "model")
    layers = spread(asked.stream, model.config.num_hidden_layers)
    mover = Mover(torch.device(device, 0))
    source = ModelSource(
        name=str(scratch / "model"),
        init={"dtype": dtype, "attn_implementation": asked.attention},
        quantization=settings if quantised else None,
    )
    streamed = Streamed("model.layers", layers, from_files=not quantised)
    return {"model": load_model(source, mover, streamed=streamed)[0], "mover": mover}


def _rows(case: Case, count: int, batch: int) -> Any:
    """Token ids at random; in a padded batch one sequence has the full length. Preferences are words, cut to it."""
    from datasets import Dataset

    asked = case.request
    numbers = np.random.default_rng(0)
    if asked.packing:
        lengths = [asked.length // 4] * 4 * count
    else:
        lengths = [asked.length if row % batch == 0 else asked.length * 3 // 4 for row in range(count)]
    if asked.trainer != "sft":
        answers = [" word" * (length if length == asked.length else length // 4) for length in lengths]
        names = ("chosen", "rejected") if asked.trainer == "dpo" else ("completion",)
        label = {"label": True} if asked.trainer == "kto" else {}
        rows = [{"prompt": "a", **dict.fromkeys(names, text), **label} for text in answers]
        return Dataset.from_list([row | ({"label": i % 2 == 0} if label else {}) for i, row in enumerate(rows)])
    return Dataset.from_list([{"input_ids": numbers.integers(5, 400, length).tolist()} for length in lengths])


def _tokenizer() -> Any:
    from tests.tiny import build_tokenizer

    return build_tokenizer()


def _live(trainer: Any) -> int:
    """Bytes of parameters, buffers and quantisation state, each once."""
    from hf_rocm_tune.models.placement import tensors_of

    models = [trainer.model, *filter(None, [getattr(trainer, "ref_model", None)])]
    return sum(tensor.numel() * tensor.element_size() for model in models for _, tensor in tensors_of(model))


def _watch_steps(trainer: Any, begin: Any, end: Any, *, evaluates: bool) -> None:
    """Calls ``begin`` at the start of each step, and ``end`` after it, or after the evaluation that follows it."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def on_step_begin(self, *arguments: Any, **keywords: Any) -> None:
            begin()

        def on_step_end(self, *arguments: Any, **keywords: Any) -> None:
            if not evaluates:
                end()

        def on_evaluate(self, *arguments: Any, **keywords: Any) -> None:
            end()

    trainer.add_callback(Watch())


def _count_on_cpu(trainer: Any, *, evaluates: bool) -> dict[str, float]:
    """Adds up what torch's CPU allocator gives and takes back, as its profiler records it."""
    moments: list[int] = []
    _watch_steps(
        trainer, lambda: moments.append(time.time_ns()), lambda: moments.append(time.time_ns()), evaluates=evaluates
    )
    before = _live(trainer)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        trainer.train()
    events = [
        (each.start_ns(), each.nbytes())
        for each in profile.profiler.kineto_results.events()
        if each.name() == "[memory]"
    ]
    times, changes = np.array(sorted(events)).T
    levels = before + np.cumsum(changes)
    inside = (times >= moments[-2]) & (times <= moments[-1])
    return {"peak": float(levels[inside].max())}


def _count_on_gpu(trainer: Any, *, evaluates: bool) -> dict[str, float]:
    """The allocator's own peak in the last step."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, CARD_GIB * GIB / total))
    found: dict[str, float] = {}

    def end() -> None:
        found["peak"] = float(torch.cuda.max_memory_allocated())
        found["reserved"] = float(torch.cuda.max_memory_reserved())

    _watch_steps(trainer, torch.cuda.reset_peak_memory_stats, end, evaluates=evaluates)
    try:
        trainer.train()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Libraries keep their progress bars and remarks to themselves."""
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def compare(cases: Sequence[Case], *, device: str) -> list[dict[str, Any]]:
    """One row a case: predicted, measured, and the error of the prediction in percent of what was measured."""
    rows = []
    for case in cases:
        asked = case.request
        expected = predict(case, device=device)
        try:
            found = measure(case, device=device)
        except torch.OutOfMemoryError:
            found = {}
        row: dict[str, Any] = {
            "model": case.name,
            "method": asked.methods[0],
            "way": case.label(),
            "micro_batch": asked.micro_batch,
            "length": asked.length,
            "checkpointing": asked.recompute or asked.checkpointing,
            "predicted": expected.allocated,
            "moment": expected.moment,
            **found,
        }
        row["error_percent"] = 100 * (expected.allocated / found["peak"] - 1) if found else None
        rows.append(row)
        print(table([row]).splitlines()[-1], file=sys.stderr, flush=True)
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| model | method | way | batch x tokens | checkpointing | predicted MiB | measured MiB | error | peak in |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        measured = f"{row['peak'] / 2**20:.1f}" if "peak" in row else "out of memory"
        error = f"{row['error_percent']:+.2f} %" if row["error_percent"] is not None else "-"
        lines.append(
            f"| {row['model']} | {row['method']} | {row['way']} | {row['micro_batch']} x {row['length']} | "
            f"{_shown(row['checkpointing'])} | {row['predicted'] / 2**20:.1f} | {measured} | {error} | "
            f"{row['moment']} |"
        )
    return "\n".join(lines)


def _shown(checkpointing: bool | tuple[int, int]) -> str:
    if isinstance(checkpointing, bool):
        return "on" if checkpointing else "off"
    return "{} whole, {} selective".format(*checkpointing)


def _versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in ("torch", "transformers", "trl", "peft", "bitsandbytes")}


def main() -> None:
    """Compares all cases of a device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--only", default="", help="cases whose name or way contains this")
    parser.add_argument("--simulated", action="store_true", help="the cases of the simulated card of the tests")
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    if wanted.device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    cases = CPU_CASES if wanted.device == "cpu" else SIMULATED_CASES if wanted.simulated else tuple(gpu_cases())
    cases = [case for case in cases if wanted.only in f"{case.name}, {case.label()}"]
    rows = compare(cases, device=wanted.device)
    errors = [abs(row["error_percent"]) for row in rows if row["error_percent"] is not None]
    device = torch.cuda.get_device_name() if wanted.device == "cuda" else platform.processor() or platform.machine()
    result = {
        "benchmark": "plan_errors",
        "device": device,
        "versions": _versions(),
        "largest_error_percent": max(errors, default=None),
        "rows": rows,
    }
    print(table(rows))
    print(f"\nlargest error: {max(errors, default=float('nan')):.2f} %, of {len(rows)} cases on {device}")
    if wanted.json:
        wanted.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
