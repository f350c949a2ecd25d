"""The model that is recorded: the real architecture on the meta device, with few of its layers.

It has the first layer, the last and one of each kind (dense and sparse, sliding and full ...) between them. Weights are
quantised and adapters attached by the libraries that do it in training.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_rocm_tune.errors import FOREIGN_ERRORS, UsageError, first_line
from hf_rocm_tune.models import recompute
from hf_rocm_tune.models.adapter import adaptable, beside_experts, check_targets, share_inputs, target_names
from hf_rocm_tune.models.classes import architecture_of, auto_class
from hf_rocm_tune.models.experts import (
    CHECKSUMS_OF_EXPERTS,
    experts_of,
    layout,
    mxfp4_code,
    pack_mxfp4,
    pack_nf4,
    routers_of,
    use_packed,
    weights_of,
)
from hf_rocm_tune.models.incomplete import describe
from hf_rocm_tune.models.own_head import output_head, why_own_head
from hf_rocm_tune.models.quantised import cast_targets, checkpoint_bits, has_mxfp4
from hf_rocm_tune.models.split import find_layers
from hf_rocm_tune.models.streaming import is_streamed
from hf_rocm_tune.models.tensors import quant_state_of
from hf_rocm_tune.plan.estimate import Counts, Weight
from hf_rocm_tune.plan.request import ALL_LINEAR, PlanRequest, quiet, text_config


@dataclass(frozen=True, kw_only=True)
class Sample:
    model: nn.Module  # on the meta device; a PEFT model where there are adapters
    base: Any  # the causal language model itself
    layers: nn.ModuleList  # its recorded layers, in order
    layer_of: Counts  # for each layer of the real model, the position of its stand-in among ``layers``
    config: Any  # the text configuration
    request: PlanRequest
    notes: tuple[str, ...]  # for the reader of the plan
    is_whole: bool = False  # whether it has all layers of the real model, although some are alike

    @property
    def vocabulary(self) -> int:
        return int(output_head(self.base).weight.shape[0])

    @property
    def is_one_layer(self) -> bool:
        """Whether the model has no stack of layers of its own: nothing of it can be split or streamed."""
        return self.layers[0] is self.base.base_model

    @property
    def own_head(self) -> bool:
        """Whether training takes the loss from whole logits, see `models.own_head`."""
        return bool(why_own_head(self.base))

    def weights(self, cut: Collection[str] = (), ranks: int = 1) -> Iterator[Weight]:
        """All parameters, buffers and quantisation state of the recorded layers and of what is outside them.

        Of those named in ``cut`` a card has one of so many parts.
        """
        owners: dict[int, int] = {}  # the layer of a tensor, by its id
        for number, module in enumerate(self.layers):
            for tensor in (*module.parameters(), *module.buffers()):
                owners[id(tensor)] = number
        joined = _joined(self.base)
        for name, parameter in self.model.named_parameters():
            layer = owners.get(id(parameter), -1)
            state = getattr(parameter, "quant_state", None)
            elements = parameter.numel()
            if state is not None:
                elements = math.prod(state.shape)
            parts = ranks if name in cut else 1
            of_adapter = ".lora_" in name or "modules_to_save" in name
            yield Weight(
                part="adapters" if of_adapter else "weights",
                layer=layer,
                elements=-(-elements // parts),
                nbytes=-(-parameter.nbytes // parts),
                itemsize=parameter.element_size(),
                trained=parameter.requires_grad,
                streams=not parameter.requires_grad and is_streamed(name, parameter),
                fused=name.rpartition(".")[2] in joined,
            )
            constants = 0
            if type(parameter).__name__ == "Int8Params":
                constants = 4 * len(parameter)  # one a row
            if state is not None:
                constants = sum(attrgetter(path)(state).nbytes for path in quant_state_of(state))
                yield Weight(part="quantisation constants", layer=layer, nbytes=state.absmax.nbytes, streams=True)
                constants -= state.absmax.nbytes
            yield Weight(part="quantisation constants", layer=layer, nbytes=constants)
        for buffer in self.model.buffers():
            yield Weight(part="weights", layer=owners.get(id(buffer), -1), nbytes=buffer.nbytes)
        yield from self._checksums(owners)

    def _checksums(self, owners: Mapping[int, int]) -> Iterator[Weight]:
        """What the checks of products with frozen weights hold on the card: three float32 a row, a column and a layer,
        and three for each number of them (``train/arithmetic/``)."""
        head = output_head(self.base)
        widths: set[int] = set()  # the numbers of rows and columns
        for module in self.model.modules():
            if not isinstance(module, nn.Linear | Conv1D):
                continue
            if any(parameter.requires_grad for parameter in module.parameters()):
                continue
            if module is head and not self.request.one_pass_loss:
                continue
            if isinstance(module, Conv1D):
                inputs, outputs = module.nx, module.nf
            else:
                inputs, outputs = module.in_features, module.out_features
            widths |= {inputs, outputs}
            layer = owners.get(id(module.weight), -1)
            yield Weight(part="checksums", layer=layer, nbytes=12 * (inputs + outputs + 1))
        of_experts = 0
        for _, experts in experts_of(self.base):
            for name in weights_of(experts):
                weight = getattr(experts, name)
                if weight.requires_grad:
                    continue
                count, inputs, outputs, _ = layout(experts, name)
                widths |= {inputs, outputs}
                layer = owners.get(id(weight), -1)
                layers = 1
                if layer >= 0:
                    layers = self.layer_of.count(layer)
                of_experts += layers * 12 * (count * (inputs + outputs) + 1)
        of_experts = min(of_experts, CHECKSUMS_OF_EXPERTS)
        yield Weight(part="checksums", layer=-1, nbytes=of_experts + 12 * sum(widths))


def _joined(base: Any) -> set[str]:
    """The last names of parameters that files have in parts: experts that are stored one by one."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import MergeModulelist, WeightConverter

    names: set[str] = set()
    for conversion in get_model_conversion_mapping(base):
        if not isinstance(conversion, WeightConverter):
            continue
        if any(isinstance(operation, MergeModulelist) for operation in conversion.operations):
            names |= {target.rpartition(".")[2] for target in conversion.target_patterns}
    return names


@quiet()
def build(config: Any, request: PlanRequest, method: str, *, whole: bool = False) -> Sample:
    """Builds the sample of a model, whose configuration is not changed; ``whole``: with all layers.

    UsageError: it cannot be built so.
    """
    dtype = getattr(torch, request.dtype_of(method))
    base = _meta_model(copy.deepcopy(config), dtype, request)
    text = text_config(base.config, decoder=True)
    stack = find_layers(base, text)
    if stack is None:  # HRM runs two stacks in turns, BLT has three: all of it is recorded, as one layer
        layers = nn.ModuleList([base.base_model])
    else:
        _, layers, _ = stack
    layer_of: Counts = tuple(range(len(layers)))
    whole = whole or _share_modules(layers)
    if stack is not None and not whole:
        layer_of = _keep_one_of_each_kind(layers, text)
        _renumber_skipped_layers(base, layer_of, len(layers))
    notes = _unseen_senses(config, base, request)
    quantised = _quantisation(config, request, method, dtype)
    if quantised is not None:
        _quantise(base, quantised, dtype)
    elif has_mxfp4(config):
        _pack_mxfp4(base, dtype)
    model = base
    if method != "full":
        model = _attach(base, request)
    if quantised is not None:  # as TRL does, except for DoRA's magnitudes
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "lora_magnitude_vector" not in name:
                parameter.data = parameter.data.to(torch.bfloat16)
    model.train()
    return Sample(
        model=model,
        base=base,
        layers=layers,
        layer_of=layer_of,
        config=text,
        request=request,
        notes=notes,
        is_whole=whole,
    )


def _share_modules(layers: nn.ModuleList) -> bool:
    """Whether layers have a module with parameters in common, as Zamba's: what one of them takes is not each one's."""
    seen: set[int] = set()  # ids of parameters
    for layer in layers:
        own = {id(parameter) for parameter in layer.parameters()}
        if not own.isdisjoint(seen):
            return True
        seen |= own
    return False


def _renumber_skipped_layers(base: Any, layer_of: Counts, kept: int) -> None:
    """Give the layers that Llama 3.2 Vision skips for text, a list of numbers, the numbers of the layers kept."""
    for module in base.modules():
        skipped = vars(module).get("cross_attention_layers")
        if isinstance(skipped, list):
            module.cross_attention_layers = [number for number in range(kept) if layer_of.index(number) in skipped]


def _unseen_senses(config: Any, base: Any, request: PlanRequest) -> tuple[str, ...]:
    """A note that a model which sees or hears is planned for text only; empty: it is not."""
    if type(base.config) is not type(config):  # a language model alone
        return ()
    senses = [name.removesuffix("_config") for name in config.sub_configs if re.match("vision|audio", name)]
    if request.pictures:
        senses = [sense for sense in senses if sense != "vision"]
    if not senses:
        return ()
    return (f"only text is counted, not {' and '.join(senses)} input",)


def _meta_model(config: Any, dtype: torch.dtype, request: PlanRequest) -> Any:
    """The model on the meta device, of the class that training would load."""
    import transformers
    from transformers.initialization import no_init_weights

    name = (config.architectures or ["?"])[0]
    options: dict[str, Any] = {"dtype": dtype}
    if request.attention != "sdpa":
        options["attn_implementation"] = request.attention
    architecture = architecture_of(config)
    if architecture is None and request.trust_remote_code:  # as in TRL
        architecture = auto_class(config)
        options["trust_remote_code"] = True
    if architecture is None:
        version = f"transformers {transformers.__version__} has no such class"
        raise UsageError(f"{name} cannot be planned: {version} (its own code needs --trust_remote_code)")
    make = getattr(architecture, "_from_config", None) or architecture.from_config
    text = text_config(config)
    if text is not config and isinstance(text, getattr(architecture, "config_class", None) or ()):
        config = text  # a language model alone, of a configuration that describes more
    try:
        with torch.device("meta"), no_init_weights():
            model = make(config, **options)
            _put_on_meta(model, dtype)
            if hasattr(model, "tie_weights"):
                model.tie_weights()  # part of the initialisation, which is skipped because it takes seconds
    except (*FOREIGN_ERRORS, OSError) as error:  # OSError: a file of the model's own code is missing
        raise UsageError(f"{name} cannot be planned: {describe(config, error)}") from error
    head = output_head(model)
    has_head = getattr(head, "weight", None) is not None
    is_causal = hasattr(model, "prepare_inputs_for_generation")  # PEFT's measure; a masked language model has none
    if getattr(config, "is_encoder_decoder", False) or not has_head or not is_causal:
        raise UsageError(f"{name} cannot be planned: it is no causal language model with an output head")
    return model


def _put_on_meta(model: nn.Module, dtype: torch.dtype) -> None:
    """Moves the parameters that a model makes by older calls, which know neither torch's default device nor its dtype
    (XLNet's by ``torch.FloatTensor``)."""
    for name, parameter in list(model.named_parameters()):
        if not parameter.is_meta:
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, nn.Parameter(torch.empty(parameter.shape, dtype=dtype)))


def _keep_one_of_each_kind(layers: nn.ModuleList, text: Any) -> Counts:
    """Leaves the first layer, the last and one of each kind between them, in the stack and in the lists of `text`.

    The number of layers in the configuration stays: some models slice tensors by it. Returns which layer stands for
    which.
    """
    count = len(layers)
    last = count - 1
    per_layer: dict[str, Any] = {}  # the settings that have a value for each layer
    for key, value in vars(text).items():
        if isinstance(value, list | tuple) and len(value) == count:
            per_layer[key] = value
    numbers = {key for key, value in per_layer.items() if list(value) == list(range(count))}  # of the layers themselves
    computed = _computed_per_layer(text, count)
    settings = [value for key, value in per_layer.items() if key not in numbers]
    kinds = [_kind(layer, [repr(value[i]) for value in settings]) for i, layer in enumerate(layers)]
    stands_for = {0: 0}
    for i in range(1, last):
        stands_for[i] = 1 + kinds[1 : i + 1].index(kinds[i])  # the first of its kind after the first layer
    stands_for[last] = last
    kept = sorted(set(stands_for.values()))
    for key, value in per_layer.items():
        if key in numbers:
            vars(text)[key] = type(value)(range(len(kept)))
        else:
            vars(text)[key] = type(value)(value[i] for i in kept)
    if computed:
        replaced = {key: [value[i] for i in kept] for key, value in computed.items()}
        text.__class__ = type(type(text).__name__, (type(text),), replaced)
    modules = [layers[i] for i in kept]
    del layers[:]
    layers.extend(modules)
    for position, layer in enumerate(layers):
        for module in layer.modules():
            if "layer_idx" in vars(module):
                vars(module)["layer_idx"] = position
    return tuple(kept.index(stands_for[i]) for i in range(count))


def _computed_per_layer(text: Any, count: int) -> dict[str, Any]:
    """The properties of a configuration that have a value for each layer, as Jamba's ``layer_types``."""
    values: dict[str, Any] = {}
    for name in dir(type(text)):
        if isinstance(getattr(type(text), name), property):
            value = getattr(text, name, None)
            if isinstance(value, list | tuple) and len(value) == count:
                values[name] = value
    return values


def _kind(layer: nn.Module, settings: list[str]) -> tuple[object, ...]:
    """What tells layers apart: the shapes of their parameters, their modules with these' switches, their settings."""
    shapes = [(name, tuple(parameter.shape)) for name, parameter in layer.named_parameters()]
    types = [type(module).__name__ for module in layer.modules()]
    switches: list[tuple[str, bool]] = []
    for module in layer.modules():
        switches += [(name, value) for name, value in vars(module).items() if isinstance(value, bool)]
    return tuple(shapes), tuple(types), tuple(switches), tuple(settings)


def _attach(base: Any, request: PlanRequest) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    targets: Any = request.targets
    if not isinstance(targets, str):
        targets = list(targets)
    targets = beside_experts(base, targets)
    check_targets(base, targets, saved=request.modules_to_save)
    settings = LoraConfig(
        task_type="CAUSAL_LM",
        r=request.rank,
        lora_dropout=request.dropout,
        target_modules=target_names(targets),
        target_parameters=list(request.target_parameters) or None,
        modules_to_save=list(request.modules_to_save) or None,
        use_dora=request.dora,
    )
    if base.config.get_text_config() is not base.config and request.targets == ALL_LINEAR:
        _choose_vision(base, settings, request)
    known = adaptable(base)
    try:
        with torch.device("meta"):
            model = get_peft_model(base, settings)
            share_inputs(model)
            if recompute.is_reversible(base):
                base.enable_input_require_grads()
    except (*FOREIGN_ERRORS, NotImplementedError) as error:
        refused = [name for name in known if f"'{name}'" in str(error)]
        if not refused:
            raise UsageError(f"PEFT refuses these adapters: {first_line(error)}") from error
        others = " ".join(name for name in known if name not in refused)
        what = f"{', '.join(refused)} of {type(base).__name__}"
        raise UsageError(f"PEFT does not adapt {what}: give --targets {others}") from error
    if hasattr(output_head(base), "lora_A"):
        raise UsageError("an adapter on the output head is never trained, TRL's loss reads its weight: leave it out")
    return model


def _choose_vision(base: Any, settings: Any, request: PlanRequest) -> None:
    """Leave the vision tower and the projector out of the adapters' targets unless they are to be trained."""
    from hf_rocm_tune.models.vision import vision_parts, whole_modules  # not imported for text

    parts = vision_parts(base)
    if parts is None:
        return
    tower, projector = request.train_vision_tower, request.train_projector
    settings.exclude_modules = parts.left_out(tower=tower == "lora", projector=projector == "lora")
    whole = whole_modules(base, parts, tower=tower == "whole", projector=projector == "whole")
    settings.modules_to_save = [*(settings.modules_to_save or ()), *whole] or None


def _quantisation(config: Any, request: PlanRequest, method: str, dtype: torch.dtype) -> Any:
    """The checkpoint's own ``BitsAndBytesConfig``, else what ``--load_in_4bit`` makes; None: not quantised."""
    from transformers import BitsAndBytesConfig

    if has_mxfp4(config):
        return None
    if checkpoint_bits(config, request.model, on_card=request.platform != "cpu"):
        given = config.quantization_config
        try:
            return BitsAndBytesConfig.from_dict(given if isinstance(given, dict) else given.to_dict())
        except FOREIGN_ERRORS as error:
            wrong = f"the quantization_config of its config.json is wrong ({first_line(error)})"
            fix = "mend it, or give the model that was quantised"
            raise UsageError(f"model {request.model}: {wrong}: {fix}") from error
    if method != "qlora":
        return None
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=request.nested,
        bnb_4bit_compute_dtype=dtype,
    )


def _quantise(base: Any, settings: Any, dtype: torch.dtype) -> None:
    """Makes the layers 4-bit or 8-bit that transformers would make so, in place."""
    import bitsandbytes
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import get_keys_to_not_convert

    if settings.load_in_8bit:  # outlier columns depend on content; without a threshold no product is split
        settings.llm_int8_threshold = 0.0
    skipped = settings.llm_int8_skip_modules
    if skipped is None:
        skipped = get_keys_to_not_convert(base)
    replace_with_bnb_linear(base, [*skipped, *routers_of(base), *cast_targets(base)], settings)
    base.is_loaded_in_4bit = settings.load_in_4bit
    base.is_loaded_in_8bit = settings.load_in_8bit
    base.is_quantized = True
    layers = [module for module in base.modules() if type(module).__name__ in ("Linear4bit", "Linear8bitLt")]
    if not layers:
        raise UsageError(f"{type(base).__name__} has no linear layer that bitsandbytes quantises: give --method lora")
    tables = dict(bitsandbytes.functional.name2qmap)
    for layer in layers:
        shape = (layer.out_features, layer.in_features)
        if settings.load_in_4bit:
            weight = bitsandbytes.nn.Params4bit(
                torch.empty(shape, dtype=dtype, device="meta"),
                requires_grad=False,
                compress_statistics=settings.bnb_4bit_use_double_quant,
                quant_type="nf4",
            )
            layer.weight = weight._quantize(weight.device)
            layer.quant_state = layer.weight.quant_state
        else:  # its codes and a float32 constant a row, as if it was loaded
            codes = torch.empty(shape, dtype=torch.int8, device="meta")
            constants = torch.empty(layer.out_features, device="meta")
            layer.weight = bitsandbytes.nn.Int8Params(codes, requires_grad=False, CB=codes, SCB=constants)
    if settings.load_in_4bit:
        for _, experts in experts_of(base):
            for name in weights_of(experts):
                setattr(experts, name, pack_nf4(name, getattr(experts, name).data.to(dtype), settings))
    use_packed(base)
    bitsandbytes.functional.name2qmap.clear()  # tables on the meta device would break real loading in this process
    bitsandbytes.functional.name2qmap.update(tables)


def _pack_mxfp4(base: Any, dtype: torch.dtype) -> None:
    for _, experts in experts_of(base):
        for name in weights_of(experts):
            count, inputs, outputs = getattr(experts, name).shape
            scales = torch.empty((count, outputs, inputs // 32), dtype=torch.uint8, device="meta")
            blocks = scales.new_empty((*scales.shape, 16))
            code = torch.empty_like(mxfp4_code(), device="meta")
            setattr(experts, name, pack_mxfp4(blocks, scales, code, dtype))
    use_packed(base)
