"""Machines that differ in their cards, slots, kernels, permissions and hosts."""

from __future__ import annotations

from typing import Any

from tests.doctor.expected import Machine, machine
from tests.doctor.stacks import cpu_stack, device, stack
from tests.hardware.parts import GIB, MIB, STRIX_HALO, XT, XT_9070, Readings, Slot
from tests.hardware.trees import Built

PAIR = (device(), device(1, bus=6))


def _two_cards(source: str, **kernel: Any) -> Built:
    return Built(source).kernel(**kernel).card(slot=Slot(width=8)).card(slot=Slot(width=8))


def _without(built: Built, path: str) -> Built:
    """The machine without everything below a path."""
    for section in (built.files, built.binary, built.links, built.names, built.nodes):
        for name in [name for name in section if name.startswith(path)]:
            del section[name]  # type: ignore[attr-defined]
    return built


def _listing_no_gpu(built: Built) -> Built:
    """The machine with a PCI bus that has a disc on it and nothing else."""
    place = "sys/bus/pci/devices/0000:01:00.0"
    ids = {"class": "0x010802", "vendor": "0x144d", "device": "0xa80a", "revision": "0x00"}
    built.files.update({f"{place}/{name}": f"{value}\n" for name, value in ids.items()})
    return built


HARDWARE: dict[str, Machine] = {
    "healthy": machine(Built("a healthy machine with one 7900 XT").card()),
    "igpu": machine(Built("TheRock#5543: 7900 XT beside the GPU of a 7800X3D").card().igpu(), "igpu_hidden"),
    "igpu_hidden_by_user": machine(
        Built("TheRock#5543, hidden by its owner").card().igpu(), environ={"HIP_VISIBLE_DEVICES": "0"}
    ),
    "igpu_chosen": machine(
        Built("TheRock#5543, the filter shows the wrong GPU").card().igpu(),
        *("igpu_instead", "torch_sees_fewer"),
        environ={"HIP_VISIBLE_DEVICES": "1"},
        software=stack(devices=[device(bus=4, arch="gfx1036", gib=0.5)]),
        code=2,
    ),
    "igpu_by_uuid": machine(
        Built("a filter that is not a list of indices").card().igpu(),
        unknown=("integrated",),
        environ={"ROCR_VISIBLE_DEVICES": "GPU-8a1c4ed1b6c33101"},
    ),
    "two_cards": machine(
        _two_cards("two 7900 XT, x8 each"),
        *("link_half", "link_half", "iommu_state"),
        software=stack(devices=PAIR),
    ),
    "two_cards_chipset": machine(
        Built("FACTS 1a: many boards give x16 and x4 through the chipset")
        .card()
        .card(slot=Slot(width=4, chipset=True)),
        *("link_narrow", "links_unequal", "slot_of_chipset_pair", "iommu_state"),
        software=stack(devices=(device(), device(1, bus=8))),
        code=1,
    ),
    "two_cards_no_p2p": machine(
        _two_cards("llama.cpp#12012: a kernel without peer-to-peer", config={"CONFIG_HSA_AMD": "y"}),
        *("link_half", "link_half", "iommu_state", "peer_config_missing", "no_direct_link"),
        software=stack(devices=PAIR),
        code=1,
    ),
    "two_cards_p2p_off": machine(
        _two_cards("ROCm/ROCm#6342: direct copies switched off", parameters={"pcie_p2p": "N"}),
        *("link_half", "link_half", "iommu_state", "pcie_p2p_off", "no_direct_link"),
        software=stack(devices=PAIR),
    ),
    "two_cards_no_rebar": machine(
        Built("small windows on two cards")
        .card(slot=Slot(width=8), bar_bytes=256 * MIB)
        .card(slot=Slot(width=8), bar_bytes=256 * MIB),
        *("link_half", "link_half", "iommu_state", "bar_small_pair", "bar_small_pair"),
        "no_direct_link",
        software=stack(devices=PAIR),
        code=1,
    ),
    "two_cards_no_iommu": machine(
        Built("IOMMU off in the BIOS, two cards").iommu(None).card(slot=Slot(width=8)).card(slot=Slot(width=8)),
        *("link_half", "link_half", "iommu_state"),
        software=stack(devices=PAIR),
    ),
    "two_cards_passthrough": machine(
        Built("rccl#1129: iommu=pt, two cards")
        .kernel(cmdline="ro iommu=pt")
        .iommu("identity")
        .card(slot=Slot(width=8))
        .card(slot=Slot(width=8)),
        *("link_half", "link_half", "iommu_state"),
        software=stack(devices=PAIR),
    ),
    "two_cards_one_seen": machine(
        _two_cards("two cards, one of them filtered out"),
        *("link_half", "link_half", "iommu_state", "torch_sees_fewer"),
        environ={"HIP_VISIBLE_DEVICES": "0"},
    ),
    "no_iommu": machine(Built("one card, IOMMU off").iommu(None).card()),
    "iommu_translating": machine(Built("one card, IOMMU translating").iommu("DMA").card()),
    "kernel_28": machine(
        Built("ROCm/ROCm#6523: Ubuntu 24.04 HWE").kernel("7.0.0-28-generic").card(),
        *("kernel_mmap_stall", "kernel_sdma_faults"),
        code=1,
    ),
    "kernel_fixed": machine(
        Built("ROCm/ROCm#6523: the kernel with the fix").kernel("7.0.0-30-generic").card(),
        "kernel_sdma_faults",
        code=1,
    ),
    "kernel_28_rdna4": machine(
        Built("the same kernel under a 9070 XT").kernel("7.0.0-28-generic").card(XT_9070),
        "kernel_mmap_stall",
        software=stack(devices=[device(arch="gfx1201", gib=15.9)]),
        code=1,
    ),
    "kernel_old": machine(
        Built("ROCm/ROCm#6123: kernel 5.15").kernel("5.15.0-125-generic").card(), "kernel_too_old", code=1
    ),
    "no_kfd_in_container": machine(
        Built("a container without /dev/kfd").card().container("docker", devices=False, shm_bytes=64 * MIB),
        *("kfd_not_in_container", "seccomp_filter", "shm_small", "torch_sees_nothing"),
        software=stack(devices="RuntimeError: No HIP GPUs are available"),
        code=2,
    ),
    "container": machine(
        Built("a container with everything but shared memory").card().container("podman", shm_bytes=64 * MIB),
        *("seccomp_filter", "shm_small"),
        code=1,
    ),
    "container_limited": machine(
        Built("a container with a limit on memory")
        .card()
        .container("docker", shm_bytes=8 * GIB)
        .memory_limit(12 * GIB),
        *("seccomp_filter", "memory_limit"),
    ),
    "kfd_without_node": machine(
        _without(Built("a chroot without device nodes").card(), "dev/"),
        *("kfd_node_missing", "torch_sees_nothing"),
        software=stack(devices="RuntimeError: No HIP GPUs are available"),
        code=2,
    ),
    "not_in_render": machine(
        Built("the user is not in the group render").card().user(groups=("video",), usable=False),
        *("node_not_usable", "torch_sees_nothing"),
        software=stack(devices="RuntimeError: No HIP GPUs are available"),
        code=2,
    ),
    "vfio": machine(
        Built("the card has been given to a virtual machine").card(driver="vfio-pci", kfd=False),
        *("driver_not_bound", "torch_sees_nothing"),
        software=stack(devices="RuntimeError: No HIP GPUs are available"),
        code=2,
    ),
    "no_compute_driver": machine(
        Built("amdgpu without KFD").card(kfd=False),
        *("kfd_missing", "torch_sees_nothing"),
        unknown=("atomics",),
        software=stack(devices="RuntimeError: No HIP GPUs are available"),
        code=2,
    ),
    "no_rebar": machine(Built("resizable BAR off").card(bar_bytes=256 * MIB), "bar_small"),
    "aer": machine(
        Built("errors on the link").card(aer={"correctable": 1280, "nonfatal": 2}),
        "aer_errors",
        "aer_corrected",
        code=1,
    ),
    "x4_idle": machine(
        Built("a misplaced card at rest").card(slot=Slot(width=4, idle=True)), "link_narrow", "link_slow_now", code=1
    ),
    "chipset": machine(
        Built("one card, on the chipset").card(slot=Slot(width=4, chipset=True)),
        *("link_narrow", "slot_of_chipset"),
        software=stack(devices=[device(bus=5)]),
        code=1,
    ),
    "hot": machine(
        Built("a hot card that slows down").card(
            readings=Readings(hotspot=108.0, power=314.0, busy=99, throttle=1 << 32)
        ),
        *("hotspot", "throttled"),
        code=1,
    ),
    "desktop": machine(Built("a desktop on the card").card(readings=Readings(vram_used=1400 * MIB)), "vram_taken"),
    "busy": machine(
        Built("another program on the card").card(readings=Readings(vram_used=9 * GIB)), "vram_scarce", code=1
    ),
    "small_host": machine(Built("16 GiB of memory, no swap").memory(16, swap_gib=0).card(), "host_memory_small"),
    "overdrive": machine(
        Built("clocks unlocked").kernel(parameters={"ppfeaturemask": "0xffffffff"}).card(), "overdrive"
    ),
    "strix_halo": machine(
        Built("Strix Halo alone", cpu="AMD RYZEN AI MAX+ 395").igpu(STRIX_HALO),
        *("only_integrated", "strix_halo"),
        software=stack(devices=[device(bus=1, arch="gfx1151", gib=96)]),
    ),
    "rdna2": machine(
        Built("a chip that the table does not have").card(
            type(XT)(device=0x9999, revision=0, gfx_target_version=100300, simd_count=160, vram_bytes=16 * GIB)
        ),
        "card_unknown",
        software=stack(devices=[device(arch="gfx1030", gib=16)]),
    ),
    "cuda_machine": machine(
        Built("an NVIDIA machine").nvidia(),
        "other_gpu",
        software=stack(
            torch="2.13.0+cu130",
            hip=None,
            cuda="13.0",
            archs="sm_90",
            devices=[device(bus=1, arch="sm_89", gib=24)],
            system_rocm="",
        )
        | {"rocm_version": {"reason": "/opt/rocm/.info/version: No such file or directory"}},
    ),
    "nvidia_beside": machine(
        Built("an NVIDIA card beside the AMD card, and a CUDA build").card().nvidia(),
        "torch_cuda_beside",
        software=stack(
            torch="2.13.0+cu130", hip=None, cuda="13.0", archs="sm_89", devices=[device(bus=4, arch="sm_89", gib=24)]
        ),
    ),
    "wsl": machine(
        _listing_no_gpu(Built("WSL: the driver is the host's")),
        "rocm_without_kfd",
    ),
    "nvidia_unused": machine(
        Built("an NVIDIA card that torch cannot use").nvidia(), "no_amd_gpu", software=cpu_stack(), code=1
    ),
    "no_gpu": machine(_listing_no_gpu(Built("no GPU at all")), "no_gpu", software=cpu_stack(), code=1),
    "windows": Machine(
        recording={
            "schema": 1,
            "source": "Windows, as the form of a recording has it",
            "process": {"platform": "windows", "release": "11", "cpu": "AMD Ryzen 7 7800X3D"},
            "software": stack(torch="2.13.0+rocm7.2.1"),
        },
        finds={"windows": 1},
        unknown=frozenset({"driver", "host_memory"}),
    ),
    "pci_unread": machine(
        _without(Built("a sandbox without the PCI bus").card(), "sys/bus/pci"),
        "pci_unread",
        software=stack(devices=[device()]),
        code=1,
    ),
}
