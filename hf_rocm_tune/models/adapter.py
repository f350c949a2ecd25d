"""Adapters: LoRA targets checked against the model, plain LoRA from PiSSA and OLoRA, learning rates by parameter."""

from __future__ import annotations

import re
import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_rocm_tune import upstream
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.models.experts import experts_of, routers_of
from hf_rocm_tune.models.quantised import linear_in_name_only

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from peft import PeftModel
    from torch import Tensor

    from hf_rocm_tune.transfer import Mover

ALL_LINEAR = "all-linear"
_SHOWN = 24
_TAKEN_FOR_EXPERTS = {"gate", "w1", "w2", "w3", "gate_proj", "up_proj", "down_proj"}


def target_names(targets: str | Iterable[str] | None) -> str | Iterable[str] | None:
    """The targets of :class:`trl.ModelConfig`, a single module name as a set.

    TRL unwraps a list of one into a string, which PEFT reads as a regular expression on whole names.
    """
    return {targets} if isinstance(targets, str) and re.fullmatch(r"[\w.]+", targets) else targets


def check_targets(model: nn.Module, targets: str | Iterable[str] | None, *, saved: Iterable[str] | None = None) -> None:
    """Checks that each LoRA target, and each module to train whole, names at least one module of the model."""
    names = [name for name, _ in model.named_modules() if name]
    if absent := [each for each in saved or () if not any(name.endswith(each) for name in names)]:
        kinds = ", ".join(dict.fromkeys(last for name in names if not (last := name.rpartition(".")[2]).isdigit()))
        raise UsageError(
            f"--lora_modules_to_save: {', '.join(absent)} match no module of {type(model).__name__}; it has {kinds}"
        )
    if targets is None or targets == ALL_LINEAR:
        return
    if isinstance(targets, str):
        try:
            missing = [] if any(re.fullmatch(targets, name) for name in names) else [targets]
        except re.error as error:
            raise UsageError(f"--lora_target_modules {targets!r} is not a regular expression: {error}") from error
    else:
        missing = [each for each in targets if not any(f".{name}".endswith(f".{each}") for name in names)]
    if missing:
        found = ", ".join(adaptable(model)[:_SHOWN])
        raise UsageError(
            f"--lora_target_modules: {', '.join(missing)} match no module of {type(model).__name__}; it has {found} "
            "(or give all-linear)"
        )


def beside_experts(model: nn.Module, targets: str | Iterable[str] | None) -> str | Iterable[str] | None:
    """The targets; of a model with experts or with layers in `kept_out`, ``all-linear`` as the names of the others."""
    if targets != ALL_LINEAR:
        return targets
    kept = kept_out(model)
    # PEFT adapts experts for "all-linear" where they are parameters, too, and not only linear layers
    if not kept and not any(True for _ in experts_of(model)):
        return targets
    names = {name for each in kept.values() for name in each}
    return _named_alone(model, [name for name in adaptable(model) if name not in names])


def _named_alone(model: nn.Module, names: list[str]) -> list[str]:
    """The names; instead of one that other layers have as well, the paths of the linear layers that have it."""
    linear: dict[str, list[str]] = {name: [] for name in names}
    others = set()
    for path, module in model.named_modules():
        last = _last_name(path)
        if last not in linear:
            continue
        if isinstance(module, nn.Linear | Conv1D):
            linear[last].append(path)
        else:
            others.add(last)
    return [each for name in names for each in (linear[name] if name in others else [name])]


def kept_out(model: nn.Module) -> dict[str, list[str]]:
    """Names of linear layers that ``all-linear`` has no adapters on, by the kind of layer that has them.

    ``experts``: PEFT would adapt experts and routers too, gigabytes of adapters; names that PEFT 0.21 takes for experts
    are among them. ``state space``: the fused kernels of Mamba-like layers read the weights themselves, so that an
    adapter would be trained and never used, and PEFT refuses some. ``indexer``: an attention's choice of tokens,
    through which no gradient comes. ``other product``: see `linear_in_name_only`.
    """
    kinds: dict[str, set[str]] = {"experts": set(), "state space": set(), "indexer": set(), "other product": set()}
    kinds["other product"] |= {_last_name(name) for name in linear_in_name_only(model)}
    if any(True for _ in experts_of(model)):
        kinds["experts"] = _TAKEN_FOR_EXPERTS | {name.rpartition(".")[2] for name in routers_of(model)}
    for name, module in model.named_modules():
        if hasattr(module, "A_log") and hasattr(module, "D"):  # gated delta networks have no D, and call their layers
            kinds["state space"] |= {each for each in _READ_BY_KERNELS if hasattr(module, each)}
        if name.rpartition(".")[2] == "indexer":
            kinds["indexer"] |= {each for each, inner in module.named_children() if isinstance(inner, nn.Linear)}
    there = adaptable(model)
    found = {kind: [name for name in there if name in names] for kind, names in kinds.items()}
    return {kind: names for kind, names in found.items() if names}


_READ_BY_KERNELS = ("out_proj", "x_proj", "dt_proj")


def adaptable(model: nn.Module) -> list[str]:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    counts: Counter[str] = Counter()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and module is not head:
            counts[_last_name(name)] += 1
    return [name for name, _ in counts.most_common()]


def _last_name(path: str) -> str:
    """The last part of a layer's name, as PEFT takes it; a number with what it is a part of: ``0`` is any list's."""
    *before, last = path.split(".")
    return f"{before[-1]}.{last}" if last.isdigit() and before else last


def trainable_parameters(model: nn.Module) -> tuple[int, int]:
    """Number of trainable parameters and of all parameters; packed 4-bit weights count unpacked."""
    trainable = total = 0
    for parameter in model.parameters():
        count = (getattr(parameter, "quant_state", None) or parameter).shape.numel()
        total += count
        trainable += count if parameter.requires_grad else 0
    return trainable, total


def plain_lora(trained: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The equivalent LoRA on the original weights, of twice the rank: W + BA - B0 A0 = W + [B | -B0] [A ; A0].

    Checks what `write_plain_lora` wrote through PEFT's `LoraModel.subtract_mutated_init`.
    """
    found = {}
    for name, tensor in trained.items():
        begun, of_a = start[name], ".lora_A." in name
        found[name] = torch.cat([tensor, begun if of_a else -begun], dim=0 if of_a else 1)
    return found


def write_plain_lora(model: PeftModel, directory: Path, start: Mapping[str, Tensor], mover: Mover) -> None:
    """Writes a model's adapter and its configuration as plain LoRA on the original weights, by PEFT's conversion."""
    training = model.training
    with tempfile.TemporaryDirectory(prefix="hf-rocm-tune-") as scratch, mover.copies_as("adapter"):
        (begun := Path(scratch) / "start").mkdir()
        save_file(dict(start), begun / "adapter_model.safetensors")
        with warnings.catch_warnings():  # PiSSA does not combine with other adapters; the result is none
            warnings.filterwarnings("ignore", message=".* changes the base weights of the model")
            model.save_pretrained(str(directory), path_initial_model_for_weight_conversion=str(begun))
    model.train(training)


def keep_weights_from_vllm() -> None:
    """Have TRL send vLLM the weights with the adapter, and leave the frozen ones as they are to the last bit.

    TRL merges the adapter into the whole model and takes it out again: each time the frozen weights are rounded.
    """
    upstream.replace_for_good("vllm_weights", _with_adapter)


def _with_adapter(stock: Callable[..., Iterator[tuple[str, Tensor]]]) -> Callable[..., Iterator[tuple[str, Tensor]]]:
    def weights(self: Any) -> Iterator[tuple[str, Tensor]]:
        if not hasattr(self.model, "peft_config"):
            yield from stock(self)
            return
        for name, value in _merged(self.model):
            plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
            yield self._fix_param_name_to_vllm(plain, extra_prefixes=["modules_to_save.default."]), value

    return weights


@torch.no_grad()
def _merged(model: PeftModel) -> Iterator[tuple[str, Tensor]]:
    """All weights but the adapter's, by name; those of layers with an adapter as PEFT merges them, one at a time."""
    for name, parameter in model.named_parameters():
        owner, inside, _ = name.partition(".base_layer.")
        if model.prefix in name or "original_module" in name:
            continue
        if not inside:
            yield name, parameter.data
            continue
        layer: Any = model.get_submodule(owner)
        kept = [(each, each.data) for each in layer.get_base_layer().parameters()]
        try:
            for each, value in kept:
                each.data = value.clone()
            layer.merge()
            merged = parameter.data.clone()
            layer.unmerge()
        finally:
            for each, value in kept:
                each.data = value
        yield name, merged


def share_inputs(model: nn.Module) -> int:
    """Let float32 adapters take a layer's input as it is where autocast would cast it back to the same dtype.

    PEFT casts the input of each adapter to float32, and autocast that to a bfloat16 of its own, so q, k and v each
    keep a copy for backward. Without the two casts all keep that tensor; results are the same bit for bit. Left alone
    are variants (DoRA) and dropout, which compute with the float32 input.
    """
    from peft.tuners.lora.layer import Linear

    layers: list[Any] = [module for module in model.modules() if type(module) is Linear]
    plain = [layer for layer in layers if not layer.lora_variant]
    found = [layer for layer in plain if all(isinstance(each, nn.Identity) for each in layer.lora_dropout.values())]
    for layer in found:
        layer._cast_input_dtype = MethodType(_cast_unless_autocast, layer)
    return len(found)


def _cast_unless_autocast(layer: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
    devices = ("cuda", "cpu") if x.is_meta else (x.device.type,)  # the planner counts on the meta device
    if any(torch.is_autocast_enabled(each) and torch.get_autocast_dtype(each) == x.dtype for each in devices):
        return x
    return type(layer)._cast_input_dtype(layer, x, dtype)


@dataclass(frozen=True, kw_only=True)
class LearningRates:
    lora_b: float | None = None  # of B, over ``--learning_rate`` (LoRA+, https://arxiv.org/abs/2402.12354)
    embeddings: float | None = None  # of fully trained embeddings and output head, absolute

    def split(self, model: Any, optimizer: Any) -> None:
        """Moves those parameters into groups of their own, after the others, with the same options."""
        trained = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
        special: dict[int, float] = {}
        if self.embeddings is not None:
            both = [module for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module]
            whole = [id(parameter) for module in both for parameter in module.parameters()]
            special = {each: self.embeddings for each in whole if "lora_" not in trained.get(each, "lora_")}
            if not special:
                raise UsageError(
                    "--embedding_learning_rate: neither embeddings nor output head are trained; add "
                    "--lora_modules_to_save embed_tokens lm_head (by their names in this model)"
                )
        if self.lora_b is not None:
            rate = optimizer.param_groups[0]["lr"] * self.lora_b
            special |= {each: rate for each, name in trained.items() if ".lora_B." in name}
        for group in list(optimizer.param_groups):
            for rate in sorted({special[id(p)] for p in group["params"] if id(p) in special}):
                moved = [p for p in group["params"] if special.get(id(p)) == rate]
                optimizer.param_groups.append({**group, "params": moved, "lr": rate})
            group["params"] = [p for p in group["params"] if id(p) not in special]
