"""How often wrong products are found, and right ones accused, by the checks of products with frozen weights.

clean    right products of all dtypes, shapes and inputs, outliers among them: none may be accused
runs     likewise under the command line, over all small architectures and ways of computing
faults   wrong ones by kind and dtype: found or missed, by the size of the error over the bound
cost     CPU seconds of a training step with and without, interleaved; the share of an 8B step by counted bytes

launches what the checks add to a step, as the simulated card of the tests counts it

python benchmarks/arithmetic.py --part clean --checks 1000000 --json FILE
SIMCARD=1 PYTHONPATH=$PWD:$PWD/tests/simcard/boot python benchmarks/arithmetic.py --part launches
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from common import Figures, main, print_table

import torch  # isort: skip
from torch import Tensor, nn  # isort: skip

MIXTURES = {
    "experts float32": torch.float32,
    "experts bfloat16": torch.bfloat16,
    "experts adapters": torch.bfloat16,
    "experts nf4": torch.bfloat16,
}
KINDS = ("float32", "bfloat16", "float16", "nf4", "int8", *MIXTURES)
WIDTHS = ((64, 64), (64, 256), (256, 64), (192, 128))
SIZES = {"none": 0.0, "within": 1.0, "1 to 3": 3.0, "3 to 10": 10.0, "10 to 30": 30.0, "above 30": math.inf}
"""Norm of the error of the worst row over t times the output's rounding."""
WHOLE = ("NaN", "one exponent bit", "low mantissa bit")
LLAMA_8B = [(4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), (4096, 14336), (4096, 14336), (14336, 4096)] * 32


def layers(kind: str, generator: torch.Generator) -> nn.ModuleList:
    """Frozen layers of all widths: the first with a bias, and but for quantised kinds one Conv1D."""
    from transformers import BitsAndBytesConfig  # noqa: F401  # registers bitsandbytes' operators
    from transformers.pytorch_utils import Conv1D

    found = nn.ModuleList()
    for number, (into, out) in enumerate(WIDTHS):
        weight = torch.randn(out, into, generator=generator) / math.sqrt(into)
        weight[:, :: max(1, into // 5)] *= 4  # outlier columns, as trained models have
        bias = number == 0
        if kind in ("nf4", "int8"):
            import bitsandbytes as bnb

            if kind == "nf4":
                layer: Any = bnb.nn.Linear4bit(
                    into, out, bias, compute_dtype=torch.bfloat16, quant_type="nf4", compress_statistics=True
                )
                layer.weight = bnb.nn.Params4bit(
                    weight.bfloat16(), requires_grad=False, quant_type="nf4", compress_statistics=True
                )
            else:
                layer = bnb.nn.Linear8bitLt(into, out, bias, has_fp16_weights=False, threshold=6.0)
                layer.weight = bnb.nn.Int8Params(weight.half(), requires_grad=False, has_fp16_weights=False)
            layer = layer.to("cpu")
            if bias:
                layer.bias = nn.Parameter(layer.bias.data.bfloat16())
        elif number == 1:
            layer = Conv1D(out, into)
            layer.weight.data = weight.T.contiguous()
        else:
            layer = nn.Linear(into, out, bias)
            layer.weight.data = weight
        if kind not in ("nf4", "int8"):
            layer = layer.to(getattr(torch, kind))
        found.append(layer.requires_grad_(False).train())
    return found


class Mixture(nn.Module):
    """Frozen experts of transformers, as their models call them, and a router."""

    def __init__(self, kind: str, number: int, generator: torch.Generator) -> None:
        from transformers import GptOssConfig, Qwen3MoeConfig
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        super().__init__()
        width, inner = ((64, 128), (128, 64))[number % 2]
        given = {"hidden_size": width, "num_experts_per_tok": 2}
        if number < 2:
            own = Qwen3MoeConfig(**given, moe_intermediate_size=inner, num_experts=8)
            self.experts: Any = Qwen3MoeExperts(own)
        else:
            own = GptOssConfig(**given, intermediate_size=inner, num_local_experts=8)
            self.experts = GptOssExperts(own)
        own._experts_implementation = ("grouped_mm", "eager", "grouped_mm", "batched_mm")[number]
        for weight in self.experts.parameters():
            weight.data = torch.randn(weight.shape, generator=generator) / math.sqrt(weight.shape[-1])
        self.experts.requires_grad_(False).to(MIXTURES[kind])
        self.router = torch.randn(width, 8, generator=generator)
        self.columns = (width, width)

    def forward(self, x: Tensor) -> Tensor:
        weights, index = (x.detach().float() @ self.router).softmax(-1).topk(2)
        return self.experts(x, index, weights.to(x.dtype))


def mixtures(kind: str, generator: torch.Generator) -> nn.ModuleList:
    """Of two architectures, two shapes and all ways to compute; with adapters that PEFT adds, or in 4 bit."""
    from peft import LoraConfig, get_peft_model
    from transformers import BitsAndBytesConfig

    from hf_rocm_tune.models.experts import pack_nf4, use_packed, weights_of

    found = nn.ModuleList([Mixture(kind, number, generator) for number in range(4)])
    if kind == "experts nf4":
        for each in found:
            for name in weights_of(each.experts):
                weight = pack_nf4(name, getattr(each.experts, name).data, BitsAndBytesConfig(load_in_4bit=True))
                setattr(each.experts, name, weight)
        use_packed(found)
    elif kind == "experts adapters":
        config = LoraConfig(
            r=8, target_modules=[], target_parameters=["gate_up_proj", "down_proj"], init_lora_weights=False
        )
        return get_peft_model(found, config).base_model.model
    return found


class Bench:
    """Frozen layers under the checks, without a model around them."""

    def __init__(self, kind: str, seed: int = 0) -> None:
        from hf_rocm_tune.train.arithmetic import ArithmeticChecks
        from hf_rocm_tune.transfer import Mover

        self.generator = torch.Generator().manual_seed(seed)
        self.layers = mixtures(kind, self.generator) if kind in MIXTURES else layers(kind, self.generator)
        self.dtype = MIXTURES.get(kind) or (torch.bfloat16 if kind in ("nf4", "int8") else getattr(torch, kind))
        self.mover = Mover(torch.device("cpu"))
        self.checks = ArithmeticChecks("every", self.mover)
        trainer: Any = SimpleNamespace(
            args=SimpleNamespace(torch_compile=False),
            is_sharded=False,
            get_tp_size=lambda: 1,
            accelerator=SimpleNamespace(mixed_precision="no"),
            model=self.layers,
            streamer=None,
        )
        self.checks.prepare(trainer, lambda: None)
        self.step = 0

    def inputs(self) -> Iterator[tuple[Any, Tensor, Tensor]]:
        """Each layer with an input and a gradient of its output, of many sizes and shapes of distribution."""
        for layer, columns in zip(self.layers, WIDTHS, strict=True):
            into, out = getattr(layer, "columns", columns)
            rows = int(torch.randint(1, 65, (), generator=self.generator))
            yield layer, self._draw(rows, into), self._draw(rows, out)

    def _draw(self, rows: int, columns: int) -> Tensor:
        kind = int(torch.randint(0, 6, (), generator=self.generator))
        found = torch.randn(rows, columns, generator=self.generator)
        if kind == 1:
            found[:, torch.randint(0, columns, (2,), generator=self.generator)] *= 100  # outlier features
        elif kind == 2:
            found[torch.randint(0, rows, (max(1, rows // 3),), generator=self.generator)] = 0  # padding
        elif kind == 3:
            found *= torch.exp(3 * torch.randn(rows, 1, generator=self.generator))  # rows of all lengths
        elif kind == 4:
            found = found.abs()  # no cancellation
        elif kind == 5:
            found = found * 1e-3 if self.dtype == torch.float16 else found * 1e-12  # gradients
        return found.to(self.dtype)

    def run(self, each: list[tuple[Any, Tensor, Tensor]], harm: Any = None) -> Any:
        """One step, or the step again; the verdict."""
        for number, (layer, x, gradient) in enumerate(each):
            x = x.clone().requires_grad_()
            if harm is not None and number == 0:
                with harm:
                    layer(x).backward(gradient)
            else:
                layer(x).backward(gradient)
        return self.checks.judge([row.tolist() for row in self.checks.pending()], can_repeat=True)

    def begin(self) -> list[tuple[Any, Tensor, Tensor]]:
        self.step += 1
        self.checks.begin_step(self.step)
        return list(self.inputs())

    def close(self) -> None:
        self.mover.close()


def clean(kinds: Sequence[str], checks: int, seed: int) -> Figures:
    """Right products: none is accused, and the largest residual over the bound stays below 1."""
    rows, found = [], {}
    for kind in kinds:
        bench = Bench(kind, seed)
        begun = time.process_time()
        for _ in range(math.ceil(checks / len(kinds) / (4 if kind in MIXTURES else 2) / len(WIDTHS))):
            each = bench.begin()
            if bench.run(each):  # accused: the step again, in which the host judges
                bench.run(each)
        counted = bench.mover.report.to_dict()["arithmetic"]
        sides = [side for product in bench.checks._products for side in product.sides.values()]
        largest = max(side.largest for side in sides)
        found[kind] = {
            "checks": counted["residuals"],
            "accused": counted["disagreements"],
            "cleared": counted["cleared"],
            "largest": largest,
            "microseconds": 1e6 * (time.process_time() - begun) / counted["residuals"],
        }
        rows.append([kind, counted["residuals"], counted["disagreements"], counted["cleared"], f"{largest:.3g}"])
        bench.close()
    print_table(["kind", "checks", "wrongly accused", "cleared by the host", "largest residual / bound"], rows)
    return {"clean": found}


WAYS: dict[str, Figures] = {
    "float32": {"dtype": "float32", "bf16": False},
    "bf16": {"bf16": True},
    "fp16": {"dtype": "float16", "bf16": False},
    "NF4": {"load_in_4bit": True},
    "int8": {"load_in_8bit": True},
    "dropout": {"lora_dropout": 0.2},
    "packing": {"packing": True},
    "checkpointing": {"gradient_checkpointing": True},
    "recomputation": {"gradient_checkpointing": True, "recompute_layers": "1,1"},
    "streaming": {"stream_weights": 1},
    "outliers": {"packing": True, "max_length": 256, "per_device_train_batch_size": 4},
}
"""Settings of a run, on top of bfloat16 autocast with a float32 base."""


def with_outliers(model: Path, copy: Path) -> Path:
    """A model whose norms give two features thirty times the size of the others."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, copy)
    for file in copy.glob("*.safetensors"):
        weights = load_file(file)
        for name, weight in weights.items():
            if ("norm" in name or "ln_" in name) and name.endswith("weight") and weight.shape == (64,):
                weight[[3, 17]] = 30.0
        save_file(weights, file, {"format": "pt"})
    return copy


def runs(steps: int, seed: int) -> Figures:
    """Clean runs of the real command line: no product, attention call or replay is accused."""
    from tests import tiny
    from tests.e2e.command import CommandServer
    from tests.e2e.conftest import flags

    found: dict[str, Any] = {}
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        data = tiny.write_dataset_dir(root / "data", train=48, test=4)
        server = CommandServer(root / "server")
        for arch in tiny.ARCHITECTURES:
            plain = tiny.build(arch, root / "models")
            for way, settings in WAYS.items():
                model = with_outliers(plain, root / "models" / f"{arch}-outliers") if way == "outliers" else plain
                out = root / f"{arch}-{way}"
                common = {
                    "model_name_or_path": model, "dataset_name": data, "output_dir": out, "seed": seed,
                    "max_steps": steps, "per_device_train_batch_size": 2, "max_length": 128, "disable_tqdm": True,
                    "save_strategy": "no", "check_arithmetic": "every", "doctor": "off", "logging_steps": steps,
                }  # fmt: skip
                result = server.run(*flags(**common | settings))
                if result.code:
                    found[f"{arch}, {way}"] = {"code": result.code, "error": result.error_lines[-1:]}
                    continue
                report = json.loads((out / "transfer_report.json").read_text())
                counted = report["arithmetic"]
                names = ("residuals", "replays", "attention", "disagreements", "cleared", "deterministic", "refusal")
                found[f"{arch}, {way}"] = {name: counted[name] for name in names}
        server.close()
    for way in WAYS:
        each = [row for name, row in found.items() if name.endswith(f", {way}")]
        ran = [row for row in each if "code" not in row]
        counts = [
            sum(row[name] for row in ran) for name in ("residuals", "replays", "attention", "disagreements", "cleared")
        ]
        rows.append([way, f"{len(ran)} of {len(each)}", *counts])
    print_table(["way", "architectures", "checks", "replays", "attention", "wrongly accused", "cleared"], rows)
    return {"runs": found}


def faults(kinds: Sequence[str], runs: int, seed: int) -> Figures:
    """Wrong products in forward and backward, each at a random place."""
    from tests.train.faulty_products import ANOTHER, DEQUANTISED, Faults
    from tests.train.faulty_products import KINDS as HARMS

    found: dict[str, dict[str, Counter[str]]] = {}
    for kind in (each for each in kinds if each not in ("float16", "int8")):
        bench = Bench(kind, seed)
        bound = 8.5 * torch.finfo(bench.dtype).eps / 2
        for name in HARMS:
            for side in ("forward", "backward"):
                if name == DEQUANTISED and "nf4" not in kind:
                    continue
                if name == ANOTHER and (kind not in MIXTURES or "nf4" in kind):
                    continue
                counts: Counter[str] = Counter()
                for run in range(runs):
                    each = bench.begin()
                    first, x, gradient = each[0]
                    rows = 256 if kind in MIXTURES else 64  # 64 of an expert, on average
                    each[0] = (first, bench._draw(rows, x.shape[1]), bench._draw(rows, gradient.shape[1]))
                    strength = 1.0 if run % 2 or name in WHOLE else 10 ** -(3 * run / runs)
                    where: dict[str, Any] = {"first": int(side == "backward")}
                    if name == DEQUANTISED:
                        where["first"] *= 8
                    elif kind in MIXTURES:
                        where = {"shape": ((64, 256), (128, 64)) if side == "forward" else ((64, 128), (256, 64))}
                        where["shape"] = where["shape"][run // 2 % 2]
                    harm = Faults(kind=name, count=1, seed=run, strength=strength, **where)
                    verdict = bench.run(each, harm)
                    size = harm.relative / bound
                    bucket = next(name for name, end in SIZES.items() if size <= end or end == math.inf)
                    counts[f"{bucket} {'found' if verdict else 'missed'}"] += 1
                    if verdict:
                        bench.run(each)
                found.setdefault(kind, {})[f"{name}, {side}"] = counts
        bench.close()
    rows = [
        [kind, name, sum(n for key, n in counts.items() if "found" in key), dict(sorted(counts.items()))]
        for kind, by_name in found.items()
        for name, counts in by_name.items()
    ]
    print_table(["dtype", "fault", f"found of {runs}", "by the error over the bound, both over the row's norm"], rows)
    return {"faults": {kind: {name: dict(counts) for name, counts in rest.items()} for kind, rest in found.items()}}


class AfterEachStep:
    """What ``look`` gives after each step of a training."""

    def __init__(self, trainer: Any, look: Callable[[], Any]) -> None:
        from transformers import TrainerCallback

        self.rows = rows = []  # type: list[Any]

        class Looking(TrainerCallback):
            """Looks."""

            def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
                rows.append(look())

        trainer.add_callback(Looking())


def trainers(arch: str, length: int, batch: int, scratch: Path, **options: Any) -> Callable[[str], Any]:
    """Makes a trainer of a small model, with rows of this length, by the mode of its checks."""
    from datasets import Dataset

    from tests import tiny
    from tests.train.trainers import VerifiedSFT, build

    model = tiny.build(arch, scratch)
    tokens = torch.randint(5, 500, (256, length), generator=torch.Generator().manual_seed(1)).tolist()
    data = Dataset.from_list([{"input_ids": row, "labels": row} for row in tokens])
    settings = {"per_device_train_batch_size": batch, "logging_steps": 100, **options}

    def make(mode: str) -> Any:
        ours = {"consent_unverified": True, "check_arithmetic": mode, "sentinel_every": 0}
        return build(VerifiedSFT, model, data, scratch / "out", ours=ours, **settings)

    return make


ARCHITECTURES = {"llama3": "", "qwen3_moe": " of a mixture"}


def cost(repeats: int) -> Figures:
    """CPU seconds of steps without a replay, by mode in turn, and the estimate for Llama 3.1 8B."""
    from hf_rocm_tune.train.arithmetic import SHARE, share_of_step
    from hf_rocm_tune.train.replay import EVERY

    attention = [(2048, 4096), (2048, 512), (2048, 512), (4096, 2048)]
    experts = [(2048, 1536), (768, 2048)]  # Qwen3-30B-A3B, 8 of 128
    of_mixture = share_of_step((attention + experts) * 48, [0, 0, 0, 0, 8, 8] * 48)
    whole = share_of_step(LLAMA_8B)
    at_once = max(1, int(min(1.0, SHARE / whole) * len(LLAMA_8B)))
    share = {"all": whole, "layers_a_step": at_once, "sampled": whole * at_once / len(LLAMA_8B), "replays": 1 / EVERY}
    found: Figures = {
        "llama_8b": share,
        "qwen3_30b_a3b": {"all": of_mixture, "layers_a_step": SHARE / of_mixture * 288},
    }
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for arch, name, length, batch, steps in (
            (arch, name + more, *of)
            for arch, more in ARCHITECTURES.items()
            for name, *of in (("short steps", 32, 4, 60), ("long steps", 256, 64, 9))
        ):
            make = trainers(arch, length, batch, Path(scratch), max_steps=steps)
            seconds: dict[str, list[float]] = {"off": [], "sampled": [], "every": []}
            begin: dict[str, list[float]] = {mode: [] for mode in seconds}
            wall = []
            for _ in range(repeats):
                for mode in seconds:
                    trainer = make(mode)
                    begun = time.process_time()
                    looked = AfterEachStep(trainer, lambda: (time.process_time(), time.perf_counter()))
                    trainer.train()
                    (early, clock), (late, end) = looked.rows[2], looked.rows[-1]
                    seconds[mode].append((late - early) / (steps - 3))
                    begin[mode].append(early - begun)
                    wall.append((end - clock) / (steps - 3))
            middle = {mode: statistics.median(each) for mode, each in seconds.items()}
            found[name] = {
                "cpu_seconds_a_step": seconds,
                "cpu_seconds_to_the_third_step": begin,
                "median": middle,
                "steps_a_second": 1 / statistics.median(wall),
            }
            rows.append(
                [name, *(f"{1e3 * each:.1f}" for each in middle.values()), f"{1 / statistics.median(wall):.1f}"]
            )
    print_table(["", "off, CPU ms a step", "sampled", "every", "steps a second"], rows)
    print(
        f"Llama 3.1 8B: all products {whole:.1%} of their time, sampled {share['sampled']:.2%}, "
        f"replays {1 / EVERY:.2%}; "
        f"Qwen3-30B-A3B: all {of_mixture:.1%}, {SHARE / of_mixture * 288:.1f} of 288 products a step"
    )
    return {"cost": found}


def launches() -> Figures:
    """Kernels, waits and bytes of a step on the simulated card, by mode; the third one has a replay."""
    counts = sys.modules["simcard"].counts
    names = {"kernels": ("kernels_async", "kernels_sync"), "waits": ("waits",), "bytes read": ("to_host_bytes",)}
    found: dict[str, Any] = {"products checked": {}}
    with tempfile.TemporaryDirectory() as scratch:
        for arch, more in ARCHITECTURES.items():
            make = trainers(arch, 32, 2, Path(scratch), max_steps=8, use_cpu=False)
            for mode in ("off", "sampled", "every"):
                trainer = make(mode)
                looked = AfterEachStep(trainer, counts)
                trainer.train()
                pairs = list(zip(looked.rows, looked.rows[1:], strict=False))
                for name, at in (("a step", slice(4, 7)), ("the third step", slice(1, 2))):
                    found.setdefault(name + more, {})[mode] = {
                        title: statistics.median(
                            sum(after[each] - before[each] for each in of) for before, after in pairs[at]
                        )
                        for title, of in names.items()
                    }
                counted = trainer.transfer_report.to_dict()["arithmetic"]
                found["products checked"][mode + more] = counted["checked"]
    rows = [
        [name, mode, *figures.values()]
        for name in found
        if name != "products checked"
        for mode, figures in found[name].items()
    ]
    print_table(["", "mode", "kernels", "waits", "bytes read"], rows)
    return {"launches": found}


def run(wanted: Namespace) -> Figures:
    torch.set_num_threads(1)
    logging.getLogger("hf_rocm_tune").setLevel(logging.ERROR)  # each fault found is a warning
    kinds = [each for each in KINDS if wanted.kinds in each]
    if wanted.part == "clean":
        return clean(kinds, wanted.checks, wanted.seed)
    if wanted.part == "launches":
        return launches()
    if wanted.part == "runs":
        return runs(wanted.steps, wanted.seed)
    return faults(kinds, wanted.runs, wanted.seed) if wanted.part == "faults" else cost(wanted.repeats)


if __name__ == "__main__":
    main(
        run,
        __doc__,
        {
            "part": {"choices": ("clean", "runs", "faults", "cost", "launches"), "required": True},
            "kinds": {"default": "", "help": "clean, faults: only kinds with this in their names"},
            "checks": {"type": int, "default": 20_000, "help": "clean: how many products"},
            "steps": {"type": int, "default": 120, "help": "runs: of each"},
            "runs": {"type": int, "default": 200, "help": "faults: products of each kind"},
            "repeats": {"type": int, "default": 5, "help": "cost: runs of each mode"},
            "seed": {"type": int, "default": 0},
        },
    )
