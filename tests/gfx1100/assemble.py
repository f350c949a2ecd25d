"""Words of gfx1100 instructions, for hand-written test kernels: v(5) is v5, numbers below 128 are scalar registers."""

from __future__ import annotations

import struct

VCC, NULL, M0, EXEC, LITERAL = 106, 124, 125, 126, 255


def v(number: int) -> int:
    """The operand code of a vector register."""
    return 256 + number


def const(number: int) -> int:
    """The operand code of an inline integer, -16 to 64."""
    return 128 + number if number >= 0 else 192 - number


def sop1(op: int, dst: int, src: int) -> list[int]:
    return [0xBE800000 | dst << 16 | op << 8 | src]


def sop2(op: int, dst: int, a: int, b: int) -> list[int]:
    return [0x80000000 | op << 23 | dst << 16 | b << 8 | a]


def sopc(op: int, a: int, b: int) -> list[int]:
    return [0xBF000000 | op << 16 | b << 8 | a]


def sopk(op: int, dst: int, immediate: int) -> list[int]:
    return [0xB0000000 | op << 23 | dst << 16 | (immediate & 0xFFFF)]


def sopp(op: int, immediate: int = 0) -> list[int]:
    return [0xBF800000 | op << 16 | (immediate & 0xFFFF)]


def smem(op: int, dst: int, base: int, offset: int = 0, soffset: int = NULL) -> list[int]:
    return [0xF4000000 | op << 18 | dst << 6 | base >> 1, (offset & 0x1FFFFF) | soffset << 25]


def vop1(op: int, dst: int, src: int) -> list[int]:
    return [0x7E000000 | dst << 17 | op << 9 | src]


def vop2(op: int, dst: int, a: int, b: int) -> list[int]:
    return [op << 25 | dst << 17 | (b & 255) << 9 | a]


def vopc(op: int, a: int, b: int) -> list[int]:
    return [0x7C000000 | op << 17 | (b & 255) << 9 | a]


def vop3(
    op: int,
    dst: int,
    a: int,
    b: int = 0,
    c: int = 0,
    *,
    neg: int = 0,
    abs: int = 0,
    opsel: int = 0,
    clamp: int = 0,
    omod: int = 0,
) -> list[int]:
    return [
        0xD4000000 | op << 16 | clamp << 15 | opsel << 11 | abs << 8 | dst,
        a | b << 9 | c << 18 | omod << 27 | neg << 29,
    ]


def vop3sd(op: int, dst: int, sdst: int, a: int, b: int = 0, c: int = 0) -> list[int]:
    return [0xD4000000 | op << 16 | sdst << 8 | dst, a | b << 9 | c << 18]


def vop3p(
    op: int,
    dst: int,
    a: int,
    b: int = 0,
    c: int = 0,
    *,
    opsel: int = 0,
    opsel_hi: int = 7,
    neg: int = 0,
    neg_hi: int = 0,
) -> list[int]:
    return [
        0xCC000000 | op << 16 | (opsel_hi >> 2) << 14 | opsel << 11 | neg_hi << 8 | dst,
        a | b << 9 | c << 18 | (opsel_hi & 3) << 27 | neg << 29,
    ]


def dpp16(
    words: list[int], src: int, control: int, *, row_mask: int = 15, bank_mask: int = 15, bound: int = 0, fetch: int = 0
) -> list[int]:
    """The instruction, assembled with 250 for its first source, and its DPP word."""
    return [*words, (src & 255) | control << 8 | fetch << 18 | bound << 19 | bank_mask << 24 | row_mask << 28]


def ds(op: int, *, addr: int = 0, data0: int = 0, data1: int = 0, dst: int = 0, offset: int = 0) -> list[int]:
    return [0xD8000000 | op << 18 | offset, addr | data0 << 8 | data1 << 16 | dst << 24]


def flat(
    op: int,
    *,
    addr: int = 0,
    data: int = 0,
    dst: int = 0,
    saddr: int = NULL,
    offset: int = 0,
    segment: int = 2,
    glc: int = 0,
    sve: int = 0,
) -> list[int]:
    return [
        0xDC000000 | op << 18 | segment << 16 | glc << 14 | (offset & 0x1FFF),
        addr | data << 8 | saddr << 16 | sve << 23 | dst << 24,
    ]


def mubuf(
    op: int, *, data: int, addr: int = 0, srsrc: int, soffset: int = NULL, offset: int = 0, offen: int = 1
) -> list[int]:
    return [0xE0000000 | op << 18 | offset, addr | data << 8 | (srsrc // 4) << 16 | offen << 22 | soffset << 24]


END = sopp(0x30)
BARRIER = sopp(0x3D)
WAIT = sopp(0x09)


def program(*parts: list[int]) -> bytes:
    """The code of instructions in order, ended."""
    words = [word for part in (*parts, END) for word in part]
    return struct.pack(f"<{len(words)}I", *words)


def code_object(
    name: str,
    code: bytes,
    descriptor: bytes,
    arguments: list[tuple[int, int, str]],
    *,
    data: bytes = b"",
    relocations: list[tuple[int, int, int]] = (),  # type: ignore[assignment]
) -> bytes:
    """An ELF file as AMD's linker lays it out, with one kernel and, behind it, data.

    Args:
        arguments: offset, size and ``.value_kind`` of each.
        data: the symbol ``data`` names its first byte.
        relocations: place in `data`, R_AMDGPU_ABS64 (3; of ``data``) or R_AMDGPU_RELATIVE64 (13; of the file), addend.
    """
    size = max((offset + length for offset, length, _ in arguments), default=0)
    noted = {
        ".name": name, ".symbol": name + ".kd", ".kernarg_segment_size": size, ".max_flat_workgroup_size": 1024,
        ".group_segment_fixed_size": 0, ".private_segment_fixed_size": 0, ".vgpr_count": 16,
        ".args": [dict(zip((".offset", ".size", ".value_kind"), each, strict=True)) for each in arguments],
    }  # fmt: skip
    metadata = _packed({"amdhsa.kernels": [noted]})
    names = b"\0" + (name + ".kd").encode() + b"\0data\0"
    titles = b"\0.note\0"
    at, parts = 64 + 2 * 56, {}

    def place(title: str, content: bytes, alignment: int) -> int:
        nonlocal at
        at = (at + alignment - 1) // alignment * alignment
        parts[title] = (at, content)
        at += len(content)
        return at - len(content)

    place("note", struct.pack("<III8s", 7, len(metadata), 32, b"AMDGPU\0") + metadata + bytes(-len(metadata) % 4), 4)
    kernel = place("kernel", descriptor, 64)
    entry = place("code", code, 256)
    parts["kernel"] = (kernel, descriptor[:16] + struct.pack("<q", entry - kernel) + descriptor[24:])
    behind = place("data", data, 16)
    symbol = struct.Struct("<IBBHQQ")
    symbols = [(0, 0, 0, 0, 0, 0), (1, 17, 0, 1, kernel, 64), (len(name) + 5, 17, 0, 1, behind, len(data))]
    place("symbols", b"".join(symbol.pack(*each) for each in symbols), 8)
    place("names", names, 1)
    rows = [(behind + where, kind, 2 if kind == 3 else 0, addend) for where, kind, addend in relocations]
    place("relocations", b"".join(struct.pack("<QIIq", *row) for row in rows), 8)
    place("titles", titles, 1)
    section = struct.Struct("<IIQQQQIIQQ")

    def row(title: str, kind: int, link: int = 0, width: int = 0) -> bytes:
        where, content = parts[title]
        return section.pack(0, kind, 2, where, where, len(content), link, 0, 8, width)

    sections = [bytes(64), row("relocations", 4, 2, 24), row("symbols", 11, 3, 24), row("names", 3), row("titles", 3)]
    table = (at + 7) // 8 * 8
    identity = b"\x7fELF\x02\x01\x01\x40\x04" + bytes(7)
    header = identity + struct.pack("<HHIQQQIHHHHHH", 3, 224, 1, 0, 64, table, 0x41, 64, 56, 2, 64, len(sections), 4)
    segment = struct.Struct("<IIQQQQQQ")
    note = parts["note"]
    image = bytearray(table)
    image[:64] = header
    image[64:176] = segment.pack(1, 7, 0, 0, 0, at, at, 4096) + segment.pack(
        4, 4, note[0], note[0], note[0], len(note[1]), len(note[1]), 4
    )
    for where, content in parts.values():
        image[where : where + len(content)] = content
    return bytes(image) + b"".join(sections)


def bundle(code_objects: dict[str, bytes]) -> bytes:
    """An uncompressed bundle of code objects by target."""
    sizes = sum(24 + len(target) for target in code_objects)
    at, rows = (32 + sizes + 4095) // 4096 * 4096, b""
    body = bytearray()
    for target, content in code_objects.items():
        rows += struct.pack("<QQQ", at + len(body), len(content), len(target)) + target.encode()
        body += content + bytes(-len(content) % 4096)
    head = b"__CLANG_OFFLOAD_BUNDLE__" + struct.pack("<Q", len(code_objects)) + rows
    return head + bytes(at - len(head)) + bytes(body)


def _packed(value: object) -> bytes:
    """MessagePack."""
    if isinstance(value, dict):
        pairs = [_packed(each) for pair in value.items() for each in pair]
        return struct.pack(">BH", 0xDE, len(value)) + b"".join(pairs)
    if isinstance(value, list):
        return struct.pack(">BH", 0xDC, len(value)) + b"".join(map(_packed, value))
    if isinstance(value, str):
        return struct.pack(">BH", 0xDA, len(value)) + value.encode()
    assert isinstance(value, int)
    return struct.pack(">Bq", 0xD3, value)
