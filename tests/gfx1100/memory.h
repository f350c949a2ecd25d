// Memory operations as tables name them, and what flat and LDS instructions share.
#pragma once
#include "isa.h"

namespace gfx {

enum MemoryFlag : uint16_t { LOAD = 1, SIGNED = 2, HALF16 = 4, UPPER = 8, ADDTID = 16, ATOMIC = 32, TWO = 64, STRIDE64 = 128, RETURNS = 256 };
enum class Atomic : uint8_t {
    NONE, SWAP, CMPSWAP, ADD, SUB, RSUB, CSUB, MIN_I, MAX_I, MIN_U, MAX_U, AND, OR, XOR, INC, DEC, MASKED_OR, WRAP,
    CMPSWAP_F, MIN_F, MAX_F, ADD_F,
};
struct MemoryOp {
    uint16_t op;
    const char *name; // without its prefix: flat, global, scratch, buffer
    uint16_t flags;
    uint8_t bytes;
    Atomic atomic = Atomic::NONE;
};
// The half of a register that a load fills: 0 low, 1 high, -1 all of the register.
inline int half_of(const MemoryOp &op) { return op.flags & UPPER ? 1 : op.flags & HALF16 ? 0 : -1; }
const MemoryOp *memory_op(unsigned op); // of FLAT, GLOBAL, SCRATCH and MUBUF, which have the same numbers
const MemoryOp *lds_op(unsigned op);

// Where one lane's bytes are, and which of them were never written; nullptr for global memory, which counts as written.
struct Target {
    uint8_t *data, *undefined;
};
Target lds_target(Wave &, uint64_t at, unsigned bytes, bool write, bool atomic, int lane, bool touches = true);
void lds_touch(Wave &, unsigned at, unsigned bytes, bool write, bool atomic, int lane); // finds races
void load_lane(Wave &, uint16_t dst, const MemoryOp &, Target, int lane);
void store_lane(Wave &, uint16_t data, const MemoryOp &, Target, int lane);
void atomic_lane(Wave &, const Instruction &, Atomic, unsigned bytes, Target, bool returns, uint64_t data, uint64_t data2, int lane);
uint64_t words_of(Wave &, uint16_t vgpr, unsigned bytes, int lane);

} // namespace gfx
