"""Invented machines: the kernel's files of AMD GPUs, written under a temporary root."""

from __future__ import annotations

from pathlib import Path

GIB = 1 << 30


def write_cpu(root: Path, node: int = 0) -> None:
    """A topology node of a CPU, as every real machine has first."""
    write_node(root, node, {"cpu_cores_count": 16, "simd_count": 0, "gfx_target_version": 0}, banks=[(0, 64 * GIB)])


def write_gpu(
    root: Path,
    node: int,
    *,
    version: int = 110000,
    vram: int = 20 * GIB,
    location: int = 0x0300,
    name: str = "ip discovery",
) -> None:
    """A topology node of a GPU; the default is an RX 7900 XT."""
    properties = {"cpu_cores_count": 0, "simd_count": 168, "gfx_target_version": version, "location_id": location}
    write_node(root, node, {**properties, "domain": 0}, banks=[(1, vram)], name=name)


def write_node(
    root: Path, node: int, properties: dict[str, int], *, banks: list[tuple[int, int]], name: str = ""
) -> None:
    directory = root / f"sys/class/kfd/kfd/topology/nodes/{node}"
    directory.mkdir(parents=True)
    (directory / "name").write_text(f"{name}\n")
    (directory / "properties").write_text("".join(f"{key} {value}\n" for key, value in properties.items()))
    for bank, (heap, size) in enumerate(banks):
        (directory / f"mem_banks/{bank}").mkdir(parents=True)
        (directory / f"mem_banks/{bank}/properties").write_text(f"heap_type {heap}\nsize_in_bytes {size}\nflags 0\n")
