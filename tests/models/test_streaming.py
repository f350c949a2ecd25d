"""Streamed layers on the host's own device: every fault of a fetch, either way, and what stays the same over passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor
from transformers import BitsAndBytesConfig, PreTrainedModel

from hf_rocm_tune.errors import MemoryFaultError
from hf_rocm_tune.models.factory import ModelSource, load_model
from hf_rocm_tune.models.streamed import LAYER_BUFFERS_A_CARD, Streamed
from hf_rocm_tune.models.streaming import Streamer, streamer_of
from hf_rocm_tune.transfer import FaultSpec, Mover
from hf_rocm_tune.transfer.layer_buffer import LayerBuffer
from tests import tiny

LAYERS = 6
FETCHED = "model.layers.1.mlp.up_proj.weight"
Load = Callable[..., tuple[PreTrainedModel, Mover]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build("llama3", tmp_path_factory.mktemp("models"), dtype=torch.bfloat16, num_hidden_layers=LAYERS)


@pytest.fixture
def load(directory: Path) -> Iterator[Load]:
    movers: list[Mover] = []

    def make(*, nf4: bool = False, stream: bool = True, fault: str = "") -> tuple[PreTrainedModel, Mover]:
        movers.append(Mover(torch.device("cpu"), faults=FaultSpec.parse(fault) if fault else None))
        packed = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
        source = ModelSource(name=str(directory), init={"dtype": torch.bfloat16}, quantization=packed if nf4 else None)
        streamed = Streamed("model.layers", tuple(range(LAYERS)), from_files=not nf4) if stream else None
        model, _ = load_model(source, movers[-1], streamed=streamed)
        return model.requires_grad_(False), movers[-1]

    yield make
    for mover in movers:
        mover.close()


def of(model: PreTrainedModel) -> Streamer:
    found = streamer_of(model)
    assert found is not None
    return found


def passed(model: PreTrainedModel, mover: Mover) -> tuple[Tensor, Tensor]:
    """Logits of a forward pass, and the gradient that a backward pass brings to the embedded tokens."""
    with torch.no_grad():
        embedded = model.get_input_embeddings()(mover.move(torch.arange(24).view(2, 12), name="ids"))
    embedded.requires_grad_()
    logits = model(inputs_embeds=embedded, use_cache=False).logits
    logits.float().square().sum().backward()
    assert embedded.grad is not None
    return logits.detach(), embedded.grad


def assert_as_resident(found: tuple[Tensor, Tensor], load: Load, *, nf4: bool = False) -> None:
    expected = passed(*load(nf4=nf4, stream=False))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", ["zero", "zero_range", "flip", "bits", "stride", "stale", "swap", "drop", "late"])
def test_a_fault_on_the_way_to_the_card_is_sent_again(kind: str, load: Load) -> None:
    model, mover = load(fault=f"kind={kind},stage=streamed,rate=0.3,seed=3,first=9,count=5")
    found = passed(model, mover)
    report = mover.report.to_dict()
    assert report["streamed"]["mismatches"] > 0 == report["streamed"]["mismatches"] - report["streamed"]["recovered"]
    assert {row["outcome"] for row in report["incidents"]} == {"recovered"}
    assert_as_resident(found, load)


@pytest.mark.parametrize("kind", ["zero", "zero_range", "flip", "bits", "stride", "stale", "swap"])
def test_a_fault_on_the_way_back_to_the_host_is_fetched_again(kind: str, load: Load) -> None:
    """Quantised at the load, the packed weights leave the card; on a CPU that is the first transfer of that name."""
    model, mover = load(nf4=True, fault=f"kind={kind},stage=weights,tensor={FETCHED},first=1,count=1,seed=3")
    report = mover.report.to_dict()
    assert report["weights"]["mismatches"] == report["weights"]["recovered"] == 1
    assert_as_resident(passed(model, mover), load, nf4=True)


def test_a_layer_that_changes_on_the_card_is_found_when_the_next_one_takes_its_place(load: Load) -> None:
    model, mover = load(fault="kind=after,stage=streamed,first=9,count=1")
    with pytest.raises(MemoryFaultError, match="changed in device memory"):
        passed(model, mover), passed(model, mover)


@pytest.mark.parametrize("nf4", [False, True])
def test_a_layer_that_changes_while_it_waits_is_read_again_or_stops_the_pass(nf4: bool, load: Load) -> None:
    model, mover = load(nf4=nf4)
    source = next(each.source for each in of(model).contents[4].segments if each.source.nbytes > 512)
    source.view(torch.uint8).view(-1)[77] ^= 4
    if nf4:  # no file has these bytes
        with pytest.raises(MemoryFaultError, match=r"changed in host memory: model\.layers\.4"):
            passed(model, mover)
        return
    assert_as_resident(passed(model, mover), load)
    incidents = mover.report.to_dict()["incidents"]
    assert {row["outcome"] for row in incidents} == {"recovered"}
    assert "source_changed" in {row["kind"] for row in incidents}


def test_passes_take_no_more_memory_and_fetch_what_the_plan_counts(load: Load) -> None:
    """50 passes fetch 30 MB through the same buffers."""
    model, mover = load()
    streamer, process = of(model), psutil.Process()
    for _ in range(20):
        passed(model, mover)
    before = streamer.visits, [each.memory.data_ptr() for each in streamer.buffers], process.memory_info().rss
    for _ in range(50):
        passed(model, mover)
    assert streamer.visits - before[0] == 50 * 2 * (LAYERS - LAYER_BUFFERS_A_CARD)
    assert [each.memory.data_ptr() for each in streamer.buffers] == before[1]
    assert process.memory_info().rss - before[2] < 8 << 20


def test_waits_are_counted_for_each_layer(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer is used forward and backward; here nothing has ever arrived when it is needed."""
    monkeypatch.setattr(LayerBuffer, "has_arrived", False)
    model, mover = load()
    for _ in range(3):
        passed(model, mover)
    told = of(model).describe()
    assert told["waits"] == [3 * 2] * LAYERS and told["layers"] == list(range(LAYERS))


@pytest.mark.parametrize("harm", ["to a copy", "to another layer's"])
def test_a_streamed_weight_that_is_bound_to_another_place_stops_the_pass(harm: str, load: Load) -> None:
    model, mover = load()
    passed(model, mover)
    layers = of(model).layers
    first, other = (model.model.layers[layer].mlp.up_proj.weight for layer in layers[:2])
    first.data = first.data.clone() if harm == "to a copy" else other.data
    with pytest.raises(MemoryFaultError, match=r"bound to another place in memory: .*up_proj.weight"):
        passed(model, mover)
