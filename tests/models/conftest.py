"""What the tests of models share: tiny checkpoints on disk, a mover that notes what passes it, and stock loading."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig

from hf_rocm_tune.transfer import Mover
from tests import tiny


class RecordingMover(Mover):
    """A real mover that keeps the stage and name of everything that `move` is given."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(torch.device("cpu"), **keywords)
        self.moved: list[tuple[str, str]] = []

    def move(self, tensor: Tensor, *, name: str, stage: str = "weights", **more: Any) -> Tensor:
        self.moved.append((stage, name))
        return super().move(tensor, name=name, stage=stage, **more)


@pytest.fixture
def make_mover() -> Iterator[Callable[..., RecordingMover]]:
    """Makes movers, and closes them after the test."""
    made: list[RecordingMover] = []

    def make(**keywords: Any) -> RecordingMover:
        made.append(RecordingMover(**keywords))
        return made[-1]

    yield make
    for mover in made:
        mover.close()


@pytest.fixture
def mover(make_mover: Callable[..., RecordingMover]) -> RecordingMover:
    """A mover without faults."""
    return make_mover()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny models are built."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def model_of(checkpoints: Path) -> Callable[..., Path]:
    """Directory of a tiny model, built once; arguments as `tiny.build`."""
    return lambda arch, **options: tiny.build(arch, checkpoints, **options)


@pytest.fixture
def quantisation() -> Callable[[int], BitsAndBytesConfig]:
    """The quantisation of a QLoRA run (4) or of an 8-bit run (8)."""

    def make(bits: int) -> BitsAndBytesConfig:
        if bits == 8:
            return BitsAndBytesConfig(load_in_8bit=True)
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )

    return make


@pytest.fixture
def flip() -> Callable[[Tensor], None]:
    """Flips one bit of a tensor in place, in the middle of its bytes, behind autograd's back."""

    def harm(tensor: Tensor) -> None:
        raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        place = tensor.storage_offset() * tensor.element_size() + tensor.numel() * tensor.element_size() // 2
        raw[place] ^= 4

    return harm


@pytest.fixture
def linear() -> nn.Module:
    """Two layers, one frozen, and a buffer."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    model[0].requires_grad_(False)
    model.register_buffer("table", torch.arange(12.0))
    return model
