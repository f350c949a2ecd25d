"""Recorded steps: of three layers follows what all layers take, and what is kept is what torch keeps."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.models import loss
from hf_rocm_tune.models.tensors import tensors_of
from hf_rocm_tune.plan import recorder as shapes_device
from hf_rocm_tune.plan.estimate import Case, Step, Tape, Weights
from hf_rocm_tune.plan.recorder import DeviceMode, Recorder, autocast_flags, record
from hf_rocm_tune.plan.request import PlanRequest, config_of
from hf_rocm_tune.plan.sample import Sample, build
from tests.small_models import EXPERTS, SMALL

SIZES = {**SMALL, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 7, "head_dim": 32}
SIZES |= {"vocab_size": 640, "max_position_embeddings": 4096}
LLAMA = {**SIZES, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
GEMMA3 = {**SIZES, "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "sliding_window": 64}
GEMMA3 |= {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["sliding_attention"]}
GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 128, "n_layer": 5, "n_head": 4}
GPT2 |= {"n_positions": 1024, "vocab_size": 640}
MOE = {**EXPERTS, **SIZES, "moe_intermediate_size": 64, "mlp_only_layers": [0, 2]}
#: Two blocks of attention, which layers share in turns.
ZAMBA2 = {**SIZES, "model_type": "zamba2", "architectures": ["Zamba2ForCausalLM"], "mamba_expand": 2}
ZAMBA2 |= {"n_mamba_heads": 4, "attention_head_dim": 64, "num_mem_blocks": 2}
ZAMBA2 |= {"layers_block_type": ["mamba", "hybrid"] * 3 + ["mamba"], "hybrid_layer_ids": [1, 3, 5]}
MODELS = {"llama": LLAMA, "gemma3": GEMMA3, "gpt2": GPT2, "qwen3_moe": MOE}
PLAIN = Case(micro_batch=1, length=2, checkpointing=False)
PADDED = Case(micro_batch=2, length=2, checkpointing=False)


def sample_of(fields: dict[str, Any], method: str = "lora", *, whole: bool = False, **settings: Any) -> Sample:
    """A model with few layers, without dropout unless it is asked for."""
    return build(config_of(fields), PlanRequest(**{"dropout": 0.0, **settings}), method, whole=whole)


def level(tape: Tape) -> float:
    """The highest level of a tape, in bytes."""
    return float(np.cumsum([tape.sizes[storage] * sign for _, storage, sign in tape.events]).max())


def kept_shapes(model: nn.Module, run: Callable[[], object]) -> Counter[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of all that autograd keeps of a forward pass, each storage once, parameters left out."""
    known = {tensor.untyped_storage()._cdata for tensor in model.parameters()}
    found: Counter[tuple[tuple[int, ...], torch.dtype]] = Counter()
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        key = tensor.untyped_storage()._cdata
        if key not in known:
            known.add(key)
            alive.append(tensor)
            found[tuple(tensor.shape), tensor.dtype] += 1
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return found


# ---- from few layers to all -------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", sorted(MODELS))
@pytest.mark.parametrize("lora", [True, pytest.param(False, marks=pytest.mark.long)])
def test_few_layers_tell_what_all_layers_take(arch: str, lora: bool) -> None:
    method = "lora" if lora else "full"
    few, whole = sample_of(MODELS[arch], method), sample_of(MODELS[arch], method, whole=True)
    assert len(few.layers) < len(whole.layers) == len(few.layer_of)
    for checkpointing, batch, length in ((False, 4, 200), (True, 2, 640)):
        case = replace(PADDED, checkpointing=checkpointing)
        step = Step(((record(few, case, batch, length), few.layer_of),))
        assert step.peak().total == pytest.approx(level(record(whole, case, batch, length)), rel=0.001)


def test_each_kind_of_layer_is_recorded_and_stands_for_its_own() -> None:
    sample = sample_of(GEMMA3)
    # first, sliding, full, last: and of the seven real layers each is stood for by one of its kind
    assert sample.layer_of == (0, 1, 2, 1, 1, 2, 3)
    sparse = sample_of(MOE)
    has_experts = [any("experts" in name for name, _ in layer.named_modules()) for layer in sparse.layers]
    assert [has_experts[position] for position in sparse.layer_of] == [False, True, False, True, True, True, True]


def test_the_configuration_is_left_as_it_was() -> None:
    config = config_of(GEMMA3)
    before = copy.deepcopy(config.to_dict())
    record(build(config, PlanRequest(dropout=0.0), "lora"), PLAIN, 2, 64)
    assert config.to_dict() == before


def test_weights_of_all_layers_are_those_of_the_real_model() -> None:
    from transformers import AutoModelForCausalLM

    for fields in (*MODELS.values(), ZAMBA2):
        config = config_of(fields)
        sample = sample_of(fields, "full")
        with torch.device("meta"):
            real = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        total = Weights.total(sample.weights(), sample.layer_of)
        assert total.parameters == sum(parameter.numel() for parameter in real.parameters())
        assert sum(each.gradient for each in total.trained) == 4 * total.parameters


def test_packed_weights_have_the_bytes_of_bitsandbytes() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    for nested in (True, False):
        sample = sample_of(LLAMA, "qlora", nested=nested)
        layer = next(each for each in sample.base.modules() if isinstance(each, bitsandbytes.nn.Linear4bit))
        weight = torch.randn(layer.out_features, layer.in_features, dtype=torch.bfloat16)
        real = bitsandbytes.nn.Linear4bit(
            layer.in_features, layer.out_features, bias=False, compress_statistics=nested, quant_type="nf4"
        )
        real.weight = bitsandbytes.nn.Params4bit(
            weight, requires_grad=False, compress_statistics=nested, quant_type="nf4", module=real
        ).to("cpu")
        assert _bytes(layer) == _bytes(real)


def _bytes(module: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for _, tensor in tensors_of(module))


# ---- what is kept -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["llama", "gemma3", "qwen3_moe"])
@pytest.mark.parametrize("mixed", [True, False])
def test_the_meta_device_keeps_what_the_cpu_keeps(arch: str, mixed: bool) -> None:
    dropout = 0.05 if arch != "qwen3_moe" else 0.0
    sample = sample_of({**MODELS[arch], "num_hidden_layers": 2, "layer_types": None}, dropout=dropout)
    real = copy.deepcopy(sample.model).to_empty(device="cpu")  # device: made there, nothing is moved
    for tensor in [*real.parameters(), *real.buffers()]:
        tensor.data.zero_()

    def forward(model: Any, place: str) -> Callable[[], object]:
        ids = torch.ones(2, 96, dtype=torch.int64, device=place)
        mask = ids.clone()
        if place == "cpu":
            mask[1, 80:] = 0
        return lambda: model.get_base_model().base_model(input_ids=ids, attention_mask=mask, use_cache=False)

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
        expected = kept_shapes(real, forward(real, "cpu"))
    mode = DeviceMode(platform="cpu", autocast=mixed, content_is_plain=False)
    with autocast_flags("cpu", mixed), mode:
        found = kept_shapes(sample.model, forward(sample.model, "meta"))
    assert found == expected


def _kept_of(
    sample: Sample, batch: int, length: int, *, plain: bool = True
) -> Counter[tuple[tuple[int, ...], torch.dtype]]:
    mode = DeviceMode(platform="hip", autocast=True, content_is_plain=plain)
    ids = torch.ones(batch, length, dtype=torch.int64, device="meta")
    with autocast_flags("hip", True), mode:
        return kept_shapes(
            sample.model, lambda: sample.base.base_model(input_ids=ids, attention_mask=ids.clone(), use_cache=False)
        )


def test_a_card_keeps_a_mask_only_where_sequences_differ() -> None:
    sample = sample_of(LLAMA)
    plain = _kept_of(sample, 2, 96)
    padded = _kept_of(sample, 2, 96, plain=False)
    assert not any(shape[-2:] == (96, 96) for shape, _ in plain)
    masks = {key: count for key, count in padded.items() if key[0][-2:] == (96, 96)}
    assert masks == {((2, 4, 96, 96), torch.bfloat16): len(sample.layers)}  # expanded over the heads, not copied
    # without a mask flash takes two key heads as they are; with one they are repeated to four
    assert ((2, 2, 96, 32), torch.bfloat16) in plain
    assert ((2, 2, 96, 32), torch.bfloat16) not in padded


def test_dropout_keeps_one_byte_an_element_on_a_card() -> None:
    sample = sample_of(LLAMA, dropout=0.1)
    masks = [shape for shape, dtype in _kept_of(sample, 2, 96) if dtype == torch.bool]
    assert (2, 96, 128) in masks
    assert (2, 96, 256) in masks


def test_eager_attention_keeps_scores_with_the_square_of_the_length() -> None:
    sample = sample_of(LLAMA, attention="eager")
    kept = _kept_of(sample, 2, 96)
    assert any(shape == (2, 4, 96, 96) for shape, _ in kept)


@pytest.mark.parametrize(("one_pass", "products"), [(False, (1, 2)), (True, (2, 0))])
@pytest.mark.parametrize("vocabulary", [640, 100_000])  # one tile, and more
def test_the_products_of_the_head_are_counted(one_pass: bool, products: tuple[int, int], vocabulary: int) -> None:
    tape = record(sample_of({**LLAMA, "vocab_size": vocabulary}, one_pass_loss=one_pass), PLAIN, 2, 512)
    flops = [sum(each.flops for each in tape.segments if each.role == role) for role in ("head", "loss")]
    product = 2 * (2 * 511) * SIZES["hidden_size"] * vocabulary
    assert flops == [number * product for number in products]


def test_the_loss_of_a_card_without_triton_has_tiles_of_its_own() -> None:
    assert shapes_device.PLAIN_TOKENS == loss.PLAIN_TOKENS
    fields, tile = {**LLAMA, "vocab_size": 32768}, 32768 * 1022
    largest = [max(record(sample_of(fields, triton=each), PLAIN, 2, 512).sizes) for each in (True, False)]
    assert largest == [2 * tile, 4 * tile]  # bfloat16, and float32 beside it


def test_a_window_makes_masks_as_soon_as_the_sequence_is_longer() -> None:
    sample = sample_of(GEMMA3)
    short, long = (_kept_of(sample, 1, n) for n in (48, 96))
    assert not any(shape[-2:] == (48, 48) for shape, _ in short)
    assert any(shape[-2:] == (96, 96) for shape, _ in long)


def test_names_of_autocast_are_those_that_torch_casts() -> None:
    def cast(name: str) -> bool:
        # Python's operators and functions that torch casts under the name of what they call
        plain = {"__matmul__": "matmul", "__rmatmul__": "matmul", "__pow__": "pow", "linalg_norm": "linalg_vector_norm"}
        operator = plain.get(name, "nll_loss" if name == "cross_entropy" else name)
        names = (each for each in torch._C._dispatch_get_all_op_names() if each.split(".")[0] == f"aten::{operator}")
        return any(torch._C._dispatch_has_kernel_for_dispatch_key(each, "AutocastCUDA") for each in names)

    tables = shapes_device._LOWER | shapes_device._UPPER | shapes_device._UPPER_BY_DTYPE
    assert [name for name in sorted(tables) if not cast(name)] == []


# ---- the recorder -----------------------------------------------------------------------------------------------


def test_a_storage_counts_once_and_views_not_at_all() -> None:
    existing = torch.empty(1000, device="meta")
    tape = Tape()
    with Recorder(tape, [existing], "hip"):
        made = existing.view(10, 100) + 1
        kept = made[2:5].transpose(0, 1)
        made.add_(1)
        del made
        del kept
    assert tape.sizes == [4000]
    assert [sign for _, _, sign in tape.events] == [1, -1]
    assert [(each.role, each.layer) for each in tape.segments] == [("start", -1)]


def test_the_float32_copy_that_checks_a_towers_product_counts_and_is_bounded() -> None:
    def sizes(rows: int, role: str) -> list[int]:
        tape, inputs = Tape(), torch.empty(rows, 64, device="meta", dtype=torch.bfloat16)
        weight = torch.empty(16, 64, device="meta", dtype=torch.bfloat16)
        with Recorder(tape, [inputs, weight], "hip", checks_tower=True) as recorder:
            recorder.segment(role)
            torch.mm(inputs, weight.t())
        return tape.sizes

    assert sizes(100, "start") == sizes(100, "end") == [100 * 16 * 2, 100 * 64 * 4]
    assert sizes(100, "forward") == [100 * 16 * 2]
    assert sizes(1 << 18, "start")[1] == 4 << 23


# ---- what cannot be planned -------------------------------------------------------------------------------------


def test_torch_is_as_it_was_afterwards_also_after_a_failure() -> None:
    before = torch.autocast, torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    sample = sample_of(LLAMA)
    record(sample, replace(PLAIN, checkpointing=True), 2, 64)
    sample.layers[1].forward = lambda *arguments, **keywords: torch.empty(3, device="meta").item()
    with pytest.raises(UsageError, match="LlamaForCausalLM cannot be planned"):
        record(sample, PLAIN, 2, 64)
    assert before == (torch.autocast, torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"))
    assert (torch.ones(2) + 1).tolist() == [2, 2]  # no mode is left on


# ---- cached operators ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", sorted(MODELS))
def test_a_step_is_recorded_alike_with_and_without_what_earlier_ones_left(arch: str) -> None:
    sample = sample_of(MODELS[arch])
    for case in (PADDED, replace(PADDED, checkpointing=True)):
        record(sample, case, 2, 64)  # the first one may do what later ones do not
        remembering = record(sample, case, 2, 64)
        assert shapes_device.RESULTS
        shapes_device.RESULTS.clear()
        assert remembering == record(sample, case, 2, 64)


# ---- content of which enough is known ------------------------------------------------------------------------------


def test_experts_that_a_models_own_code_loops_over_have_equal_shares_of_the_tokens() -> None:
    """Four experts, two a token: as in DBRX's loop, and as JetMoe sorts its tokens by expert."""
    chosen, states = torch.empty((10, 2), dtype=torch.int64, device="meta"), torch.empty((10, 8), device="meta")
    weights, counts = torch.empty((4, 8, 8), device="meta"), []
    with DeviceMode(platform="hip", autocast=False, content_is_plain=True):
        mask = nn.functional.one_hot(chosen, num_classes=4).permute(2, 1, 0)
        for expert in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            assert expert[0] != 4 and int(expert.item()) == 0
            _, tokens = torch.where(mask[expert[0]])
            counts.append(len(nn.functional.linear(states[tokens], weights[expert[0]])))
        gates = torch.zeros((9, 4), device="meta").scatter(1, chosen[:9], 1)
        assert gates.long().sum(0).tolist() == [5, 5, 4, 4]
        keep = torch.empty(10, dtype=torch.bool, device="meta")
        assert states[keep].shape == (10, 8) and states.T[:, keep].shape == (8, 10)
    assert counts == [5, 5, 5, 5]


def test_a_cast_that_is_made_without_gradients_is_used_again_where_they_are_needed() -> None:
    """As torch's autocast keeps it: HRM's first cycles are without gradients, its last one is with them."""
    layer, given = nn.Linear(4, 4, device="meta"), torch.empty((2, 4), device="meta")
    with autocast_flags("hip", True), DeviceMode(platform="hip", autocast=True, content_is_plain=True):
        with torch.no_grad():
            layer(given)
        assert layer(given).requires_grad
        assert torch.get_autocast_dtype("meta") == torch.bfloat16


# ---- pictures --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_softmax_is_in_float32_unless_the_model_says_otherwise(dtype: torch.dtype | None) -> None:
    """As autocast on a card computes it: InternVL's attention leaves the dtype open."""
    scores = torch.empty((2, 8), dtype=torch.bfloat16, device="meta")
    with DeviceMode(platform="hip", autocast=True, content_is_plain=True):
        assert nn.functional.softmax(scores, dim=-1, dtype=dtype).dtype == (dtype or torch.float32)


def test_sizes_and_numbers_of_pictures_are_known_on_the_meta_device() -> None:
    """What models ask for: Mistral 3 the patches by sizes, Gemma 4 the places of pictures, SmolVLM those per row."""
    meta = torch.device("meta")
    sizes = torch.tensor([[28, 56], [56, 56]])
    tokens, embeddings = torch.empty((2, 9), dtype=torch.bool, device=meta), torch.empty((2, 9, 4), device=meta)
    pixels = torch.empty((2, 5, 3, 8, 8), device=meta)
    with DeviceMode(platform="hip", autocast=False, content_is_plain=True, placeholders=6):
        assert (torch.as_tensor(sizes, device=meta) // 28).prod(dim=-1).tolist() == [2, 4]
        assert sizes.to(meta, torch.int32).dtype == torch.int32
        assert embeddings[tokens].shape == (6, 4)
        assert embeddings[tokens.unsqueeze(-1).expand_as(embeddings)].numel() == 6 * 4
        shown = (pixels.flatten(0, 1) == 0.0).sum(dim=(-1, -2, -3)) != 192
        assert shown.view(2, 5).sum(dim=1).tolist() == [5, 5]
        assert (sizes + torch.empty(2, dtype=torch.int64, device=meta)).is_meta
