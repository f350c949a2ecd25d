"""The kernel's settings, the memory that is really there, and who may use the cards."""

from __future__ import annotations

import base64
import gzip

import pytest

from hf_rocm_tune.machine.host import Host, parse_cmdline, parse_config, read_host, read_kernel
from tests.hardware.parts import GIB
from tests.hardware.trees import Built


def host_of(built: Built) -> Host:
    return read_host(built.tree())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ro quiet root=/dev/sda1", {}),
        ("iommu=pt", {"iommu": "pt"}),
        ("amd_iommu=off intel_iommu=on", {"amd_iommu": "off", "intel_iommu": "on"}),
        (
            "amdgpu.pcie-p2p=0 amdgpu.ppfeaturemask=0xffffffff",
            {"amdgpu.pcie_p2p": "0", "amdgpu.ppfeaturemask": "0xffffffff"},
        ),
        ("iommu=pt iommu=off", {"iommu": "off"}),
        (
            "pci=realloc,nommconf pcie_aspm=off nomodeset",
            {"pci": "realloc,nommconf", "pcie_aspm": "off", "nomodeset": ""},
        ),
        ('pci="a b" x="iommu=pt"', {"pci": "a b"}),
        ('iommu="pt', {"iommu": ""}),
        ("myiommu=pt iommux=1 amdgpu=1 -- pcix", {}),
    ],
)
def test_boot_parameters_are_read_as_the_kernel_reads_them(text: str, found: dict[str, str]) -> None:
    assert parse_cmdline(text) == found


def test_a_configuration_states_yes_module_and_no() -> None:
    text = "CONFIG_HSA_AMD_P2P=y\n# CONFIG_PCI_P2PDMA is not set\nCONFIG_DRM_AMDGPU=m\nCONFIG_OTHER=y\nHSA_AMD=y\n"
    assert parse_config(text) == {"CONFIG_HSA_AMD_P2P": "y", "CONFIG_PCI_P2PDMA": "n", "CONFIG_DRM_AMDGPU": "m"}


def test_the_running_kernel_s_own_configuration_comes_first() -> None:
    built = Built("invented")
    assert (read_kernel(built.tree()).config.value or {})["CONFIG_HSA_AMD_P2P"] == "y"
    packed = gzip.compress(b"# CONFIG_HSA_AMD_P2P is not set\n" * 2)
    built.binary["proc/config.gz"] = base64.b64encode(packed).decode()
    assert read_kernel(built.tree()).config.value == {"CONFIG_HSA_AMD_P2P": "n"}
    built.binary["proc/config.gz"] = base64.b64encode(b"no gzip").decode()
    assert (read_kernel(built.tree()).config.value or {})["CONFIG_HSA_AMD_P2P"] == "y"


def test_a_bomb_in_place_of_a_configuration_is_not_unpacked_whole() -> None:
    built = Built("invented")
    built.binary["proc/config.gz"] = base64.b64encode(
        gzip.compress(b"#" * (1 << 24) + b"\nCONFIG_HSA_AMD=y\n")
    ).decode()
    assert read_kernel(built.tree()).config.value is None


@pytest.mark.parametrize("release", ["../../etc/passwd", "a b", "", "x" * 200])
def test_a_release_that_is_none_names_no_file(release: str) -> None:
    built = Built("invented")
    built.process["release"] = release
    assert read_kernel(built.tree()).config.value is None


def test_the_release_of_a_directory_is_read_from_its_file() -> None:
    built = Built("invented")
    del built.process["release"]
    built.files["proc/sys/kernel/osrelease"] = "7.0.0-28-generic\n"
    assert read_kernel(built.tree()).release.value == "7.0.0-28-generic"


def test_amdgpu_is_read_with_its_parameters() -> None:
    built = Built("invented").kernel(amdgpu_version="6.16.13", parameters={"pcie_p2p": "N"}).card()
    kernel = read_kernel(built.tree())
    assert kernel.amdgpu_version.value == "6.16.13"
    assert kernel.amdgpu_parameters["pcie_p2p"].value == "N"
    assert kernel.amdgpu_parameters["lockup_timeout"].value is None


def test_memory_is_in_bytes() -> None:
    host = host_of(Built("invented").memory(16, available_gib=9, swap_gib=0))
    assert (host.memory_bytes.value, host.available_bytes.value, host.swap_bytes.value) == (16 * GIB, 9 * GIB, 0)
    assert host.memory_limit_bytes.value is None


@pytest.mark.parametrize(
    ("cgroup", "files", "limit"),
    [
        ("0::/a/b\n", {"a/memory.max": 8, "a/b/memory.max": 12}, 8),
        ("0::/a/b\n", {"a/b/memory.max": "max", "memory.max": 4}, 4),
        ("0::/../../x\n", {"x/memory.max": 8}, 8),
        ("0::/\n", {"memory.max": 999}, None),
        ("", {"memory.max": 8}, 8),
        ("5:cpu,memory:/docker/1f\n0::/\n", {"memory/docker/1f/memory.limit_in_bytes": 8}, 8),
        ("5:cpu,memory:/docker/1f\n", {"memory/memory.limit_in_bytes": 6}, 6),
        ("5:cpu:/a\n", {"a/memory.max": 8}, None),
        ("0::/a\n", {"a/memory.max": "-1"}, None),
    ],
)
def test_the_lowest_limit_of_all_groups_counts(cgroup: str, files: dict[str, int | str], limit: int | None) -> None:
    built = Built("invented").memory(64)
    built.files["proc/self/cgroup"] = cgroup
    for path, value in files.items():
        built.files[f"sys/fs/cgroup/{path}"] = str(value * GIB if isinstance(value, int) else value)
    assert host_of(built).memory_limit_bytes.value == (None if limit is None else limit * GIB)


def test_outside_of_a_container_there_is_none() -> None:
    host = host_of(Built("invented"))
    assert host.container == type(host.container)(value=None, reason="no mark of a container")
    assert host.seccomp.value == 0


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_a_container_without_devices_is_seen_as_one(engine: str) -> None:
    host = host_of(Built("invented").card().container(engine, devices=False))
    assert (host.container.value, host.seccomp.value, host.shm_bytes.value) == (engine, 2, 64 << 20)
    (kfd,) = host.nodes
    assert (kfd.path, kfd.exists, kfd.usable) == ("/dev/kfd", False, None)


@pytest.mark.parametrize(
    ("path", "text", "engine"),
    [
        ("run/systemd/container", "lxc\n", "lxc"),
        ("run/systemd/container", "\x1b[2J", None),
        (".singularity.d/runscript", "#!/bin/sh", "apptainer"),
        ("proc/self/cgroup", "0::/kubepods.slice/x\n", "kubernetes"),
        ("proc/self/cgroup", "3:cpu:/docker/4f\n", "docker"),
        ("proc/self/cgroup", "0::/machine.slice/libpod-4f.scope\n", "podman"),
    ],
)
def test_containers_are_known_by_their_marks(path: str, text: str, engine: str | None) -> None:
    built = Built("invented")
    built.files[path] = text
    assert host_of(built).container.value == engine


def test_a_user_outside_of_the_group_may_not_use_the_nodes() -> None:
    host = host_of(Built("invented").card().user(groups=("audio",), usable=False))
    assert [(node.usable, node.group) for node in host.nodes] == [(False, "render"), (False, "render")]
    assert host.groups.value == ()


def test_the_cpu_is_named_by_the_system_where_no_file_does() -> None:
    built = Built("invented")
    built.files["proc/cpuinfo"] = "processor : 0\nBogoMIPS : 50\n"
    assert host_of(built).cpu.value is None
    built.process["cpu"] = "aarch64"
    assert host_of(built).cpu.value == "aarch64"
