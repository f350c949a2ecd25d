"""gfx1100 code objects: taken out of the bundles of a ROCm library or from Triton, and laid out as a loader would."""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

TARGET = "gfx1100"
_COMPRESSED, _PLAIN, _ELF = b"CCOB", b"__CLANG_OFFLOAD_BUNDLE__", b"\x7fELF"
_SIZES = {2: "<II", 3: "<QQ"}  # of the file and of what is in it, by version of the header
_METADATA_NOTE = 32
_LINES = b".debug_line\0"
_RELOCATIONS, _DYNAMIC_SYMBOLS = 4, 11  # kinds of sections
_ABSOLUTE, _RELATIVE = 3, 13  # R_AMDGPU_ABS64, R_AMDGPU_RELATIVE64


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel in memory.

    Attributes:
        metadata: what the compiler noted: ``.args``, ``.vgpr_count``, ``.kernarg_segment_size`` and so on.
        code, code_bytes: address of the code object's image in memory and its size.
        entry, descriptor: addresses.
        lines: "offset_in_hex file:line" of instructions, by offset, where the compiler has told.
    """

    name: str
    metadata: dict[str, Any]
    code: int
    code_bytes: int
    entry: int
    descriptor: int
    lines: str


def elf_files(bundle: bytes) -> list[bytes]:
    """The code objects for `TARGET` of one offload bundle."""
    if bundle[:4] == _COMPRESSED:
        import pyarrow

        version, method = struct.unpack_from("<HH", bundle, 4)
        if method != 1:
            raise ValueError(f"compressed bundle of version {version}, method {method}")
        total, raw = struct.unpack_from(_SIZES[version], bundle, 8)
        header = 16 + struct.calcsize(_SIZES[version])
        bundle = pyarrow.Codec("zstd").decompress(bundle[header:total], decompressed_size=raw, asbytes=True)
    assert bundle.startswith(_PLAIN)
    entries = _entries(lambda form, at: struct.unpack_from(form, bundle, at))
    return [bundle[offset : offset + size] for offset, size, name in entries if name.endswith(TARGET)]


def _entries(read: Callable[[str, int], tuple[Any, ...]]) -> Iterator[tuple[int, int, str]]:
    """Offset, size and target of each code object of an uncompressed bundle; `read` unpacks at an offset."""
    (count,), at = read("<Q", 24), 32
    for _ in range(count):
        offset, size, length = read("<QQQ", at)
        (name,) = read(f"{length}s", at + 24)
        yield offset, size, name.decode()
        at += 24 + length


def at_address(address: int) -> list[bytes]:
    """The code objects for `TARGET` at an address in this process: of a bundle, or an ELF file itself."""
    head = ctypes.string_at(address, 64)
    if head[:4] == _COMPRESSED:
        (total, _) = struct.unpack_from(_SIZES[struct.unpack_from("<H", head, 4)[0]], head, 8)
        return elf_files(ctypes.string_at(address, total))
    if head.startswith(_PLAIN):

        def read(form: str, at: int) -> tuple[Any, ...]:
            return struct.unpack(form, ctypes.string_at(address + at, struct.calcsize(form)))

        entries = list(_entries(read))
        return [ctypes.string_at(address + at, size) for at, size, name in entries if name.endswith(TARGET)]
    if head[:4] != _ELF:
        raise ValueError(f"neither a bundle nor an ELF file: {head[:24]!r}")
    (sections,) = struct.unpack_from("<Q", head, 40)
    size, count = struct.unpack_from("<HH", head, 58)
    return [ctypes.string_at(address, sections + size * count)]


def load(elf: bytes) -> list[Kernel]:
    """Lays a code object out in memory, where it stays for the life of the process, and lists its kernels."""
    headers, sections = struct.unpack_from("<QQ", elf, 32)
    size, count, section_size, section_count = struct.unpack_from("<HHHH", elf, 54)
    segments = [struct.unpack_from("<IIQQQQQQ", elf, headers + index * size) for index in range(count)]
    loaded = [segment for segment in segments if segment[0] == 1]
    image = mmap.mmap(-1, max(address + in_memory for _, _, _, address, _, _, in_memory, _ in loaded))
    for _, _, offset, address, _, in_file, _, _ in loaded:
        image[address : address + in_file] = elf[offset : offset + in_file]
    base = ctypes.addressof(ctypes.c_char.from_buffer(image))  # keeps the memory mapped
    _kept.append(image)
    descriptors: dict[str, int] = {}
    lines = ""
    (names_at,) = struct.unpack_from("<H", elf, 62)
    rows = [struct.unpack_from("<IIQQQQIIQQ", elf, sections + index * section_size) for index in range(section_count)]
    titles = rows[names_at][4]
    for title, kind, _, _, offset, length, link, _, _, _ in rows:
        if elf[titles + title : titles + title + len(_LINES)] == _LINES:
            lines = "".join(f"{at:x} {place}\n" for at, place in sorted(_Lines(elf[offset : offset + length]).rows()))
        if kind == _RELOCATIONS:
            _relocate(image, base, elf[offset : offset + length], elf, rows[link][4])
        if kind == _DYNAMIC_SYMBOLS:
            names = rows[link][4]
            for symbol in range(length // 24):
                name, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", elf, offset + symbol * 24)
                descriptors[elf[names + name : elf.index(b"\0", names + name)].decode()] = value
    return [
        Kernel(
            name=noted[".name"],
            metadata=noted,
            code=base,
            code_bytes=len(image),
            entry=base + descriptors[noted[".symbol"]] + _entry(image, descriptors[noted[".symbol"]]),
            descriptor=base + descriptors[noted[".symbol"]],
            lines=lines,
        )
        for segment in segments
        if segment[0] == 4
        for note in _notes(elf[segment[2] : segment[2] + segment[5]])
        for noted in note["amdhsa.kernels"]
    ]


_kept: list[mmap.mmap] = []


def _relocate(image: mmap.mmap, base: int, entries: bytes, elf: bytes, symbols: int) -> None:
    """Puts addresses into an image that lies at `base`: of symbols, whose table begins at `symbols`, or of its own."""
    for offset, kind, symbol, addend in struct.iter_unpack("<QIIq", entries):
        if kind == _ABSOLUTE:
            _, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", elf, symbols + symbol * 24)
            address = (base + value if section else 0) + addend
        elif kind == _RELATIVE:
            address = base + addend
        else:
            raise ValueError(f"a relocation of type {kind} at {offset:#x}")
        struct.pack_into("<Q", image, offset, address)


def _entry(image: mmap.mmap, descriptor: int) -> int:
    offset: int = struct.unpack_from("<q", image, descriptor + 16)[0]
    return offset


def _notes(data: bytes) -> Iterator[dict[str, Any]]:
    at = 0
    while at < len(data):
        name, length, kind = struct.unpack_from("<III", data, at)
        at += 12 + (name + 3) // 4 * 4
        if kind == _METADATA_NOTE:
            yield _Packed(data[at : at + length]).value()
        at += (length + 3) // 4 * 4


class _Packed:
    """A reader of MessagePack, as far as compilers write it."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def number(self, form: str) -> Any:
        (value,) = struct.unpack_from(">" + form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def text(self, length: int) -> str:
        self.at += length
        return self.data[self.at - length : self.at].decode()

    def array(self, length: int) -> list[Any]:
        return [self.value() for _ in range(length)]

    def table(self, length: int) -> dict[Any, Any]:
        return {self.value(): self.value() for _ in range(length)}

    def value(self) -> Any:
        tag = self.number("B")
        if tag < 0x80:
            return tag
        if tag >= 0xE0:
            return tag - 256
        for low, high, read in ((0x80, 0x90, self.table), (0x90, 0xA0, self.array), (0xA0, 0xC0, self.text)):
            if low <= tag < high:
                return read(tag - low)
        if tag in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[tag]
        if tag in range(0xCA, 0xD4):
            return self.number("fdBHIQbhiq"[tag - 0xCA])
        form, read = {
            0xD9: ("B", self.text), 0xDA: ("H", self.text), 0xDB: ("I", self.text),
            0xDC: ("H", self.array), 0xDD: ("I", self.array), 0xDE: ("H", self.table), 0xDF: ("I", self.table),
        }[tag]  # fmt: skip
        return read(self.number(form))


class _Lines:
    """A reader of DWARF's line table in version 4, one compilation unit, as Triton's compiler writes it."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def leb(self, *, signed: bool = False) -> int:
        value = shift = 0
        while True:
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value - (1 << shift) if signed and byte & 64 else value

    def text(self) -> str:
        end = self.data.index(0, self.at)
        begin, self.at = self.at, end + 1
        return self.data[begin:end].decode()

    def rows(self) -> Iterator[tuple[int, str]]:
        """Address and "file:line"."""
        length, version, header, least, _, _, base, span, first = struct.unpack_from("<IHIBBBbBB", self.data)
        if version != 4:
            return
        begin, self.at = 10 + header, 18 + first - 1
        while self.text():  # directories
            pass
        files = [""]
        while name := self.text():
            files.append(name)
            for _ in range(3):
                self.leb()
        self.at, address, file, line = begin, 0, 1, 1
        while self.at < 4 + length:
            code = self.data[self.at]
            self.at += 1
            if code >= first:
                address += (code - first) // span * least
                line += base + (code - first) % span
                yield address, f"{files[file]}:{line}"
            elif code == 0:
                size = self.leb()
                if self.data[self.at] == 2:
                    (address,) = struct.unpack_from("<Q", self.data, self.at + 1)
                elif self.data[self.at] == 1:
                    file = line = 1
                self.at += size
            elif code == 1:
                yield address, f"{files[file]}:{line}"
            elif code == 2:
                address += self.leb() * least
            elif code == 3:
                line += self.leb(signed=True)
            elif code == 4:
                file = self.leb()
            elif code == 8:
                address += (255 - first) // span * least
            elif code == 9:
                (more,) = struct.unpack_from("<H", self.data, self.at)
                address, self.at = address + more, self.at + 2
            elif code in (5, 12):
                self.leb()
