// The interpreter of gfx1100 machine code: a launch of one kernel, wave by wave, with every access checked. C ABI.
#ifndef GFX1100_H
#define GFX1100_H
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    const char *name;
    const void *code; // what the program counter code_address points at
    uint64_t code_bytes, code_address;
    uint64_t entry;         // program counter of the first instruction
    const void *descriptor; // the kernel descriptor, 64 bytes
    uint32_t kernarg_bytes;
    const char *lines; // "offset_in_hex file:line\n" ... in order of offsets, or NULL; errors name the line then
} gfx_kernel;

typedef struct {
    uint32_t grid[3];  // workgroups
    uint32_t block[3]; // lanes of one
    const void *kernarg;
    uint64_t kernarg_bytes;
    uint32_t dynamic_lds; // bytes, beside what the descriptor says
    uint32_t seed;        // the order in which waves and workgroups go on
    uint32_t checks;      // GFX_CHECK_*
} gfx_launch;

enum { GFX_CHECK_UNINITIALISED = 1, GFX_CHECK_RACES = 2 };

typedef struct {
    // Instructions that waves executed, by class; `instructions` is all of them, `waves` how many waves there were.
    uint64_t instructions, salu, valu, vmem_load, vmem_store, atomics, lds, smem, wmma, trans, branches, waves;
    uint64_t bytes_loaded, bytes_stored; // by active lanes, from and to global memory
    uint64_t lds_conflict_cycles;        // cycles that LDS accesses took beyond the first
    uint64_t lane_operations;            // active lanes, summed over vector instructions
    uint64_t valu_cycles;                // issue cycles of one SIMD, see cycles() in decode.cpp
    uint32_t sgprs, vgprs, lds_bytes;    // of one wave, one wave and one workgroup
} gfx_stats;

// Which live allocation holds this address? 1 and its base, bytes and flags (1 readable, 2 writable), or 0. Device
// memory is host memory at the same address. Called from any thread that is inside gfx_run.
typedef int (*gfx_lookup)(uint64_t address, uint64_t *base, uint64_t *bytes, uint32_t *flags);

// 0, or 1 with one message in `error`. Thread-safe; nothing is kept between launches.
int gfx_run(const gfx_kernel *, const gfx_launch *, gfx_lookup, gfx_stats * /* may be NULL */, char *error,
            size_t error_bytes);

// The instruction at `code` as text, as llvm-objdump writes it; its length in bytes, or 0 and why it is not known.
int gfx_text(const void *code, uint64_t code_bytes, uint64_t pc, char *text, size_t text_bytes);

#ifdef __cplusplus
}
#endif
#endif
