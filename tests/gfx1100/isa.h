// What the interpreter's parts share: decoded instructions, the state of a wave, and the tables of vector operations.
#pragma once
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "gfx1100.h"

namespace gfx {

constexpr int LANES = 32;
constexpr uint32_t ALL = 0xffffffff;
using Row = uint32_t[LANES];

// Codes of operands; below 106 are s0 to s105, from 256 on v0 to v255.
enum Code : uint16_t {
    VCC = 106, TTMP = 108, NUL = 124, M0 = 125, EXEC = 126, ZERO = 128, MINUS_ONE = 193, SHARED_BASE = 235, SHARED_LIMIT = 236,
    PRIVATE_BASE = 237, PRIVATE_LIMIT = 238, HALF = 240, EXECZ = 252, SCC = 253, LITERAL = 255, VGPR = 256, ABSENT = 0xffff,
};

// The high halves of the addresses through which flat instructions reach LDS and scratch.
constexpr uint32_t SHARED_APERTURE = 0x10000, PRIVATE_APERTURE = 0x20000;

// What an operand holds: it decides registers, halves, inline constants, and whether signs can be changed.
enum class Kind : uint8_t { NONE, B16, F16, B32, F32, B64, I64, F64, MASK, S16, S32 }; // S: bits whose sign can be changed
inline bool is_float(Kind k) { return k == Kind::F16 || k == Kind::F32 || k == Kind::F64; }
inline bool has_sign(Kind k) { return is_float(k) || k == Kind::S16 || k == Kind::S32; }
inline int bits_of(Kind k) {
    return k == Kind::B16 || k == Kind::F16 || k == Kind::S16 ? 16 : k == Kind::B64 || k == Kind::I64 || k == Kind::F64 ? 64 : 32;
}

// A run that cannot go on: the message is given its place (kernel, address, wave, source line) in wave.cpp.
struct Fault : std::runtime_error {
    using std::runtime_error::runtime_error;
};
[[noreturn]] void fault(const char *format, ...) __attribute__((format(printf, 1, 2)));

struct Wave;
struct Instruction;

// Rows of sources and results of one vector operation.
struct Lanes {
    const uint32_t *lo[3], *hi[3];
    uint32_t *__restrict dlo, *__restrict dhi;
    uint32_t *__restrict carry; // one flag a lane, for operations that write a mask beside the result
    uint32_t vcc;
    bool clamp, ieee;
};

enum Flag : uint8_t {
    CARRY = 1,      // writes a mask, too
    SATURATES = 2,  // an integer operation that knows `clamp`
    ACCUMULATES = 4, // its last source is the destination
    TRANS = 8,      // runs on the transcendental unit
    SPECIAL = 16,   // reads or writes registers itself
};

struct VectorOp {
    uint16_t op; // as numbered in VOP3, where VOPC begins at 0, VOP2 at 0x100, VOP1 at 0x180; VOP3P begins at 0x400
    const char *name;
    Kind d, s[3];
    uint8_t flags;
    void (*run)(Lanes &);
    void (*special)(Wave &, const Instruction &);
};
constexpr int PACKED = 0x400;
const VectorOp *vector_op(unsigned op); // nullptr where there is none
struct OpList {
    const VectorOp *begin;
    size_t count;
};
OpList float_ops(), integer_ops(), conversion_ops(), compare_ops(), special_ops(), packed_ops();

enum class Class : uint8_t { SALU, VALU, VMEM_LOAD, VMEM_STORE, ATOMIC, LDS, SMEM, WMMA, TRANS, BRANCH, OTHER };

struct Instruction {
    uint64_t pc;
    void (*run)(Wave &, const Instruction &) = nullptr;
    const VectorOp *v = nullptr, *v2 = nullptr; // v2: the second half of a dual instruction
    const struct ScalarOp *scalar = nullptr;
    const char *name = "";
    Class kind = Class::OTHER;
    uint8_t words = 1, cycles = 1;
    uint16_t op = 0;
    uint16_t src[3] = {ABSENT, ABSENT, ABSENT}, src2[3] = {ABSENT, ABSENT, ABSENT};
    uint16_t dst = ABSENT, dst2 = ABSENT; // number of a VGPR for vector instructions, code of an SGPR otherwise
    uint16_t sdst = ABSENT;               // where a mask goes
    uint8_t neg = 0, abs = 0, opsel = 0, opsel_hi = 0, omod = 0; // VOP3P: abs is neg_hi
    bool clamp = false, e64 = false;
    uint8_t dpp = 0; // 1: a DPP16 word in `control`; 2: DPP8, 3: DPP8 that fetches inactive lanes, selectors in `control`
    uint32_t control = 0, literal = 0;
    int32_t offset = 0;                 // of memory instructions; of branches in bytes; immediates of scalar ones
    uint16_t address = 0, data = 0, data2 = 0, saddr = ABSENT;
    uint8_t segment = 0, bytes = 0;     // FLAT: 0 flat, 1 scratch, 2 global
    bool glc = false, offen = false, idxen = false;
};

// Fills in everything from the words at `code` (at most `available`); throws Fault for what is not known.
Instruction decode(const uint32_t *code, size_t available, uint64_t pc);
std::string text_of(const Instruction &);

struct Allocation {
    uint64_t base = 1, bytes = 0;
    uint32_t flags = 0;
};

// Who touched a byte of LDS since the last barrier.
struct Touch {
    uint32_t written = 0, read = 0; // epoch of the last one
    uint8_t writer = 0, reader = 0; // number of a wave
    bool atomic = false, many = false;
};

struct Launch {
    const gfx_kernel *kernel;
    const gfx_launch *launch;
    gfx_lookup lookup;
    gfx_stats stats{};
    // Index into `instructions` by word of code, -1 where not met yet; a page is empty until one of its words is.
    std::vector<std::vector<int32_t>> decoded;
    std::vector<std::unique_ptr<Instruction>> instructions;
    Allocation recent[8];
    unsigned next_recent = 0;
    uint32_t vgprs = 0, lds_bytes = 0, scratch_bytes = 0;
    bool flush32 = false, flush16_64 = false, ieee = false, dx10_clamp = false;
    bool check_undefined = false, check_races = false;
    alignas(16) uint8_t packet[64] = {}; // the dispatch packet

    const Instruction &at(uint64_t pc);
    uint8_t *memory(uint64_t address, unsigned bytes, bool write, int lane);
    uint8_t *elsewhere(uint64_t address, unsigned bytes, bool write, int lane);
};

struct Group {
    Launch *launch;
    uint32_t id[3];
    uint32_t epoch = 1; // barriers passed, plus 1
    std::vector<uint8_t> lds, lds_undefined;
    std::vector<Touch> touched;
};

// Loads whose results a program must wait for. They come in the order of their issue, but for those into scalar registers,
// which count as come when none is left.
struct Arrivals {
    uint32_t issued = 0, come = 0;
    uint32_t scalar = 0; // the last of those into scalar registers
    void wait(uint32_t left) {
        if (left == 0 || scalar <= come) come = std::max(come, issued - std::min(left, issued));
    }
};

struct Wave {
    Launch *launch;
    Group *group;
    unsigned number;
    uint64_t pc;
    enum { RUNNING, WAITING, ENDED } state;
    bool scc, scc_undefined;
    uint32_t s[128], s_undefined[128];     // bits that were never written
    alignas(64) uint32_t v[256][LANES];
    uint32_t low_undefined[256], high_undefined[256]; // lanes whose lower or upper 16 bits were never written
    bool flush32, flush16_64;
    Arrivals memory, local; // counted by vmcnt and lgkmcnt: vector loads; LDS and scalar ones
    // Number of the load that last went into a register: into the lower and the upper half of a vector register.
    uint32_t from_memory[2][256], from_local[2][256], to_scalar[128];
    std::vector<uint8_t> scratch, scratch_undefined; // lane by lane

    uint32_t exec() const { return s[EXEC]; }
    uint32_t scalar(unsigned code, const Instruction &) const;
    uint64_t scalar64(unsigned code, const Instruction &, bool sign = false) const;
    uint32_t scalar_undefined(unsigned code) const;
    void set(unsigned code, uint32_t value, uint32_t undefined = 0);
    void set64(unsigned code, uint64_t value, uint64_t undefined = 0) {
        set(code, uint32_t(value), uint32_t(undefined));
        if (code != NUL) set(code + 1, uint32_t(value >> 32), uint32_t(undefined >> 32));
    }
    bool outstanding(unsigned vgpr, int half) const { return from_memory[half][vgpr] > memory.come || from_local[half][vgpr] > local.come; }
    uint32_t *row(unsigned vgpr, int half = -1) { // to read, or to write by what is no load; half as for `define`
        if (vgpr < 256 && ((half != 1 && outstanding(vgpr, 0)) || (half != 0 && outstanding(vgpr, 1)))) awaited('v', vgpr);
        return target(vgpr);
    }
    uint32_t *target(unsigned vgpr); // to load into
    [[noreturn]] void awaited(char kind, unsigned number) const;
    void issued(unsigned vgpr, unsigned words, bool by_memory, bool by_local, int half = -1);
    uint32_t lanes_undefined(unsigned vgpr) { return low_undefined[vgpr] | high_undefined[vgpr]; }
    void define(unsigned vgpr, uint32_t mask, uint32_t undefined = 0, int half = -1); // half: 0 low, 1 high, -1 both
    void require(uint32_t undefined, const char *what, const char *decides) const;
};

// Handlers, by encoding.
void run_vector(Wave &, const Instruction &);
void run_dual(Wave &, const Instruction &);
void run_memory(Wave &, const Instruction &);
void run_buffer(Wave &, const Instruction &);
void run_lds(Wave &, const Instruction &);
void run_smem(Wave &, const Instruction &);
void run_scalar(Wave &, const Instruction &);
using Handler = void (*)(Wave &, const Instruction &);
enum class Scalar : uint8_t { SOP2, SOP1, SOPC, SOPK, SOPP };
struct ScalarOp {
    Scalar form;
    uint16_t op;
    const char *name;
    Kind d, s[2];
    uint8_t flags;
    uint64_t (*result)(uint64_t a, uint64_t b, uint64_t d, bool &scc); // d: what the destination held
    Handler special;
};
const ScalarOp *scalar_op(Scalar, unsigned op);

// One source of a vector instruction as rows, with constants, halves, DPP, signs and flushed denormals applied.
struct Buffer {
    alignas(64) Row lo, hi;
};
// `half`: which one of a register of 32 bits is used, -1 for both.
void fetch(Wave &, const Instruction &, int index, uint16_t code, Kind, Buffer &, const uint32_t *&lo, const uint32_t *&hi, int half = -1);
uint32_t inline_constant(unsigned code, Kind); // its lower 32 bits
uint64_t inline_constant64(unsigned code, Kind);
inline void blend(uint32_t *d, const uint32_t *from, uint32_t mask) {
    for (int l = 0; l < LANES; l++) d[l] = mask >> l & 1 ? from[l] : d[l];
}

} // namespace gfx
