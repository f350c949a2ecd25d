"""The addresses of the sources that rules, findings and tables name. A source without a certain address has none."""

from __future__ import annotations

# An issue names its repository in full or by its last part, the first of these that has it. GitHub redirects to pull
# requests.
_REPOSITORIES = (
    "pytorch/pytorch ROCm/rccl ROCm/rocm-systems ROCm/TheRock unslothai/unsloth ROCm/aotriton ROCm/amdgpu ROCm/vllm "
    "ROCm/rocm-libraries ROCm/pytorch getsolus/packages huggingface/accelerate "
    "bitsandbytes-foundation/bitsandbytes ggml-org/llama.cpp "
    "turboderp-org/exllamav3 pytorch/vision astral-sh/uv ROCm/legacy-rocm-build"
)
_ROCM_DOCS = "https://rocm.docs.amd.com/"
_KERNEL_DOCS = "https://docs.kernel.org/"
_SYSTEMS = "https://github.com/ROCm/rocm-systems/blob/develop/projects/"
_PAGES = {
    "HIP environment variables page": f"{_ROCM_DOCS}projects/HIP/en/latest/reference/env_variables.html",
    "RCCL environment variables page": f"{_ROCM_DOCS}projects/rccl/en/latest/api-reference/env-variables.html",
    "ROCm docs: Docker": f"{_ROCM_DOCS}projects/install-on-linux/en/latest/how-to/docker.html",
    "ROCm docs: prerequisites": f"{_ROCM_DOCS}projects/install-on-linux/en/latest/install/prerequisites.html",
    "ROCm docs: GPU architecture specifications": f"{_ROCM_DOCS}en/latest/reference/gpu-arch-specs.html",
    "ROCm docs: WSL": f"{_ROCM_DOCS}projects/radeon-ryzen/en/latest/docs/install/installrad/wsl/install-radeon.html",
    "ROCm docs: IOMMU": f"{_ROCM_DOCS}en/latest/conceptual/iommu.html",
    "clr flags.hpp": f"{_SYSTEMS}clr/rocclr/utils/flags.hpp",
    "clr rocsettings.cpp": f"{_SYSTEMS}clr/rocclr/device/rocm/rocsettings.cpp",
    "LLVM AMDGPUUsage": "https://llvm.org/docs/AMDGPUUsage.html",
    "libhsakmt topology.c": f"{_SYSTEMS}rocr-runtime/libhsakmt/src/topology.c",
    "rccl init.cc": f"{_SYSTEMS}rccl/src/init.cc",
    "rccl param.h": f"{_SYSTEMS}rccl/src/include/param.h",
    "rocr flag.h": f"{_SYSTEMS}rocr-runtime/runtime/hsa-runtime/core/util/flag.h",
    "pytorch hip.rst": "https://docs.pytorch.org/docs/stable/notes/hip.html",
    "torch CUDAAllocatorConfig.h": "https://github.com/pytorch/pytorch/blob/main/c10/cuda/CUDAAllocatorConfig.h",
    "torch Copy.cu": "https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/Copy.cu",
    "PyTorch: previous versions": "https://pytorch.org/get-started/previous-versions/",
    "PyTorch README: Docker image": "https://github.com/pytorch/pytorch#docker-image",
    "unsloth install.sh": "https://github.com/unslothai/unsloth/blob/main/install.sh",
    "TheRock RELEASES.md": "https://github.com/ROCm/TheRock/blob/main/RELEASES.md",
    "bitsandbytes installation page": "https://huggingface.co/docs/bitsandbytes/main/en/installation",
    "kernel documentation: amdgpu memory": f"{_KERNEL_DOCS}gpu/amdgpu/driver-misc.html",
    "kernel documentation: amdgpu module parameters": f"{_KERNEL_DOCS}gpu/amdgpu/module-parameters.html",
    "kernel documentation: amdgpu thermal controls": f"{_KERNEL_DOCS}gpu/amdgpu/thermal.html",
    "kernel documentation: cgroup v2": f"{_KERNEL_DOCS}admin-guide/cgroup-v2.html",
    "kernel documentation: PCI Express AER": f"{_KERNEL_DOCS}PCI/pcieaer-howto.html",
    "kernel documentation: sysfs-bus-pci": f"{_KERNEL_DOCS}admin-guide/abi-testing.html",
    "QLoRA, appendix E": "https://arxiv.org/abs/2305.14314",
}


def link_of(source: str) -> str:
    """The address of an issue such as ``rccl#1129``, or of a document; empty if unknown."""
    # ROCm/ROCm was renamed, with the same numbers; the old name is to be reused.
    name, _, number = source.replace("ROCm/ROCm#", "legacy-rocm-build#").partition("#")
    repository = next((known for known in _REPOSITORIES.split() if f"/{known}".endswith(f"/{name}")), "")
    if number.isdecimal() and repository:
        return f"https://github.com/{repository}/issues/{number}"
    return _PAGES.get(source, "")


def links_of(source: str) -> tuple[str, ...]:
    """The known addresses of several sources, separated by semicolons."""
    return tuple(dict.fromkeys(filter(None, (link_of(name.strip()) for name in source.split(";")))))
