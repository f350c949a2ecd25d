"""Torch's devices are told by PCI address, whatever the filters and the override variables say."""

from __future__ import annotations

from hf_rocm_tune.machine.software import TorchDevice
from hf_rocm_tune.machine.survey import JoinedDevice, join, survey
from tests.hardware.parts import RAPHAEL, XT, XTX
from tests.hardware.trees import Built

HIP = "HIP_VISIBLE_DEVICES"


def device(index: int, address: str | None, arch: str = "gfx1100") -> TorchDevice:
    return TorchDevice(index=index, name="AMD Radeon", arch=arch, total_bytes=20464 << 20, pci_address=address)


def joined(built: Built, *devices: TorchDevice, environ: dict[str, str] | None = None) -> tuple[JoinedDevice, ...]:
    return join(survey(built.tree()), devices, environ or {})


def addresses(result: tuple[JoinedDevice, ...]) -> list[str | None]:
    return [one.gpu.address if one.gpu else None for one in result]


def test_a_device_is_the_card_at_its_address_not_at_its_index() -> None:
    result = joined(Built("invented").card(XT).card(XTX), device(0, "0000:06:00.0"), device(1, "0000:03:00.0"))
    assert addresses(result) == ["0000:06:00.0", "0000:03:00.0"]


def test_a_gpu_in_the_processor_is_recognised() -> None:
    built = Built("invented").igpu(RAPHAEL).card(XT)
    result = joined(built, device(0, "0000:01:00.0", "gfx1036"), device(1, "0000:04:00.0"))
    assert [one.gpu is not None and one.gpu.integrated for one in result] == [True, False]
    assert not any(one.spoofed for one in result)


def test_an_override_variable_shows_as_another_architecture() -> None:
    result = joined(Built("invented").card(XT).igpu(), device(0, "0000:03:00.0"), device(1, "0000:04:00.0", "gfx1100"))
    assert [one.spoofed for one in result] == [False, True]


def test_without_an_address_the_order_of_the_kernel_tells() -> None:
    built = Built("invented").card(XT).card(XTX)
    assert addresses(joined(built, device(0, None), device(1, None))) == ["0000:03:00.0", "0000:06:00.0"]
    assert addresses(joined(built, device(0, None), environ={HIP: "1"})) == ["0000:06:00.0"]


def test_without_an_address_a_list_of_another_length_tells_nothing() -> None:
    built = Built("invented").card(XT).card(XTX)
    for environ, devices in (({}, [device(0, None)]), ({HIP: "GPU-abc"}, [device(0, None), device(1, None)])):
        result = joined(built, *devices, environ=environ)
        assert addresses(result) == [None] * len(devices)
        assert all(one.reason for one in result)


def test_without_an_address_an_incomplete_list_tells_nothing() -> None:
    built = Built("invented").card(XT).card(XTX)
    built.files["sys/class/kfd/kfd/topology/nodes/1/properties"] = ""
    assert addresses(joined(built, device(0, None))) == [None]


def test_an_address_that_the_kernel_does_not_know_is_no_card() -> None:
    (one,) = joined(Built("invented").card(XT), device(0, "0000:7f:00.0"))
    assert one.gpu is None
    assert "0000:7f:00.0" in one.reason
    assert not one.spoofed


def test_a_cuda_machine_is_joined_too() -> None:
    result = joined(Built("invented").nvidia(), device(0, "0000:01:00.0", "sm_89"))
    assert addresses(result) == ["0000:01:00.0"]
