"""A layer computed again on the host (`train/arithmetic/layers`): right ones that are accused, wrong ones that are not.

clean   trainings of small versions of many architectures in all ways of computing: none may be accused
faults  kernels that are wrong in every call: SiLU, ReLU, norms, attention backward, LoRA's products, rotary embeddings
cost    CPU seconds of the whole training with and without, interleaved; on the simulated card what it counts

python benchmarks/host_layers.py --parts clean --json FILE
SIMCARD=1 PYTHONPATH=$PWD:$PWD/tests/simcard/boot python benchmarks/host_layers.py --device cuda --parts clean
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from common import Figures, main, print_table

import torch  # isort: skip
from torch import Tensor  # isort: skip
from torch.utils._python_dispatch import TorchDispatchMode  # isort: skip

TYPES = (
    "llama", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi3", "smollm3", "olmo2", "gpt2", "gpt_neox",
    "qwen2", "qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3", "granite", "cohere2", "glm4", "falcon", "opt", "bloom",
    "starcoder2", "stablelm", "exaone4", "qwen3_next", "lfm2", "mamba2", "nemotron", "phi",
)  # fmt: skip
WAYS = ("float32", "bf16", "bfloat16", "float16", "nf4", "int8", "all", "all bf16")
LENGTH, STEPS = 64, 2


def prepared(model_type: str, way: str, folder: Path, device: str) -> Any:
    """A trainer for a small version of an architecture, and its model in this way."""
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
    import small_versions

    from tests import tiny
    from tests.train.trainers import VerifiedPlain, build

    model = folder / model_type
    if model_type in tiny.ARCHITECTURES:  # whose small version of all sizes divided has rows of odd lengths, gpt-oss'
        model = tiny.build(model_type, folder)
    elif not model.is_dir():
        small_versions.build(model_type, "causal", model, tiny.build_tokenizer())
    how: Figures = {"dtype": {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(way, torch.float32)}
    if way == "nf4":
        how = {
            "dtype": torch.bfloat16,
            "quantization_config": BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
            ),
        }
    elif way == "int8":
        how = {"dtype": torch.float16, "quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, **how)
    if not way.startswith("all"):
        loaded = get_peft_model(loaded, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    tokens = torch.randint(5, 500, (16, LENGTH), generator=torch.Generator().manual_seed(1)).tolist()
    rows = Dataset.from_list([{"input_ids": row, "labels": row} for row in tokens])
    options = {"bf16": way in ("bf16", "nf4", "all bf16"), "use_cpu": device == "cpu", "max_steps": STEPS}
    ours = {"consent_unverified": True, "check_arithmetic": "every"}  # on a processor only this mode has it
    return build(VerifiedPlain, loaded, rows, folder / "out", ours=ours, **options)


def outcome(trainer: Any) -> Figures:
    """What the check said of a training: its sentence, or the report's rows."""
    from hf_rocm_tune.errors import TuneError

    try:
        trainer.train()
    except TuneError as error:
        return {"ended": str(error)}
    except Exception as error:  # an architecture that does not train so
        return {"failed": f"{type(error).__name__}: {error}"[:200]}
    finally:
        trainer.mover.close()
    said = trainer.describe()["arithmetic"]
    counted = trainer.transfer_report.to_dict()["arithmetic"]
    return {
        "layers": said["host_layers"],
        "refusal": said["host_layers_refusal"],
        "disagreements": counted["disagreements"],
    }


def clean(types: list[str], ways: list[str], device: str, folder: Path) -> list[Figures]:
    rows = []
    for model_type in types:
        for way in ways:
            try:
                found = outcome(prepared(model_type, way, folder, device))
            except Exception as error:
                found = {"failed": f"{type(error).__name__}: {error}"[:200]}
            rows.append({"type": model_type, "way": way, **found})
            print(json.dumps(rows[-1], default=str), flush=True)
    return rows


# ---- wrong kernels --------------------------------------------------------------------------------------------------


class Wrong(TorchDispatchMode):
    """Within the block, in this thread, each result of these operators is wrong; below autograd, as a kernel would be.

    ``harms``: what is done to a result, given the arguments; False: it stays right.
    """

    def __init__(self, names: tuple[str, ...], harm: Callable[[Tensor, Any], Any]) -> None:
        super().__init__()
        self._names, self._harm = names, harm

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        if name.removeprefix("aten::") in self._names:
            first = result[0] if isinstance(result, tuple) else result
            self._harm(first, args)
        return result


def _of_adapter(harm: Callable[[Tensor], Any]) -> Callable[[Tensor, Any], None]:
    def harmed(result: Tensor, args: Any) -> None:
        if any(isinstance(each, Tensor) and each.dim() == 2 and 4 in each.shape for each in args):  # the rank
            harm(result)

    return harmed


def _scaled(factor: float) -> Callable[..., Any]:
    return lambda result, *_: result.mul_(factor)


def _tile(result: Tensor, *_: Any) -> None:
    result.view(-1)[: result.numel() // 16].mul_(2)


_FLASH = (
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_fused_attention_overrideable_backward",
)
FAULTS: dict[str, tuple[tuple[str, ...], Callable[[float], Callable[[Tensor, Any], Any]]]] = {
    "SiLU": (("silu",), _scaled),
    "SiLU's backward": (("silu_backward",), _scaled),
    "SiLU, a tile": (("silu",), lambda _: _tile),
    "RMSNorm": (("rsqrt",), _scaled),
    "attention's backward": (_FLASH, _scaled),
    "LoRA's products": (("mm", "addmm", "bmm"), lambda factor: _of_adapter(_scaled(factor))),
    "rotary embedding": (("neg",), _scaled),
    "ReLU": (("relu",), _scaled),
    "ReLU's backward": (("threshold_backward",), _scaled),
    "ReLU lets a tenth of what is negative pass": (
        ("relu",),
        lambda _: lambda result, args: result.add_(args[0].clamp(max=0), alpha=0.1),
    ),
}
TYPE_OF = {kind: "opt" for kind in FAULTS if kind.startswith("ReLU")}
"""What is trained, if it is no Llama."""


def faults(kinds: list[str], ways: list[str], strengths: list[float], seeds: int, folder: Path) -> list[Figures]:
    """Of each kernel and way: how many of these runs ended, and how many were accepted."""
    rows = []
    for kind in kinds:
        for way in ways:
            for strength in strengths:
                row: Figures = {"kernel": kind, "way": way, "strength": strength, "ended": 0, "silent": 0, "failed": 0}
                for seed in range(seeds):
                    factor = 1 + strength * random.Random(seed).choice((-1, 1))
                    names, harm = FAULTS[kind]
                    torch.manual_seed(seed)
                    with Wrong(names, harm(factor)):
                        found = outcome(prepared(TYPE_OF.get(kind, "llama"), way, folder, "cpu"))
                    name = "ended" if "ended" in found else "failed" if "failed" in found else "silent"
                    row[name] += 1
                rows.append(row)
                print(json.dumps(row), flush=True)
    return rows


# ---- cost -----------------------------------------------------------------------------------------------------------


@contextmanager
def without() -> Iterator[None]:
    from hf_rocm_tune.train.arithmetic.layers import HostLayers

    stock = HostLayers.prepare
    HostLayers.prepare = lambda self, changed: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        HostLayers.prepare = stock  # type: ignore[method-assign]


COUNTED = {"kernels": ("kernels_async", "kernels_sync"), "waits": ("waits",), "bytes read": ("to_host_bytes",)}


def cost(pairs: int, ways: list[str], device: str, folder: Path) -> Figures:
    """CPU seconds, all threads, of two steps of a small Llama with and without; on the simulated card its counts."""
    found: Figures = {}
    for way in ways:
        seconds: dict[bool, list[float]] = {True: [], False: []}
        counted: dict[bool, Figures] = {}
        for _ in range(pairs):
            for on in (True, False):
                trainer = prepared("llama", way, folder, device)
                counts = dict(sys.modules["simcard"].counts()) if device == "cuda" else {}
                with nullcontext() if on else without():
                    begun = time.process_time()
                    outcome(trainer)
                    seconds[on].append(time.process_time() - begun)
                after = dict(sys.modules["simcard"].counts()) if device == "cuda" else {}
                counted[on] = {
                    name: sum(after[each] - counts[each] for each in of) for name, of in COUNTED.items() if after
                }
        added = {name: counted[True][name] - counted[False][name] for name in counted[True]}
        found[way] = {"on": statistics.median(seconds[True]), "off": statistics.median(seconds[False]), "added": added}
        print(way, found[way], flush=True)
    return found


def run(wanted: argparse.Namespace) -> Figures:
    logging.disable(logging.WARNING)
    found: Figures = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = wanted.models or Path(scratch)
        if "clean" in wanted.parts:
            found["clean"] = clean(wanted.types, wanted.ways, str(wanted.device.type), folder)
        if "faults" in wanted.parts:
            rows = faults(wanted.kernels, wanted.ways, wanted.strengths, wanted.seeds, folder)
            found["faults"] = rows
            print_table(list(rows[0]), [list(row.values()) for row in rows])
        if "cost" in wanted.parts:
            found["cost"] = cost(wanted.seeds, wanted.ways, str(wanted.device.type), folder)
    return found


if __name__ == "__main__":
    main(
        run,
        __doc__,
        {
            "parts": {"nargs": "+", "choices": ["clean", "faults", "cost"], "default": ["clean"]},
            "types": {"nargs": "+", "default": list(TYPES), "metavar": "TYPE", "help": "model types of transformers"},
            "ways": {"nargs": "+", "choices": WAYS, "default": list(WAYS)},
            "kernels": {"nargs": "+", "choices": list(FAULTS), "default": list(FAULTS)},
            "strengths": {"nargs": "+", "type": float, "default": [0.05, 0.2]},
            "seeds": {"type": int, "default": 10, "help": "runs of each fault, or pairs for the cost"},
            "models": {"type": Path, "help": "where small versions are kept"},
        },
    )
