"""Measured shapes: what a training step keeps and takes, recorded from the real architecture on the meta device.

Nothing is downloaded or allocated. The step is the one that TRL makes: the backbone, the fused head and its loss, the
backward pass with or without checkpointing of each layer. What a sequence of layers takes follows from the recording
of a few of them (``hf_rocm_tune.memory`` does that arithmetic).

Covered: every architecture of transformers with a causal language model whose forward pass runs on the meta device.
Not covered, and refused with one line: models that choose their way by the content of tensors (experts picked by
Python loops), and models whose layers cannot be told.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.models.shapes_device import DeviceMode, autocast_flags, workspaces
from hf_rocm_tune.models.shapes_head import TILE_TOKENS, balancing_loss, loss_of
from hf_rocm_tune.models.shapes_model import FOREIGN_ERRORS, Sample, first_line
from hf_rocm_tune.models.shapes_record import Recorder, Tape, TooManyOperations


@dataclass(frozen=True, kw_only=True)
class Step:
    """Which step to record.

    Args:
        batch, length: sequences, and tokens of each.
        content: ``plain`` (all sequences are as long as the longest), ``padded`` or ``packed`` (one row of several
            sequences; attention has to keep them apart).
        checkpointing: each layer's activations are recomputed in backward.
        platform: ``hip``, ``cuda`` or ``cpu``: the device whose kernels count.
        autocast: mixed precision in bfloat16.
    """

    batch: int
    length: int
    content: str = "plain"
    checkpointing: bool = False
    platform: str = "hip"
    autocast: bool = True


def record(sample: Sample, step: Step) -> Tape:
    """Records one training step of a sample.

    Raises:
        TooManyOperations: it takes too long.
        UsageError: this model does not run without data, so it cannot be planned.
    """
    parameters = list(sample.model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    recorder = Recorder([*parameters, *sample.model.buffers()], workspaces(step.platform), sample.kernels)
    mode = DeviceMode(platform=step.platform, autocast=step.autocast, content_is_plain=step.content == "plain")
    _set_checkpointing(sample, mode if step.checkpointing else None)
    hooks = _watch(sample, trained, recorder)
    try:
        with warnings.catch_warnings(), torch.enable_grad(), autocast_flags(step.platform, step.autocast), recorder:
            warnings.simplefilter("ignore")
            with mode:
                loss = _forward(sample, step, recorder)
            mode.forget_casts()
            recorder.segment("loss")
            loss.backward()
            del loss  # with it goes what only the graph still held
            return recorder.tape(batch=step.batch, length=step.length, tile_tokens=TILE_TOKENS)
    except TooManyOperations as error:
        raise TooManyOperations(f"{type(sample.base).__name__} cannot be planned: {error}") from error
    except FOREIGN_ERRORS as error:
        raise UsageError(
            f"{type(sample.base).__name__} cannot be planned: its forward pass does not run without data "
            f"({first_line(error)})"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in trained:
            parameter.grad = None


def _forward(sample: Sample, step: Step, recorder: Recorder) -> Tensor:
    shape = (step.batch, step.length)
    ids, labels = (torch.empty(shape, dtype=torch.int64, device="meta") for _ in range(2))
    extra: dict[str, Any] = {}
    second = torch.empty(shape, dtype=torch.int64, device="meta")
    extra["position_ids" if step.content == "packed" else "attention_mask"] = second
    balanced = bool(getattr(sample.config, "router_aux_loss_coef", 0)) and hasattr(
        sample.config, "output_router_logits"
    )
    if balanced:
        extra["output_router_logits"] = True
    outputs = sample.base.base_model(input_ids=ids, use_cache=False, **extra)
    head = sample.base.get_output_embeddings()
    loss = loss_of(outputs.last_hidden_state, labels, head, recorder, cpu=step.platform == "cpu")
    if balanced and outputs.router_logits:
        logits = _of_all_layers(sample, outputs.router_logits)
        loss = loss + balancing_loss(logits, sample.config, extra.get("attention_mask"))
    return loss


def _of_all_layers(sample: Sample, logits: tuple[Tensor, ...]) -> list[Tensor]:
    """The router logits of the real model: each of its sparse layers gives those of the layer that stands for it."""
    sparse = [i for i, layer in enumerate(sample.layers) if any("expert" in name for name, _ in layer.named_modules())]
    if len(sparse) != len(logits):
        return list(logits)
    by_layer = dict(zip(sparse, logits, strict=True))
    return [by_layer[i] for i in sample.layer_of if i in by_layer]


def _watch(sample: Sample, trained: list[nn.Parameter], recorder: Recorder) -> list[Any]:
    """Begins a segment at each layer's boundary, in both directions."""
    last = len(sample.layers) - 1
    hooks = []

    def before(layer: int) -> Any:
        def begin(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            del module
            recorder.segment("forward", layer)
            hidden = args[0] if args else kwargs.get("hidden_states")
            if layer == 0 and isinstance(hidden, Tensor) and hidden.requires_grad:
                hidden.register_hook(lambda gradient: recorder.segment("end"))

        return begin

    def after(layer: int) -> Any:
        def finish(module: Any, args: tuple[Any, ...], output: Any) -> None:
            del module, args
            hidden = output if isinstance(output, Tensor) else output[0]
            if hidden.requires_grad:
                hidden.register_hook(lambda gradient: recorder.segment("backward", layer))
            if layer == last:
                recorder.segment("head")

        return finish

    for position, layer in enumerate(sample.layers):
        hooks.append(layer.register_forward_pre_hook(before(position), with_kwargs=True))
        hooks.append(layer.register_forward_hook(after(position)))
    for parameter in trained:
        hooks.append(parameter.register_post_accumulate_grad_hook(lambda each: recorder.landed(each.grad)))
    return hooks


def _set_checkpointing(sample: Sample, mode: DeviceMode | None) -> None:
    """As ``transformers.Trainer`` does, which makes the embeddings' output need a gradient.

    What is recomputed runs in the mode too.
    """
    base = sample.base
    if base.is_activation_checkpointing:
        base.activation_checkpointing_disable()
        base.disable_input_require_grads()
    if mode is None:
        return
    settings = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), mode)}
    try:
        base.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
    except ValueError as error:
        raise UsageError(f"{type(base).__name__} does not support checkpointing: {error}") from error
