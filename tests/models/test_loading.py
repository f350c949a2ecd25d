"""Every weight passes the mover, the model that comes out is the one that plain transformers would have made, and a
device that casts wrongly is caught; the targets of an adapter are matched as PEFT matches them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn.parametrize import replace_parameter_4bit
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    Lfm2Config,
    Lfm2VlConfig,
    Siglip2VisionConfig,
)

from hf_rocm_tune.errors import CorruptionError, UsageError
from hf_rocm_tune.models.adapter import adaptable, check_targets
from hf_rocm_tune.models.experts import experts_of, weights_of
from hf_rocm_tune.models.factory import ModelSource, check_source, load_model
from hf_rocm_tune.models.placement import coverage
from hf_rocm_tune.models.tensors import quant_state_of, tensors_of
from hf_rocm_tune.transfer import FaultSpec, Mover, digest
from hf_rocm_tune.transfer import mover as mover_module
from hf_rocm_tune.transfer.mover import SAMPLE_ELEMENTS
from tests import tiny

# PEFT 0.21 reads an attribute that transformers 5.23 renamed: https://github.com/huggingface/peft/pull/2817
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

Quantise = Callable[[int], BitsAndBytesConfig]
HARMED = "model.layers.1.mlp.up_proj.weight"


def names_in(directory: Path) -> list[str]:
    """Names of the tensors in the files of a checkpoint."""
    names: list[str] = []
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            names += opened.keys()
    return names


def attested(mover: Mover) -> set[str]:
    """Names of the tensors of files whose bytes were compared, or are known for the comparison with their SHA-256."""
    return {name for _, name in mover.loaded}


def digests(model: nn.Module) -> dict[str, str]:
    """Name, dtype and digest of everything that a model holds."""
    return {name: f"{tensor.dtype}{digest(tensor).hex()}" for name, tensor in tensors_of(model)}


def load(directory: Path, mover: Any, quantization: Any = None, **init: Any) -> nn.Module:
    model: nn.Module = load_model(ModelSource(name=str(directory), init=init, quantization=quantization), mover)[0]
    return model


def stock(directory: Path, **options: Any) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(directory, device_map={"": "cpu"}, **options)
    return model


@pytest.mark.parametrize("arch", tiny.ARCHITECTURES)
def test_every_architecture_loads_as_with_plain_transformers(model_of: Any, make_mover: Any, arch: str) -> None:
    for in_file, asked, shards in (
        (torch.float32, torch.bfloat16, 1),
        (torch.bfloat16, torch.float32, 3),
        (torch.float32, "auto", 3),
    ):
        directory = model_of(arch, dtype=in_file, shards=shards)
        mover = make_mover()
        model = load(directory, mover, dtype=asked)
        assert digests(model) == digests(stock(directory, dtype=asked))
        passed = [name for stage, name in mover.moved if stage == "weights"]
        assert len(passed) == len(set(passed)), "a tensor was sent twice"
        assert attested(mover) == set(names_in(directory))
        assert coverage(model, mover).complete


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("arch", ["llama3", "gpt2", "qwen3_moe", "gpt_oss"])
def test_quantised_models_are_quantised_from_verified_weights(
    model_of: Any, mover: Any, quantisation: Any, arch: str, bits: int
) -> None:
    directory = model_of(arch)
    model = load(directory, mover, quantisation(bits), dtype=torch.bfloat16)
    plain: Any = stock(directory, dtype=torch.bfloat16, quantization_config=quantisation(bits))
    for path, experts in experts_of(plain) if bits == 4 else ():  # which transformers leaves in 16 bits
        for name in weights_of(experts):
            replace_parameter_4bit(experts, name, compress_statistics=True, quant_type="nf4")
            packed, (how,) = experts.parametrizations[name].original, experts.parametrizations[name]
            found = dict(tensors_of(model))
            assert torch.equal(found[f"{path}.{name}"], packed)
            for part in quant_state_of(how.quant_state):
                assert torch.equal(found[f"{path}.{name}.quant_state.{part}"], attrgetter(part)(how.quant_state))
        plain.set_submodule(path, model.get_submodule(path))
    assert digests(model) == digests(plain)
    assert attested(mover) == set(names_in(directory))
    assert coverage(model, mover).complete
    assert any(tensor.dtype in (torch.uint8, torch.int8) for _, tensor in tensors_of(model))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_layer_to_whose_dtype_its_input_is_cast_stays_unquantised(
    mover: Any, quantisation: Any, tmp_path: Path, bits: int
) -> None:
    """Siglip 2's linear patch embedding, in LFM2-VL: pictures that are cast to bytes would be zeros."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    text = Lfm2Config(**sizes, num_key_value_heads=4, vocab_size=64, layer_types=["full_attention"])
    sight = Siglip2VisionConfig(**sizes, patch_size=16, num_patches=16)
    config = Lfm2VlConfig(vision_config=sight, text_config=text, image_token_id=63, projector_hidden_size=64)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    model: Any = load(tmp_path, mover, quantisation(bits), dtype=torch.bfloat16)
    kept = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and name.startswith("model.vision_tower")
    ]
    assert kept == ["model.vision_tower.embeddings.patch_embedding"]
    patches = {"pixel_values": torch.rand(1, 16, 768), "pixel_attention_mask": torch.ones(1, 16, dtype=torch.int64)}
    seen = model.model.vision_tower(**patches, spatial_shapes=torch.tensor([[4, 4]])).last_hidden_state
    assert seen.std(dim=1).min() > 0, "all patches look alike"


@pytest.mark.parametrize("bits", [4, 8])
def test_a_checkpoint_saved_quantised_loads_verified(
    model_of: Any, mover: Any, quantisation: Any, tmp_path: Path, bits: int
) -> None:
    saved: Any = stock(model_of("llama3"), dtype=torch.bfloat16, quantization_config=quantisation(bits))
    saved.save_pretrained(tmp_path)
    model = load(tmp_path, mover, dtype=torch.bfloat16)
    assert digests(model) == digests(stock(tmp_path, dtype=torch.bfloat16)) == digests(saved)
    assert attested(mover) == set(names_in(tmp_path))
    assert coverage(model, mover).complete


@pytest.mark.parametrize("bits", [4, 8])
def test_a_configuration_that_claims_quantised_weights_which_the_files_lack_is_one_line(
    model_of: Any, mover: Any, quantisation: Any, tmp_path: Path, bits: int
) -> None:
    directory = Path(shutil.copytree(model_of("llama3", dtype=torch.bfloat16), tmp_path / "claims"))
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = quantisation(bits).to_dict()
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"claims: its config\.json says .* is not quantised: take") as refused:
        load(directory, mover)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", ["zero", "flip", "swap", "drop", "late", "zero_range"])
def test_one_harmed_weight_is_named_and_recovered(
    model_of: Any, make_mover: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a late copy lands at the next use of the queue: with several loading threads that may be before the digest
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    mover = make_mover(faults=FaultSpec(kind=kind, tensor=HARMED))
    model = load(model_of("llama3"), mover, dtype=torch.bfloat16)
    assert digests(model) == digests(stock(model_of("llama3"), dtype=torch.bfloat16))
    # a copy that is dropped or late harms nothing where the memory happens to hold the right bytes already
    made = mover.fault_injection()["injected"]
    assert made == 1 or (made == 0 and kind in ("drop", "late"))
    seen = [(row["tensor"], row["stage"], row["outcome"]) for row in mover.report.incidents]
    assert seen == [(HARMED, "weights", "recovered")] * made


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize(
    ("arch", "tensor"),
    [
        ("llama3", HARMED),
        ("qwen3_moe", "model.layers.1.mlp.experts.*"),  # fused after loading, by code that collects errors
        ("qwen3", "model.embed_tokens.weight"),
        ("gpt2", "transformer.h.0.attn.c_attn.weight"),
    ],
)
def test_a_weight_that_cannot_be_brought_over_stops_the_loading(
    model_of: Any, make_mover: Any, quantisation: Any, arch: str, tensor: str, bits: int | None
) -> None:
    mover = make_mover(faults=FaultSpec(kind="zero", tensor=tensor, persist=True))
    with pytest.raises(CorruptionError, match=r"weights tensor '.*' arrived wrong"):
        load(model_of(arch), mover, quantisation(bits) if bits else None, dtype=torch.float32)
    assert mover.report.incidents[-1]["outcome"] == "failed"


@pytest.mark.parametrize("arch", ["llama3", "qwen3_moe"])
def test_a_card_that_is_full_while_it_quantises_is_told_as_that(
    model_of: Any, mover: Any, quantisation: Any, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers collects errors of conversions, and would end with a table of them."""

    def full(*_: Any, **more: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("bitsandbytes.functional.quantize_4bit", full)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        load(model_of(arch), mover, quantisation(4))


@pytest.mark.parametrize("name", ["./no/such/model", "/no/such/model", "no-such-org/no-such-model"])
def test_a_model_that_is_not_there_is_a_usage_error(name: str) -> None:
    with pytest.raises(UsageError, match=r"no/such|no-such"):
        check_source(ModelSource(name=name), torch.device("cpu"))


def test_weight_files_that_lack_a_tensor_are_refused(tmp_path: Path) -> None:
    source = shutil.copytree(tiny.build("llama3", tmp_path / "models"), tmp_path / "lacking")
    tensors = load_file(source / "model.safetensors")
    lost = "model.layers.1.mlp.down_proj.weight"
    del tensors[lost]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with Mover(torch.device("cpu")) as mover, pytest.raises(UsageError, match=f"lack 1 tensors, {lost}"):
        load_model(ModelSource(name=str(source)), mover)


@pytest.mark.parametrize("shards", [1, 3])
def test_an_incident_names_the_file_that_the_tensor_came_from(tmp_path: Path, shards: int) -> None:
    directory = tiny.build("llama3", tmp_path, shards=shards)
    faults = FaultSpec.parse(f"kind=flip,tensor={HARMED}")
    with Mover(torch.device("cpu"), faults=faults) as mover:
        load_model(ModelSource(name=str(directory)), mover)
    (incident,) = mover.report.incidents
    file = Path(incident["source"])
    assert incident["tensor"] == HARMED and file.parent == directory
    with safe_open(file, framework="pt") as opened:
        assert HARMED in opened.keys()  # noqa: SIM118  # not a mapping


# ---- casts --------------------------------------------------------------------------------------------------------


BIG = 10 * SAMPLE_ELEMENTS + 7

Harm = Callable[[int, int], None]


@pytest.fixture
def harm(monkeypatch: pytest.MonkeyPatch) -> Harm:
    """The given element comes out with one bit wrong, in the first so many casts; a faulty kernel cannot be had."""

    def install(element: int, times: int) -> None:
        left = [times]
        right = mover_module.cast_on_device

        def wrong(tensor: Tensor, dtype: torch.dtype) -> Tensor:
            cast = right(tensor, dtype)
            if left[0] > 0:
                left[0] -= 1
                cast.view(-1).view(torch.int16)[element] ^= 1
            return cast

        monkeypatch.setattr(mover_module, "cast_on_device", wrong)

    return install


def cast(mover: Mover, source: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return mover.move(source, name="w", dtype=dtype)


def counts(mover: Mover) -> tuple[int, int, int]:
    found = mover.report.to_dict()["casts"]
    return found["checked"], found["mismatches"], found["recovered"]


@pytest.mark.parametrize("element", [0, BIG // 2, BIG - 1])
def test_one_wrong_bit_in_the_sample_is_cast_again(mover: Any, harm: Any, element: int) -> None:
    source = torch.randn(BIG)
    harm(element, 1)
    assert torch.equal(cast(mover, source), source.to(torch.bfloat16))
    assert counts(mover) == (1, 1, 1)
    assert [(row["tensor"], row["kind"], row["outcome"]) for row in mover.report.incidents] == [
        ("w", "wrong cast", "recovered")
    ]


def test_a_device_that_casts_wrongly_twice_stops_with_the_name(mover: Any, harm: Any) -> None:
    harm(0, 2)
    with pytest.raises(
        CorruptionError,
        match=r"'w': cpu cast float32 to bfloat16 wrongly.*a fault of arithmetic.*run hf-rocm-tune doctor --full",
    ):
        cast(mover, torch.randn(3, 5))
    assert counts(mover) == (1, 1, 0) and mover.report.incidents[-1]["outcome"] == "stopped"


def test_the_payload_of_a_nan_is_no_fault_but_a_nan_for_a_number_is(mover: Any, harm: Any) -> None:
    harm(3, 1)
    source = torch.tensor([1.0, float("inf"), 2.0, float("nan")])
    assert torch.isnan(cast(mover, source)).tolist() == [False, False, False, True]
    assert counts(mover) == (1, 0, 0)
    harm(1, 2)  # infinity with one more bit is a NaN
    with pytest.raises(CorruptionError):
        cast(mover, source)


# ---- the targets of an adapter ------------------------------------------------------------------------------------


TARGETS = (
    ["q_proj"],
    ["q_proj", "lm_head"],
    ["model.layers.0.self_attn.q_proj"],
    ["proj"],
    ["q_pro"],
    ["self_attn.q_proj"],
    r".*\.layers\.1\..*_proj",
    r".*\.nothing",
    "q_proj",
)


@pytest.mark.parametrize("targets", TARGETS, ids=str)
def test_a_target_is_refused_exactly_when_peft_finds_nothing(model_of: Any, targets: str | list[str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_of("llama3"))
    try:
        check_targets(model, targets)
        message = ""
    except UsageError as error:
        message = str(error)
    try:
        get_peft_model(model, LoraConfig(target_modules=targets, task_type="CAUSAL_LM"))
        peft_accepts = True
    except ValueError:
        peft_accepts = False
    assert (not message) == peft_accepts
    assert peft_accepts or "gate_proj" in message, "what exists is listed"


def test_a_broken_expression_is_a_usage_error(model_of: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_of("gpt2"))
    with pytest.raises(UsageError, match="regular expression"):
        check_targets(model, "c_attn[")
    with pytest.raises(UsageError, match="c_attn"):  # GPT-2's layers are Conv1D
        check_targets(model, ["q_proj"])
    for nothing_to_check in (None, "all-linear"):
        check_targets(model, nothing_to_check)
    assert "lm_head" not in adaptable(model)
