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
from hf_rocm_tune.models.own_head import output_head
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
    if isinstance(targets, str) and re.fullmatch(r"[\w.]+", targets):
        return {targets}
    return targets


def check_targets(model: nn.Module, targets: str | Iterable[str] | None, *, saved: Iterable[str] | None = None) -> None:
    """Checks that each LoRA target, and each module to train whole, names at least one module of the model."""
    names = [name for name, _ in model.named_modules() if name]
    _check_saved(model, names, saved or ())
    if targets is None or targets == ALL_LINEAR:
        return
    if isinstance(targets, str):
        missing = []
        if not _matches_any(targets, names):
            missing = [targets]
    else:
        missing = [target for target in targets if not any(f".{name}".endswith(f".{target}") for name in names)]
    if missing:
        known = ", ".join(adaptable(model)[:_SHOWN])
        raise UsageError(
            f"--lora_target_modules: {', '.join(missing)} match no module of {type(model).__name__}; it has {known} "
            "(or give all-linear)"
        )


def _check_saved(model: nn.Module, names: list[str], saved: Iterable[str]) -> None:
    absent = [module for module in saved if not any(name.endswith(module) for name in names)]
    if not absent:
        return
    kinds: list[str] = []
    for name in names:
        last = name.rpartition(".")[2]
        if not last.isdigit() and last not in kinds:
            kinds.append(last)
    raise UsageError(
        f"--lora_modules_to_save: {', '.join(absent)} match no module of {type(model).__name__}; it has "
        f"{', '.join(kinds)}"
    )


def _matches_any(pattern: str, names: list[str]) -> bool:
    try:
        return any(re.fullmatch(pattern, name) for name in names)
    except re.error as error:
        raise UsageError(f"--lora_target_modules {pattern!r} is not a regular expression: {error}") from error


def beside_experts(model: nn.Module, targets: str | Iterable[str] | None) -> str | Iterable[str] | None:
    """The targets; of a model with experts or with layers in `kept_out`, ``all-linear`` as the names of the others."""
    if targets != ALL_LINEAR:
        return targets
    kinds = kept_out(model)
    # PEFT adapts experts for "all-linear" where they are parameters, too, and not only linear layers; and the output
    # head where a model does not name it itself
    names_head = getattr(model, "get_output_embeddings", lambda: None)() is output_head(model)
    if not kinds and not _has_experts(model) and names_head:
        return targets
    kept: set[str] = set()
    for names in kinds.values():
        kept.update(names)
    return _named_alone(model, [name for name in adaptable(model) if name not in kept])


def _has_experts(model: nn.Module) -> bool:
    return any(True for _ in experts_of(model))


def _named_alone(model: nn.Module, names: list[str]) -> list[str]:
    """The names; instead of one that other layers have as well, the paths of the linear layers that have it."""
    linear: dict[str, list[str]] = {name: [] for name in names}
    ambiguous = set()
    for path, module in model.named_modules():
        last = _last_name(path)
        if last not in linear:
            continue
        if isinstance(module, nn.Linear | Conv1D):
            linear[last].append(path)
        else:
            ambiguous.add(last)
    targets: list[str] = []
    for name in names:
        if name in ambiguous:
            targets += linear[name]
        else:
            targets.append(name)
    return targets


def kept_out(model: nn.Module) -> dict[str, list[str]]:
    """Names of linear layers that ``all-linear`` has no adapters on, by the kind of layer that has them.

    ``experts``: PEFT would adapt experts and routers too, gigabytes of adapters; names that PEFT 0.21 takes for experts
    are among them. ``state space``: the fused kernels of Mamba-like layers read the weights themselves, so that an
    adapter would be trained and never used, and PEFT refuses some. ``indexer``: an attention's choice of tokens,
    through which no gradient comes. ``other product``: see `linear_in_name_only`.
    """
    of_experts: set[str] = set()
    if _has_experts(model):
        of_experts = _TAKEN_FOR_EXPERTS | {name.rpartition(".")[2] for name in routers_of(model)}
    state_space: set[str] = set()
    indexer: set[str] = set()
    for name, module in model.named_modules():
        if hasattr(module, "A_log") and hasattr(module, "D"):  # gated delta networks have no D, and call their layers
            state_space |= {read for read in _READ_BY_KERNELS if hasattr(module, read)}
        if name.rpartition(".")[2] == "indexer":
            indexer |= {child for child, inner in module.named_children() if isinstance(inner, nn.Linear)}
    other = {_last_name(name) for name in linear_in_name_only(model)}
    kept: dict[str, list[str]] = {}
    names_of_model = adaptable(model)
    kinds = {"experts": of_experts, "state space": state_space, "indexer": indexer, "other product": other}
    for kind, names in kinds.items():
        present = [name for name in names_of_model if name in names]
        if present:
            kept[kind] = present
    return kept


_READ_BY_KERNELS = ("out_proj", "x_proj", "dt_proj")


def adaptable(model: nn.Module) -> list[str]:
    """Names of the linear layers that can have adapters, the most frequent first; not of the output head."""
    head = output_head(model)
    counts: Counter[str] = Counter()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and module is not head:
            counts[_last_name(name)] += 1
    return [name for name, _ in counts.most_common()]


def _last_name(path: str) -> str:
    """The last part of a layer's name, as PEFT takes it; a number with what it is a part of: ``0`` is any list's."""
    *before, last = path.split(".")
    if last.isdigit() and before:
        return f"{before[-1]}.{last}"
    return last


def trainable_parameters(model: nn.Module) -> tuple[int, int]:
    """Number of trainable parameters and of all parameters; packed 4-bit weights count unpacked."""
    trainable = total = 0
    for parameter in model.parameters():
        unpacked = getattr(parameter, "quant_state", None) or parameter
        count = unpacked.shape.numel()
        total += count
        if parameter.requires_grad:
            trainable += count
    return trainable, total


def plain_lora(trained: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The equivalent LoRA on the original weights, of twice the rank: W + BA - B0 A0 = W + [B | -B0] [A ; A0].

    Checks what `write_plain_lora` wrote through PEFT's `LoraModel.subtract_mutated_init`.
    """
    plain = {}
    for name, tensor in trained.items():
        if ".lora_A." in name:
            plain[name] = torch.cat([tensor, start[name]], dim=0)
        else:
            plain[name] = torch.cat([tensor, -start[name]], dim=1)
    return plain


def write_plain_lora(model: PeftModel, directory: Path, start: Mapping[str, Tensor], mover: Mover) -> None:
    """Writes a model's adapter and its configuration as plain LoRA on the original weights, by PEFT's conversion."""
    training = model.training
    with tempfile.TemporaryDirectory(prefix="hf-rocm-tune-") as scratch, mover.copies_as("adapter"):
        start_directory = Path(scratch) / "start"
        start_directory.mkdir()
        save_file(dict(start), start_directory / "adapter_model.safetensors")
        with warnings.catch_warnings():  # PiSSA does not combine with other adapters; the result is none
            warnings.filterwarnings("ignore", message=".* changes the base weights of the model")
            model.save_pretrained(str(directory), path_initial_model_for_weight_conversion=str(start_directory))
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
        originals = [(weight, weight.data) for weight in layer.get_base_layer().parameters()]
        try:
            for weight, value in originals:
                weight.data = value.clone()
            layer.merge()
            merged = parameter.data.clone()
            layer.unmerge()
        finally:
            for weight, value in originals:
                weight.data = value
        yield name, merged


def share_inputs(model: nn.Module) -> int:
    """Let float32 adapters take a layer's input as it is where autocast would cast it back to the same dtype.

    PEFT casts the input of each adapter to float32, and autocast that to a bfloat16 of its own, so q, k and v each
    keep a copy for backward. Without the two casts all keep that tensor; results are the same bit for bit. Left alone
    are variants (DoRA) and dropout, which compute with the float32 input.
    """
    from peft.tuners.lora.layer import Linear

    changed = 0
    layer: Any
    for layer in model.modules():
        if type(layer) is not Linear or layer.lora_variant:
            continue
        if all(isinstance(dropout, nn.Identity) for dropout in layer.lora_dropout.values()):
            layer._cast_input_dtype = MethodType(_cast_unless_autocast, layer)
            changed += 1
    return changed


def _cast_unless_autocast(layer: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
    devices = [x.device.type]
    if x.is_meta:  # the planner's, which stands for either
        devices = ["cuda", "cpu"]
    for device in devices:
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == x.dtype:
            return x
    return type(layer)._cast_input_dtype(layer, x, dtype)


@dataclass(frozen=True, kw_only=True)
class LearningRates:
    lora_b: float | None = None  # a factor of ``--learning_rate``, for B (LoRA+, https://arxiv.org/abs/2402.12354)
    embeddings: float | None = None  # a rate, for embeddings and the output head that are trained whole

    def split(self, model: Any, optimizer: Any) -> None:
        """Moves the parameters that have a rate of their own into new groups behind the others, options alike."""
        trained = {id(weight): name for name, weight in model.named_parameters() if weight.requires_grad}  # names by id
        rates: dict[int, float] = {}  # rates by id, of the parameters to move
        if self.embeddings is not None:
            for module in (model.get_input_embeddings(), model.get_output_embeddings()):
                if module is None:
                    continue
                for weight in module.parameters():
                    is_trained_whole = id(weight) in trained and "lora_" not in trained[id(weight)]
                    if is_trained_whole:
                        rates[id(weight)] = self.embeddings
            if not rates:
                raise UsageError(
                    "--embedding_learning_rate: neither embeddings nor output head are trained; add "
                    "--lora_modules_to_save embed_tokens lm_head (by their names in this model)"
                )
        if self.lora_b is not None:
            rate_of_b = optimizer.param_groups[0]["lr"] * self.lora_b
            for identity, name in trained.items():
                if ".lora_B." in name:
                    rates[identity] = rate_of_b
        for group in list(optimizer.param_groups):
            moved: dict[float, list[Tensor]] = {}  # by rate
            kept: list[Tensor] = []
            for weight in group["params"]:
                if id(weight) in rates:
                    moved.setdefault(rates[id(weight)], []).append(weight)
                else:
                    kept.append(weight)
            for rate in sorted(moved):
                optimizer.param_groups.append({**group, "params": moved[rate], "lr": rate})
            group["params"] = kept
