"""The HIP runtime's stand-in asked as a library asks it; prints what it found as JSON lines, for `test_hip.py`."""

from __future__ import annotations

import ctypes
import json
import struct
import sys
import tempfile
from collections.abc import Callable

import torch

from tests.gfx1100 import assemble as asm
from tests.gfx1100 import hip
from tests.gfx1100.emulator import descriptor

HIDDEN = ("hidden_block_count_x", "hidden_block_count_y", "hidden_group_size_x", "hidden_grid_dims", "hidden_heap_v1")
ARGUMENTS = [(0, 8, "global_buffer"), (8, 4, "by_value"), *((16 + 8 * n, 4, name) for n, name in enumerate(HIDDEN))]
END, POINTER, SIZE = 3, 1, 2  # HIP_LAUNCH_PARAM_*
runtime = ctypes.CDLL(str(hip.library()))
address, size = ctypes.c_void_p, ctypes.c_size_t


def tell(**found: object) -> None:
    print(json.dumps(found), flush=True)


def ask(name: str, *arguments: object) -> None:
    status = getattr(runtime, name)(*arguments)
    assert status == 0, (name, status)


def kernel() -> bytes:
    """Lane 0 of each workgroup stores what it was given, behind the pointer."""
    words = [8, *(16 + 8 * n for n in range(len(HIDDEN)))]
    loads = [asm.smem(0, 10 + n, 0, offset) for n, offset in enumerate(words)]
    stores = [
        [*asm.vop1(1, 2, 10 + n), *asm.flat(0x1A, addr=1, data=2, saddr=4, offset=4 * n)] for n in range(len(words))
    ]
    code = asm.program(asm.smem(1, 4, 0), *loads, asm.WAIT, asm.vop1(1, 1, asm.const(0)), *stores)
    about = descriptor(user_sgprs=2, kernarg_pointer=True, vgprs=16)
    return asm.bundle({"hipv4-amdgcn-amd-amdhsa--gfx1100": asm.code_object("told", code, about, ARGUMENTS)})


def function(image: bytes, *, by_file: bool) -> ctypes.c_void_p:
    module, found = address(), address()
    if by_file:
        with tempfile.NamedTemporaryFile() as file:
            file.write(image)
            file.flush()
            ask("hipModuleLoad", ctypes.byref(module), file.name.encode())
    else:
        ask("hipModuleLoadData", ctypes.byref(module), image)
    ask("hipModuleGetFunction", ctypes.byref(found), module, b"told")
    ask("hipModuleUnload", module)
    return found


def launches() -> None:
    """One by one, packed with room for the hidden arguments, and packed without it."""
    out = torch.zeros(6, dtype=torch.int32, device="cuda")

    def one_by_one(launch: Callable[..., None]) -> None:
        pointer, number = address(out.data_ptr()), ctypes.c_int32(77)
        given = (address * 2)(*(ctypes.cast(ctypes.byref(each), address) for each in (pointer, number)))
        launch(given, None)

    def packed(room: int) -> Callable[[Callable[..., None]], None]:
        def run(launch: Callable[..., None]) -> None:
            buffer = ctypes.create_string_buffer(struct.pack("<Qi", out.data_ptr(), 77) + b"\xee" * (room - 12), room)
            length = size(room)
            extra = (address * 5)(POINTER, ctypes.addressof(buffer), SIZE, ctypes.addressof(length), END)
            launch(None, extra)

        return run

    image = kernel()
    for by_file in (False, True):
        for name, way in (("one by one", one_by_one), ("packed", packed(56)), ("without the hidden", packed(12))):
            told = function(image, by_file=by_file)
            for entry, sizes in (("hipModuleLaunchKernel", (3, 2, 1)), ("hipExtModuleLaunchKernel", (96, 2, 1))):
                out.zero_()
                more = (None, None, 0) if entry.startswith("hipExt") else ()
                way(
                    lambda given, extra, entry=entry, sizes=sizes, more=more, told=told: ask(
                        entry, told, *sizes, 32, 1, 1, *((size(0), None) if more else (0, None)), given, extra, *more
                    )
                )
                tell(way=name, entry=entry, by_file=by_file, stored=out.cpu().tolist())
    torch.cuda.synchronize()
    tell(uneven=runtime.hipExtModuleLaunchKernel(told, 33, 1, 1, 32, 1, 1, size(0), None, None, None, None, None, 0))


def memory() -> None:
    """Allocations are each card's own, are copied to and from, and are gone when they are freed."""
    count, device = ctypes.c_int(), ctypes.c_int()
    ask("hipGetDeviceCount", ctypes.byref(count))
    ask("hipSetDevice", 1)
    ask("hipGetDevice", ctypes.byref(device))
    ask("hipSetDevice", 0)
    tell(devices=count.value, set=device.value, beyond=runtime.hipSetDevice(2))
    place, other = address(), address()
    ask("hipMalloc", ctypes.byref(place), size(4096))
    ask("hipMallocAsync", ctypes.byref(other), size(4096), None)
    there = ctypes.create_string_buffer(bytes(range(64)), 64)
    back = ctypes.create_string_buffer(64)
    ask("hipMemset", place, 0xAB, size(4096))
    ask("hipMemcpy2DAsync", place, size(16), there, size(8), size(8), size(8), 1, None)
    ctypes.memset(there, 0, 64)  # what was copied from is the caller's again
    ask("hipMemcpyAsync", other, place, size(4096), 3, None)
    ask("hipMemcpy", back, other, size(64), 2)
    tell(copied=list(back.raw))
    attributes = ctypes.create_string_buffer(256)
    known = runtime.hipPointerGetAttributes(attributes, place)
    ask("hipFree", place)
    ask("hipFreeAsync", other, None)
    runtime.hipGetErrorName.restype = ctypes.c_char_p
    gone = runtime.hipPointerGetAttributes(attributes, place)
    tell(known=known, gone=runtime.hipGetErrorName(gone).decode(), twice=runtime.hipFree(place))
    source = torch.zeros(6, dtype=torch.int32, device="cuda")
    told = function(kernel(), by_file=False)
    pointer, number = address(place.value), ctypes.c_int32(1)
    given = (address * 2)(*(ctypes.cast(ctypes.byref(each), address) for each in (pointer, number)))
    ask("hipModuleLaunchKernel", told, 1, 1, 1, 32, 1, 1, 0, None, given, None)
    try:
        source.cpu()
        tell(freed="not found")
    except RuntimeError as error:
        tell(freed=str(error))


if __name__ == "__main__":
    torch.zeros(1, device="cuda")
    launches()
    memory()
    sys.stdout.flush()
