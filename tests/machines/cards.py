"""Machines that differ in their cards, in where the cards sit, and in who may use them."""

from __future__ import annotations

from typing import Any

from tests.machine.trees import GIB, MIB, RAPHAEL, XT_6500, XT_7600, XT_9070, XTX, Built, Readings, Slot
from tests.machines.case import Case, case, device, pair, stack

HALF = Slot(width=8)
FIRST, SECOND, BEHIND_CHIPSET = "0000:03:00.0", "0000:06:00.0", "0000:08:00.0"
NO_HIP_GPUS = "RuntimeError: No HIP GPUs are available"
# How AMD's two pages contradict each other (ROCm docs, IOMMU; rccl init.cc).
IOMMU_WORDS = ("AMD documents two contradictory settings", "RCCL: iommu=pt", "while it passes, change nothing")


def two_cards(source: str, *, iommu: str | None = "DMA-FQ", **kernel: Any) -> Built:
    """Two 7900 XT that share the sixteen lanes of the processor."""
    return Built(source).kernel(**kernel).iommu(iommu).card(slot=HALF).card(slot=HALF)


CARDS: dict[str, Case] = {
    "healthy_xt": case(
        Built("freebsd/drm-kmod#426: the bridges of an AM5 board, one 7900 XT in its full slot").card(),
        fine=(
            *("driver_ok", "permissions_ok", "card_known", "variables_ok", "torch_rocm", "arch_ok", "bnb_library"),
            *("versions_tested", "kernel_ok", "link_ok", "bar_full", "aer_clean"),
            *("host_memory", "shm_ok", "vram_free", "sensors_ok", "compiler_ok"),
        ),
        says=("gfx1100, 20.0 GiB", "31.5 GB/s each way by arithmetic"),
    ),
    "behind_an_igpu": case(Built("TheRock#5543: the processor's GPU is device 0").igpu(RAPHAEL).card(),
        software=stack(devices=[device("0000:04:00.0")]), note=("igpu_hidden",),
        says=("`export HIP_VISIBLE_DEVICES=1`",), never=("HIP_VISIBLE_DEVICES=0",)),
    "larger_card_behind_an_igpu": case(
        Built("TheRock#5543, with two cards of different size").card(slot=HALF).igpu(RAPHAEL).card(XTX, slot=HALF),
        software=stack(devices=pair("0000:07:00.0", name="AMD Radeon RX 7900 XTX", gib=23.98)),
        warn=("cards_unequal",),
        note=("igpu_hidden",),
        says=(
            "`export HIP_VISIBLE_DEVICES=2,0`",
            "Radeon RX 7900 XT at 0000:03:00.0, Radeon RX 7900 XTX at 0000:07:00.0",
            "train on the larger card alone",
        ),
    ),
    "igpu_hidden_by_its_owner": case(Built("TheRock#5543: hidden, PASS").card().igpu(RAPHAEL),
        environ={"HIP_VISIBLE_DEVICES": "0"}, fine=("igpu_filtered",)),
    "x8_x8": case(two_cards("general knowledge: two cards are x8/x8 on most AM5 boards"),
        software=stack(devices=pair()), fine=("bar_full", "aer_clean"),
        says=("15.8 GB/s each way by arithmetic; 13 to 14 are to be expected", "IOMMU translating", *IOMMU_WORDS)),
    "two_cards_passthrough": case(
        two_cards("rccl#1129, ROCm/ROCm#6342", iommu="identity", cmdline="ro quiet iommu=pt", pcie_p2p="N"),
        software=stack(devices=pair()),
        says=("IOMMU passthrough", "boot parameter iommu=pt", "amdgpu parameter pcie_p2p=N", *IOMMU_WORDS)),
    "x16_and_x4_of_the_chipset": case(
        Built("ROCm/ROCm#2429: HIP errors with two 7900 XTX, one of them on four lanes of the chipset")
        .card(XTX)
        .card(XTX, slot=Slot(width=4, chipset=True)),
        software=stack(devices=pair(BEHIND_CHIPSET, name="AMD Radeon RX 7900 XTX", gib=23.98)),
        warn=(f"link_narrow {BEHIND_CHIPSET}", f"slot_of_chipset {BEHIND_CHIPSET}"),
        fine=("link_ok",),
        says=(
            "x4 link: 7.9 GB/s at most",
            "6.5 to 7 are to be expected",
        ),
    ),
    "one_card_on_the_chipset": case(
        Built("PCIe arithmetic: 6.5 GB/s is what a misplaced card gives").card(
            slot=Slot(width=4, chipset=True, idle=True)
        ),
        software=stack(devices=[device("0000:05:00.0")]),
        warn=("link_narrow",),
        note=("slot_of_chipset",),
        says=("slow, not wrong", "x4 at 2.5 GT/s (able: 16)"),
    ),
    "two_cards_without_rebar": case(
        Built("ROCm/ROCm#6342: a small window on the second card").card(slot=HALF).card(slot=HALF, bar_bytes=256 * MIB),
        software=stack(devices=pair()), warn=(f"bar_small {SECOND}",), fine=("bar_full",),
        says=("the largest BAR is 256 MiB, and the card has 20 GiB", "Above 4G decoding")),
    "rdna4": case(Built("hf.co/hardware: a 9070 XT, PCIe 5.0").card(XT_9070, slot=Slot(speed=32.0)),
        software=stack(devices=[device(name="AMD Radeon RX 9070 XT", arch="gfx1201", gib=15.92)]),
        environ={"TORCH_BLAS_PREFER_HIPBLASLT": "0"},
        fine=("card_known", "arch_ok", "link_ok", "hipblaslt_off"),
        says=("Radeon RX 9070 XT", "63.0 GB/s each way by arithmetic")),
    "a_card_of_eight_lanes": case(Built("AMD's specifications: a RX 7600 has eight lanes").card(XT_7600),
        software=stack(devices=[device(name="AMD Radeon RX 7600", arch="gfx1102", gib=7.98)]), unknown=("cards",),
        fine=("link_whole", "arch_ok"), says=("all lanes of the card",), never=("move the card to a slot",)),
    "a_card_of_four_lanes": case(Built("AMD's specifications: a RX 6500 XT has four lanes").card(XT_6500),
        software=stack(devices=[device(name="AMD Radeon RX 6500 XT", arch="gfx1034", gib=3.98)]), unknown=("cards",),
        fail=("arch_related_missing",), fine=("link_whole",), never=("move the card to a slot",)),
    "a_card_of_eight_lanes_in_four": case(
        Built("a RX 7600 in a slot of four lanes").card(XT_7600, slot=Slot(width=4)),
        software=stack(devices=[device(name="AMD Radeon RX 7600", arch="gfx1102", gib=7.98)]), unknown=("cards",),
        warn=("link_narrow",)),
    "a_card_of_eight_lanes_in_pcie_3": case(
        Built("a RX 7600 on a board of PCIe 3.0").card(XT_7600, slot=Slot(speed=8.0)),
        software=stack(devices=[device(name="AMD Radeon RX 7600", arch="gfx1102", gib=7.98)]), unknown=("cards",),
        warn=("link_narrow",)),
    **{
        f"{tool}_without_devices": case(
            Built(source).card().container(devices=False, shm_bytes=16 * GIB, tool=tool),
            software=stack(devices=NO_HIP_GPUS), fail=("device_nodes_missing", "torch_sees_nothing"),
            says=("/dev/kfd and /dev/dri/renderD* do not exist", way), never=("`--device /dev/kfd",))
        for tool, source, way in (
            ("lxc", "Proxmox docs: device passthrough; Incus docs: devices", "`dev0: /dev/kfd,gid=GID`"),
            ("systemd-nspawn", "systemd-nspawn(1): --bind, and the unit's DeviceAllow", "`--bind /dev/kfd"),
            ("apptainer", "Apptainer docs, GPU support: --rocm", "`--rocm`"),
            ("kubernetes", "AMD's device plugin for Kubernetes", "`amd.com/gpu: 1`"),
        )
    },
    "lxc_with_one_of_two_devices": case(
        Built("Proxmox docs: dev0 was passed and dev1 forgotten").card().without_node("dev/dri/renderD128")
        .container(shm_bytes=16 * GIB, tool="lxc"),
        software=stack(devices=NO_HIP_GPUS), fail=("device_nodes_missing", "torch_sees_nothing"),
        says=("/dev/dri/renderD* does not exist", "`dev1: /dev/dri/renderD128,gid=GID`")),
    "kubernetes_without_the_group": case(
        Built("Kubernetes docs: supplementalGroups").card().user(usable=False, group="109")
        .container(tool="kubernetes"),
        software=stack(devices=NO_HIP_GPUS), fail=("node_not_usable", "torch_sees_nothing"), warn=("shm_small",),
        says=("`supplementalGroups: [109]`", "`medium: Memory`"), never=("--group-add", "--shm-size")),
    "container_without_kfd": case(Built("ROCm docs, Docker: started without --device").card().container(devices=False),
        software=stack(devices=NO_HIP_GPUS), fail=("device_nodes_missing", "torch_sees_nothing"), warn=("shm_small",),
        says=("`--device /dev/kfd --device /dev/dri`", "/dev/kfd and /dev/dri/renderD*", "`--shm-size 8g`")),
    "container_in_order": case(
        Built("ROCm docs, Docker: with everything, and a limit on memory")
        .card()
        .container(shm_bytes=16 * GIB)
        .memory_limit(24 * GIB),
        note=("memory_limit",),
        fine=("permissions_ok", "shm_ok"),
        says=("a memory limit of 24.0 GiB",),
    ),
    "user_not_in_render": case(Built("ROCm docs, prerequisites: the user is in video only").card().user(usable=False),
        software=stack(devices=NO_HIP_GPUS), fail=("node_not_usable", "torch_sees_nothing"),
        says=("`sudo usermod -aG render,video $USER`", "/dev/kfd and /dev/dri/renderD128")),
    "podman_without_the_users_groups": case(
        Built("podman-run(1): rootless, the host's groups are nogroup").card().user(usable=False, group="nogroup")
        .container(shm_bytes=16 * GIB, tool="podman"),
        software=stack(devices=NO_HIP_GPUS), fail=("node_not_usable", "torch_sees_nothing"),
        says=("`--group-add keep-groups`",), never=("--group-add nogroup", "usermod", "Proxmox", "Rootless Docker")),
    "rootless_docker": case(
        Built("Docker docs, rootless: groups are not mapped").card().user(usable=False, group="nobody")
        .container(shm_bytes=16 * GIB),
        software=stack(devices=NO_HIP_GPUS), fail=("node_not_usable", "torch_sees_nothing"),
        says=("use rootful Docker or podman",), never=("--group-add nobody", "usermod")),
    **{
        f"apptainer_with_the_group_{group}": case(
            Built("Apptainer docs, GPU support: the user's own rights count").card().user(usable=False, group=group)
            .container(shm_bytes=16 * GIB, tool="apptainer"),
            software=stack(devices=NO_HIP_GPUS), fail=("node_not_usable", "torch_sees_nothing"),
            says=("`sudo usermod -aG render,video $USER`", "`--rocm`"), never=("--group-add",))
        for group in ("nobody", "render", "109")
    },
    "lxc_without_a_group": case(
        Built("Proxmox docs: /dev/kfd is root:root in a plain LXC").card().user(usable=False, group="root")
        .container(shm_bytes=16 * GIB, tool="lxc"),
        software=stack(devices=NO_HIP_GPUS), fail=("node_not_usable", "torch_sees_nothing"),
        says=("no group helps", "`dev0: /dev/kfd,gid=GID`"), never=("--group-add root", "usermod")),
    "no_udev_rule": case(Built("ROCT-Thunk-Interface#36: no rule gives /dev/kfd a group").card()
        .user(usable=False, group="root"),
        software=stack(devices=NO_HIP_GPUS), fail=("node_not_usable", "torch_sees_nothing"),
        says=("/etc/udev/rules.d/", 'KERNEL=="kfd"'), never=("--group-add root", "usermod")),
    "docker_with_another_number": case(
        Built("ROCm docs, Docker: the image does not know the host's group 109").card().user(usable=False, group="109")
        .container(shm_bytes=16 * GIB),
        software=stack(devices=NO_HIP_GPUS), fail=("node_not_usable", "torch_sees_nothing"),
        says=("`--group-add 109`",), never=("usermod",)),
    "card_fell_off_the_bus": case(
        Built("TheRock#8232: a 7900 XTX on OCuLink that did not wake up").card(XTX, slot=Slot(width=4)).asleep("error"),
        software=stack(devices=NO_HIP_GPUS), fail=("card_lost", "torch_sees_nothing"),
        says=("`amdgpu.runpm=0`", "its power management says error")),
    "card_fell_off_the_bus_awake": case(
        Built("TheRock#8232: without power management it is a cable").card(slot=Slot(width=4)).asleep("active")
        .parameter(runpm="0"),
        software=stack(devices=NO_HIP_GPUS), fail=("card_lost", "torch_sees_nothing"), never=("amdgpu.runpm=0",),
        says=("reseat the card",)),
    "second_card_fell_off_the_bus": case(two_cards("TheRock#8232: of two cards, one did not wake up").asleep("error"),
        fail=("card_lost",), note=("torch_sees_fewer",), fine=("link_ok",), says=(f"{SECOND}: its link reads",)),
    "card_that_slept": case(Built("kernel documentation: an idle card is suspended").card().asleep("suspended"),
        note=("card_slept",)),
    "given_to_a_virtual_machine": case(
        Built("ROCm docs, prerequisites: vfio-pci has the card").kernel(cmdline="ro nomodeset")
        .card(driver="vfio-pci", kfd=False),
        software=stack(devices=NO_HIP_GPUS), fail=("driver_not_bound", "torch_sees_nothing"), fine=("arch_ok",),
        says=("vfio-pci", "modprobe amdgpu", "boot parameter nomodeset")),
    "one_of_two_given_to_a_virtual_machine": case(
        Built("kernel documentation, VFIO: the second card is not this system's; for one card the IOMMU is no matter")
        .card(slot=HALF)
        .card(slot=HALF, driver="vfio-pci", kfd=False),
        note=(f"link_half {FIRST}",),
        never=("iommu=pt", "pair test"),
    ),
    "kernel_without_kfd": case(Built("ROCm docs, prerequisites: amdgpu without its compute part").card(kfd=False),
        software=stack(devices=NO_HIP_GPUS), fail=("kfd_missing", "torch_sees_nothing"), fine=("arch_ok",),
        says=("CONFIG_HSA_AMD",)),
    "link_errors_since_boot": case(
        Built("rocm-libraries#12344: the counters of a marginal link").card(aer={"correctable": 1280, "nonfatal": 2}),
        warn=("aer_errors",), says=("2 nonfatal", "read the counter again under load")),
    "another_program_on_the_card": case(
        Built("an inference server holds most of the memory").card(readings=Readings(vram_used=15 * GIB)),
        warn=("vram_taken",), says=("15.0 of 20.0 GiB",)),
    "hot_and_throttled": case(
        Built("general knowledge: RDNA3 regulates on the hotspot, up to about 110 C").card(
            readings=Readings(edge=84.0, hotspot=107.0, memory=92.0, power=302.0, busy=99, throttle=1 << 34)
        ),
        warn=("hotspot",),
        says=("107 C",),
    ),
}  # fmt: skip
