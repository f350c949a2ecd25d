"""Device core dumps: only amdgpu's count, and what cannot be read claims nothing."""

from __future__ import annotations

from pathlib import Path

from hf_rocm_tune.machine.sensors import core_dumps


def dump(root: Path, name: str, *, driver: str | None, device: str = "0000:03:00.0") -> None:
    """A dump as the kernel lists it: a link to the device, which has a link to its driver."""
    there = root / "sys/devices/pci0000:00" / device
    there.mkdir(parents=True, exist_ok=True)
    if driver is not None:
        (root / "sys/bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
        (there / "driver").symlink_to(root / "sys/bus/pci/drivers" / driver)
    (root / "sys/class/devcoredump" / name).mkdir(parents=True)
    (root / "sys/class/devcoredump" / name / "failing_device").symlink_to(there)


def test_a_dump_of_amdgpu_is_named_with_its_device(tmp_path: Path) -> None:
    dump(tmp_path, "devcd1", driver="amdgpu")
    dump(tmp_path, "devcd2", driver="amdgpu", device="0000:0a:00.0")
    assert core_dumps(tmp_path) == {"devcd1 of 0000:03:00.0", "devcd2 of 0000:0a:00.0"}


def test_dumps_of_others_and_of_unknown_drivers_do_not_count(tmp_path: Path) -> None:
    dump(tmp_path, "devcd1", driver="iwlwifi")
    dump(tmp_path, "devcd2", driver=None, device="0000:0b:00.0")
    (tmp_path / "sys/class/devcoredump/disabled").write_text("0\n")
    assert core_dumps(tmp_path) == frozenset()


def test_without_the_class_nothing_is_claimed(tmp_path: Path) -> None:
    assert core_dumps(tmp_path) == frozenset()
    assert isinstance(core_dumps(), frozenset)  # this machine, whatever it is
