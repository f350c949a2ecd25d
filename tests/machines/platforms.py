"""Machines that are not one Linux host with a Radeon card: other vendors, other systems, nothing, and half a file."""

from __future__ import annotations

from collections.abc import Callable

from tests.machine.trees import KRACKAN, RAPHAEL, STRIX_HALO, XT, Built, Chip, Slot
from tests.machines.case import (
    BNB_WINDOWS,
    ROCM72,
    Case,
    broken,
    case,
    cpu_stack,
    cuda_stack,
    device,
    device_wheels,
    multi_arch_stack,
    stack,
)

NVIDIA = device("0000:01:00.0", name="NVIDIA GeForce RTX 4090", arch="sm_89", gib=23.5)
STRIX = device("0000:01:00.0", name="AMD Radeon Graphics", arch="gfx1151", gib=96.0)
STRIX_CPU = "AMD RYZEN AI MAX+ 395 w/ Radeon 8060S"


def with_device(built: Built, vendor: str, device: str, kind: str) -> Built:
    """The machine with one more PCI device."""
    place = "sys/bus/pci/devices/0000:01:00.0"
    values = {"vendor": vendor, "device": device, "class": kind, "revision": "0x00"}
    built.files |= {f"{place}/{name}": value for name, value in values.items()}
    return built


def with_dxg(built: Built) -> Built:
    """The machine in WSL, with a card that Windows passes."""
    built.files["dev/dxg"] = "a device"
    return built


def only(built: Built, keep: Callable[[str], bool]) -> Built:
    """The machine with those files only; nothing is said about the others."""
    sections: list[dict[str, object]] = [built.files, built.binary, built.links, built.names, built.nodes]  # type: ignore[list-item]
    for section in sections:
        for path in [path for path in section if not keep(path)]:
            del section[path]
    return built


def windows() -> Case:
    """Nothing of the kernel's is there; torch and the packages are."""
    built = only(Built("bitsandbytes installation page: ROCm on Windows"), lambda path: False)
    built.process = {"platform": "win32", "release": "11", "shm_bytes": None}
    software = stack(torch="2.9.1+rocm7.2.1", hip="7.2.53211", libraries=BNB_WINDOWS)
    told = {"unknown": ("driver", "host_memory"), "says": ("not tested by this project",)}
    return case(built, software=software, fail=("version_untested torch",), **told)


PLATFORMS: dict[str, Case] = {
    "cuda_machine": case(
        Built("pytorch hip.rst: the same torch.cuda calls", cpu="Intel(R) Core(TM) i9-13900K").nvidia(),
        software=cuda_stack(NVIDIA), note=("other_gpu",), fine=("torch_no_gpu_needed",),
        says=("NVIDIA GeForce RTX 4090",)),
    "cuda_card_beside_an_amd_card": case(
        Built("pytorch hip.rst: torch is built for one vendor; here for the other card")
        .card(slot=Slot(width=8))
        .nvidia(slot=Slot(width=8)),
        software=cuda_stack(device("0000:04:00.0", name="NVIDIA GeForce RTX 4090", arch="sm_89", gib=23.5)),
        note=("link_half", "torch_cuda_beside"),
        says=("NVIDIA GeForce RTX 4090", "Radeon RX 7900 XT"),
    ),
    "nvidia_card_without_torch_for_it": case(Built("a machine whose only card torch cannot use").nvidia(),
        software=cpu_stack(), warn=("no_amd_gpu",), says=("NVIDIA 2684 at 0000:01:00.0",)),
    "no_gpu": case(
        with_device(Built("a server without any GPU"), "0x144d", "0xa80a", "0x010802"),
        software=cpu_stack(), warn=("no_gpu",), fine=("torch_no_gpu_needed",), says=("`lspci`",)),
    "card_not_seated": case(
        Built("uv#18730: no wheel holds code for gfx1036; the card does not answer, the processor's GPU does").igpu(
            RAPHAEL
        ),
        software=stack(devices=[device("0000:01:00.0", name="AMD Radeon Graphics", arch="gfx1036", gib=15.4)]),
        fail=("arch_missing",),
        warn=("no_card",),
        says=("torch has no code for gfx1036", "check that it is seated and powered"),
    ),
    "strix_halo": case(Built("TheRock SUPPORTED_GPUS.md: gfx1151 is release-ready", cpu=STRIX_CPU).igpu(STRIX_HALO),
        software=stack(devices=[STRIX]), note=("no_card",), fine=("arch_ok",),
        says=("leave HSA_OVERRIDE_GFX_VERSION unset", "not tested by this project")),
    "windows": windows(),
    "wsl": case(
        with_device(
            Built("ROCm/ROCm#4145: a paravirtual device and no AMD driver").kernel("6.6.87.2-microsoft-standard-WSL2"),
            *("0x1414", "0x008e", "0x030200"),
        ),
        software=stack(devices=[device(None)]),
        note=("other_gpu",),
        says=("AMD Radeon RX 7900 XT", "(WSL)"),
        never=("Not an AMD machine",),
    ),
    **{
        f"wsl_{name}": case(
            with_device(
                Built("ROCm docs, WSL: no kernel driver of AMD's").kernel("6.6.87.2-microsoft-standard-WSL2"),
                *("0x1414", "0x008e", "0x030200"),
            ),
            software=software,
            never=("seated and powered",),
            **told,  # type: ignore[arg-type]
        )
        for name, software, told in (
            ("without_a_card", cpu_stack(), {"warn": ("wsl_no_card",), "says": ("`wsl --update`",)}),
        )
    },
    **{
        f"wsl_with_a_card_and_{name}": case(
            with_dxg(Built("ROCm docs, WSL: /dev/dxg").kernel("6.6.87.2-microsoft-standard-WSL2")),
            software=software,
            never=("seated and powered",),
            **told,  # type: ignore[arg-type]
        )
        for name, software, told in (
            ("the_cpu_build", cpu_stack(), {"warn": ("wsl_torch_build",)}),
            (
                "a_torch_that_sees_none",
                stack(devices="RuntimeError: No HIP GPUs are available"),
                {"fail": ("wsl_torch_sees_nothing",), "unknown": ("torch",), "says": ("librocdxg",)},
            ),
        )
    },
    **{
        f"wsl_{name}": case(
            with_dxg(Built(source).kernel("6.6.87.2-microsoft-standard-WSL2")),
            software=software,
            environ=environ,
            note=("other_gpu",),
            **told,  # type: ignore[arg-type]
        )
        for name, source, software, environ, told in (
            (
                "with_a_multi_arch_torch_without_kernels",
                "TheRock#6997: the extra was left out, in WSL",
                multi_arch_stack(devices=[device(None)]),
                {},
                {"fail": ("device_wheel_missing",), "says": ("`torch[device-gfx1100]`",)},
            ),
            (
                "without_code_for_its_card",
                "uv#18730: a wheel for other architectures, in WSL",
                stack(devices=[device(None, name="AMD Radeon 780M", arch="gfx1103", gib=15.4)]),
                {},
                {"fail": ("arch_missing",), "says": ("AMD Radeon 780M is gfx1103",)},
            ),
            (
                "of_rdna4",
                "TheRock#7699: R9700, in WSL",
                stack(devices=[device(None, name="AMD Radeon AI PRO R9700", arch="gfx1201", gib=31.9)]),
                {},
                {"warn": ("hipblaslt_resets",), "fine": ("arch_ok",)},
            ),
            (
                "with_an_override_that_may_be_right",
                "libhsakmt topology.c: the kernel's list is not there to compare with",
                stack(devices=[device(None)]),
                {"HSA_OVERRIDE_GFX_VERSION": "11.0.0"},
                {"warn": ("environ:HSA_OVERRIDE_GFX_VERSION",), "says": ("[uncertain here: the kernel lists no GPU]",)},
            ),
        )
    },
    "docker_in_wsl": case(
        with_device(
            Built("ROCm docs, WSL: a container needs /dev/dxg").kernel("6.6.87.2-microsoft-standard-WSL2"),
            *("0x1414", "0x008e", "0x030200"),
        ).container(),
        software=stack(devices="RuntimeError: No HIP GPUs are available"),
        warn=("shm_small", "wsl_container"),
        unknown=("torch",),
        says=("`--device /dev/dxg`",),
        never=("wsl --shutdown",),
    ),
    "krackan_with_its_own_wheel": case(
        Built("TheRock SUPPORTED_GPUS.md: gfx1152 has wheels of AMD's index").igpu(KRACKAN),
        software=multi_arch_stack(*device_wheels("gfx1152", "gfx115x"), archs=f"{ROCM72} gfx1152",
                                  devices=[device("0000:01:00.0", name="AMD Radeon 860M", arch="gfx1152", gib=15.4)]),
        note=("no_card",), fine=("arch_ok",), never=("have no code for it",)),
    "rembrandt_with_much_memory": case(
        Built("LLVM AMDGPUUsage: gfx1035 is an APU, however much memory its firmware takes").igpu(
            Chip(device=0x1681, revision=0xC8, gfx_target_version=100305, vram_bytes=16 << 30)
        ),
        software=stack(devices=[device("0000:01:00.0", name="AMD Radeon 680M", arch="gfx1035", gib=16)]),
        fail=("arch_missing",), warn=("no_card",)),
    "krackan_with_pytorch_s_wheel": case(Built("uv#18730: no wheel holds code for gfx1152").igpu(KRACKAN),
        software=stack(devices=[device("0000:01:00.0", name="AMD Radeon 860M", arch="gfx1152", gib=15.4)]),
        fail=("arch_missing",), warn=("no_card",)),
    "strix_halo_without_its_wheels": case(Built("TheRock#6997: the extra was left out").igpu(STRIX_HALO),
        software=multi_arch_stack(devices=[STRIX]), fail=("device_wheel_missing",), note=("no_card",),
        says=("`torch[device-gfx1151]`",)),
    "half_a_capture": case(
        only(
            Built("a capture of which somebody has cut out what he found private").card(slot=Slot(width=8)).igpu(),
            lambda path: (
                path.startswith(("sys/bus/pci", "sys/class/kfd", "dev/"))
                and not any(word in path for word in ("hwmon", "aer_", "mem_info", "metrics", "link_width", "iommu"))
            ),
        ),
        note=("igpu_hidden",),
        unknown=("host_memory", "link", "link_errors", "sensors"),
        says=("`export HIP_VISIBLE_DEVICES=0`",),
    ),
    "chip_of_no_table": case(
        Built("a card that this project's table does not have").card(
            type(XT)(device=0x9999, revision=0, gfx_target_version=120100, vram_bytes=XT.vram_bytes)
        ),
        software=stack(devices=[device(name="AMD Radeon Graphics", arch="gfx1210")]),
        fail=("arch_missing",),
        unknown=("cards",),
    ),
    "nothing_readable": case(only(Built("a process that may read nothing of the machine"), lambda path: False),
        software=broken("torch is not installed", packages={"torch": None}), fail=("torch_missing",),
        unknown=("driver", "host_memory")),
}  # fmt: skip
