"""The model whose shapes are measured: the real architecture on the meta device, with few of its layers.

Every kind of layer is there once (dense and sparse, sliding and full ...), between the first and the last of the real
model, which are special: the first may have an input without gradient, the last is beside the head. Weights are
quantised and adapters attached by the libraries that do it in training.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.models.adapter import adaptable, check_targets, target_names
from hf_rocm_tune.models.shapes_kernels import Kernels
from hf_rocm_tune.models.shapes_quantised import quantise, state_tensors

ALL = "all-linear"

#: What foreign modelling code raises when it is given a configuration or a tensor that it cannot work with.
FOREIGN_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, kw_only=True)
class Method:
    """How a model is trained, as far as memory is concerned. Names as in TRL's ``ModelConfig``.

    Args:
        lora: adapters are trained and the model is frozen; else all weights are trained.
        four_bit: the linear layers of the frozen model are kept in 4 bits.
        nested: their quantisation constants are quantised too.
        dtype: of the weights that are not quantised, ``bfloat16``, ``float16`` or ``float32``.
        rank, alpha, dropout, targets, modules_to_save, dora, rslora: of the adapters. ``targets`` is ``all-linear``,
            a regular expression or module names.
        attention: ``sdpa`` or ``eager``.
        autocast: mixed precision in bfloat16.
    """

    lora: bool = True
    four_bit: bool = False
    nested: bool = True
    dtype: str = "bfloat16"
    rank: int = 16
    alpha: int = 32
    dropout: float = 0.05
    targets: str | tuple[str, ...] = "all-linear"
    modules_to_save: tuple[str, ...] = ()
    dora: bool = False
    rslora: bool = False
    attention: str = "sdpa"
    autocast: bool = True


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter or buffer that is there during the whole step.

    Args:
        group: ``base``, ``embeddings``, ``head``, ``adapter``, ``quantisation`` or ``buffer``.
        layer: position among the recorded layers, or -1 where it belongs to none.
        elements: what it stands for, where it is packed.
        nbytes: what it takes.
        itemsize: bytes of an element of its gradient.
        trained: whether it has a gradient and optimizer state.
    """

    group: str
    layer: int
    elements: int
    nbytes: int
    itemsize: int
    trained: bool


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A model with few layers, ready to be recorded.

    Args:
        model: on the meta device; a PEFT model where there are adapters.
        base: the causal language model itself.
        layers: its recorded layers, in order.
        layer_of: for each layer of the real model, the position of its stand-in among ``layers``.
        config: the text configuration.
        notes: what a reader of the plan should know.
        keep: one of ``KEEPS``: how its layers were kept.
        kernels: what its recordings have in common.
    """

    model: nn.Module
    base: Any
    layers: nn.ModuleList
    layer_of: tuple[int, ...]
    config: Any
    notes: tuple[str, ...]
    keep: str
    kernels: Kernels = field(default_factory=Kernels, repr=False)

    def weights(self) -> Iterator[Weight]:
        """All parameters, buffers and quantisation state of the recorded layers and of what is outside them."""
        owners = {id(tensor): index for index, layer in enumerate(self.layers) for tensor in _tensors_of(layer)}
        embeddings = {id(tensor) for tensor in _tensors_of(self.base.get_input_embeddings())}
        head = {id(tensor) for tensor in _tensors_of(self.base.get_output_embeddings())}
        for name, parameter in self.model.named_parameters():
            layer = owners.get(id(parameter), -1)
            if ".lora_" in name or "modules_to_save" in name:
                group = "adapter"
            elif id(parameter) in embeddings:
                group = "embeddings"
            else:
                group = "head" if id(parameter) in head else "base"
            state = getattr(parameter, "quant_state", None)
            yield Weight(
                group=group,
                layer=layer,
                elements=parameter.numel() if state is None else math.prod(state.shape),
                nbytes=parameter.numel() * parameter.element_size(),
                itemsize=parameter.element_size(),
                trained=parameter.requires_grad,
            )
            if state is not None:
                nbytes = sum(tensor.numel() * tensor.element_size() for tensor in state_tensors(state))
                yield Weight(group="quantisation", layer=layer, elements=0, nbytes=nbytes, itemsize=0, trained=False)
        for buffer in self.model.buffers():
            nbytes = buffer.numel() * buffer.element_size()
            layer = owners.get(id(buffer), -1)
            yield Weight(group="buffer", layer=layer, elements=0, nbytes=nbytes, itemsize=0, trained=False)


#: Ways to keep layers, to be tried in this order: few, and the configuration counts those; few, and it counts as before
#: (for models that give each layer a slice of something, or whose kinds follow from the number); all.
KEEPS = ("few", "few_counted_as_all", "all")


def build(config: Any, method: Method, *, keep: str = "few") -> Sample:
    """Builds the sample of a model.

    Args:
        config: a transformers configuration; it is not changed.
        method: how it is to be trained.
        keep: one of ``KEEPS``; the second where the first does not do.

    Raises:
        UsageError: this architecture is no causal language model of transformers, has no stack of layers that could
            be told, or refuses the method.
    """
    base = _meta_model(copy.deepcopy(config), method)
    text = text_config(base.config, decoder=True)
    layers, count = _find_layers(base, text)
    layer_of = tuple(range(len(layers)))
    if keep != "all":
        layer_of, counted = _keep_one_of_each_kind(layers, text, count if keep == "few" else None)
        keep = keep if counted else "few_counted_as_all"
    notes = []
    if method.attention == "sdpa" and text._attn_implementation == "eager":
        notes.append("this architecture has no SDPA attention: memory grows with the square of the sequence")
    if method.four_bit:
        notes += quantise(base, nested=method.nested, dtype=getattr(torch, method.dtype))
    model = _attach(base, method) if method.lora else base
    if method.four_bit:  # as TRL does, except for DoRA's magnitudes
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "lora_magnitude_vector" not in name:
                parameter.data = parameter.data.to(torch.bfloat16)
    model.train()
    return Sample(model=model, base=base, layers=layers, layer_of=layer_of, config=text, notes=tuple(notes), keep=keep)


def text_config(config: Any, *, decoder: bool = False) -> Any:
    """The part of a configuration that describes the language model; all of it where that is told apart by nothing."""
    for only_decoder in (decoder or None, True):  # False would mean the encoder's
        with suppress(ValueError):  # of several, as in a model that encodes texts and decodes something else
            return config.get_text_config(decoder=only_decoder)
    return config


def _meta_model(config: Any, method: Method) -> Any:
    import transformers
    from transformers.initialization import no_init_weights

    name = (config.architectures or ["?"])[0]
    architecture = getattr(transformers, name, None) or transformers.AutoModelForCausalLM
    make = getattr(architecture, "_from_config", None) or architecture.from_config
    part = text_config(config)
    if part is not config and isinstance(part, getattr(architecture, "config_class", None) or ()):
        config = part  # a language model alone, of a configuration that describes more
    wish = {} if method.attention == "sdpa" else {"attn_implementation": method.attention}
    try:
        with torch.device("meta"), no_init_weights(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = make(config, dtype=getattr(torch, method.dtype), **wish)
            if hasattr(model, "tie_weights"):
                model.tie_weights()  # part of the initialisation, which costs seconds and is left out
    except FOREIGN_ERRORS as error:
        raise UsageError(f"{name} cannot be planned: {first_line(error)}") from error
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if getattr(config, "is_encoder_decoder", False) or getattr(head, "weight", None) is None:
        raise UsageError(f"{name} cannot be planned: it is no causal language model with an output head")
    return model


#: Settings that count layers; those of a decoder alone, or of layers with several sublayers, have their own.
_COUNTS = ("num_hidden_layers", "decoder_layers", "num_layers")


def _find_layers(model: nn.Module, text: Any) -> tuple[nn.ModuleList, str]:
    """The stack of decoder layers: the largest list of as many modules as the configuration has layers.

    Returns:
        The stack, and the name of the setting that counts its layers.
    """
    keys = {text.attribute_map.get(key, key): getattr(text, key, 0) for key in _COUNTS}
    found = [
        (each, key)
        for each in model.modules()
        for key, count in keys.items()
        if isinstance(each, nn.ModuleList) and len(each) and len(each) == count
    ]
    if not found:
        count = getattr(text, "num_hidden_layers", 0)
        raise UsageError(f"{type(model).__name__} cannot be planned: no stack of {count} layers could be told in it")
    return max(found, key=lambda pair: sum(parameter.numel() for parameter in pair[0].parameters()))


def _keep_one_of_each_kind(layers: nn.ModuleList, text: Any, count: str | None) -> tuple[tuple[int, ...], bool]:
    """Leaves the first layer, the last and one of each kind between them.

    Args:
        layers: the stack, which is changed.
        text: the configuration; what it says of each layer is changed too.
        count: name of its setting that counts the layers, or None where that stays. It stays too where the kinds of
            this model's layers follow from their number.

    Returns:
        Which layer stands for which, and whether the configuration counts the layers that are left.
    """
    per_layer = {
        key: value for key, value in vars(text).items() if isinstance(value, list | tuple) and len(value) == len(layers)
    }
    derived = _derived_lists(text, len(layers))
    indices = {key for key, value in per_layer.items() if list(value) == list(range(len(layers)))}
    settings = [value for key, value in (per_layer | derived).items() if key not in indices]
    kinds = [_kind(layer, [repr(value[i]) for value in settings]) for i, layer in enumerate(layers)]
    last = len(layers) - 1
    kept = [0]
    stands_for = {0: 0}
    for i in range(1, last):
        twin = next((k for k in kept[1:] if kinds[k] == kinds[i]), None)
        if twin is None:
            kept.append(i)
        stands_for[i] = i if twin is None else twin
    if last:
        kept.append(last)
        stands_for[last] = last
    fewer = {
        key: type(value)(range(len(kept)) if key in indices else (value[i] for i in kept))
        for key, value in per_layer.items()
    }
    counting = copy.copy(text)
    vars(counting).update(fewer, **({count: len(kept)} if count else {}))
    same = {key: type(value)(value[i] for i in kept) for key, value in derived.items()}
    counted = bool(count) and _derived_lists(counting, len(kept)) == same
    vars(text).update(vars(counting) if counted else fewer)
    modules = [layers[i] for i in kept]
    layers._modules.clear()
    layers.extend(modules)
    for position, layer in enumerate(layers):
        for module in layer.modules():
            if "layer_idx" in vars(module):
                vars(module)["layer_idx"] = position
    return tuple(kept.index(stands_for[i]) for i in range(last + 1)), counted


def _derived_lists(text: Any, count: int) -> dict[str, Any]:
    """What the configuration's own class computes for each layer."""
    from transformers import PreTrainedConfig

    own = [member for base in type(text).__mro__ if base not in PreTrainedConfig.__mro__ for member in vars(base)]
    found = {}
    for key in own:
        with suppress(*FOREIGN_ERRORS):  # a property that does not apply, or no longer
            value = getattr(text, key) if isinstance(getattr(type(text), key), property) else None
            if isinstance(value, list | tuple) and len(value) == count:
                found[key] = value
    return found


def _kind(layer: nn.Module, settings: list[str]) -> tuple[object, ...]:
    """Two layers with the same kind take the same memory."""
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
    names = tuple(type(module).__name__ for module in layer.modules())
    return shapes, names, tuple(settings)


def _attach(base: Any, method: Method) -> nn.Module:
    """Adds the adapters by PEFT."""
    from peft import LoraConfig, get_peft_model

    targets: Any = method.targets if isinstance(method.targets, str) else list(method.targets)
    check_targets(base, targets)
    settings = LoraConfig(
        task_type="CAUSAL_LM",
        r=method.rank,
        lora_alpha=method.alpha,
        lora_dropout=method.dropout,
        target_modules=target_names(targets),
        modules_to_save=list(method.modules_to_save) or None,
        use_dora=method.dora,
        use_rslora=method.rslora,
    )
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return get_peft_model(base, settings)
    except (ValueError, ImportError, NotImplementedError) as error:
        others = f"; --targets takes names of modules, as {', '.join(adaptable(base)[:8])}" if targets == ALL else ""
        raise UsageError(f"PEFT refuses these adapters: {first_line(error)}{others}") from error


def _tensors_of(module: Any) -> Iterator[Tensor]:
    if module is not None:
        yield from module.parameters()
        yield from module.buffers()


def first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".:")
