// DS instructions: loads, stores and atomics on LDS, and the permutations that use its crossbar.
#include <algorithm>

#include "memory.h"

namespace gfx {
namespace {

#define PAIR(OP, NAME, TYPE, BYTES, KIND, COMPARES)                                                                        \
    {OP, "ds_" NAME "_" TYPE, ATOMIC, BYTES, Atomic::KIND}, {OP + 0x20, "ds_" NAME "_rtn_" TYPE, ATOMIC | RETURNS, BYTES, Atomic::KIND},
#define INTEGERS(OP, BITS)                                                                                                \
    PAIR(OP, "add", "u" #BITS, BITS / 8, ADD, 0) PAIR(OP + 1, "sub", "u" #BITS, BITS / 8, SUB, 0)                          \
    PAIR(OP + 2, "rsub", "u" #BITS, BITS / 8, RSUB, 0) PAIR(OP + 3, "inc", "u" #BITS, BITS / 8, INC, 0)                    \
    PAIR(OP + 4, "dec", "u" #BITS, BITS / 8, DEC, 0) PAIR(OP + 5, "min", "i" #BITS, BITS / 8, MIN_I, 0)                    \
    PAIR(OP + 6, "max", "i" #BITS, BITS / 8, MAX_I, 0) PAIR(OP + 7, "min", "u" #BITS, BITS / 8, MIN_U, 0)                  \
    PAIR(OP + 8, "max", "u" #BITS, BITS / 8, MAX_U, 0) PAIR(OP + 9, "and", "b" #BITS, BITS / 8, AND, 0)                    \
    PAIR(OP + 10, "or", "b" #BITS, BITS / 8, OR, 0) PAIR(OP + 11, "xor", "b" #BITS, BITS / 8, XOR, 0)                      \
    PAIR(OP + 12, "mskor", "b" #BITS, BITS / 8, MASKED_OR, 1)                                                             \
    {OP + 13, "ds_store_b" #BITS, 0, BITS / 8}, {OP + 14, "ds_store_2addr_b" #BITS, TWO, BITS / 8},                        \
    {OP + 15, "ds_store_2addr_stride64_b" #BITS, TWO | STRIDE64, BITS / 8},                                               \
    PAIR(OP + 16, "cmpstore", "b" #BITS, BITS / 8, CMPSWAP, 1) PAIR(OP + 17, "cmpstore", "f" #BITS, BITS / 8, CMPSWAP_F, 1) \
    PAIR(OP + 18, "min", "f" #BITS, BITS / 8, MIN_F, 0) PAIR(OP + 19, "max", "f" #BITS, BITS / 8, MAX_F, 0)                \
    {OP + 0x2d, "ds_storexchg_rtn_b" #BITS, ATOMIC | RETURNS, BITS / 8, Atomic::SWAP},                                    \
    {OP + 0x2e, "ds_storexchg_2addr_rtn_b" #BITS, ATOMIC | RETURNS | TWO, BITS / 8, Atomic::SWAP},                        \
    {OP + 0x2f, "ds_storexchg_2addr_stride64_rtn_b" #BITS, ATOMIC | RETURNS | TWO | STRIDE64, BITS / 8, Atomic::SWAP},    \
    {OP + 0x36, "ds_load_b" #BITS, LOAD, BITS / 8}, {OP + 0x37, "ds_load_2addr_b" #BITS, LOAD | TWO, BITS / 8},            \
    {OP + 0x38, "ds_load_2addr_stride64_b" #BITS, LOAD | TWO | STRIDE64, BITS / 8},

const MemoryOp table[] = {
    INTEGERS(0x00, 32) INTEGERS(0x40, 64)
    {0x14, "ds_nop", 0, 0}, {0x15, "ds_add_f32", ATOMIC, 4, Atomic::ADD_F}, {0x79, "ds_add_rtn_f32", ATOMIC | RETURNS, 4, Atomic::ADD_F},
    {0x1e, "ds_store_b8", 0, 1}, {0x1f, "ds_store_b16", 0, 2}, {0x34, "ds_wrap_rtn_b32", ATOMIC | RETURNS, 4, Atomic::WRAP},
    {0x35, "ds_swizzle_b32", LOAD, 0}, {0x39, "ds_load_i8", LOAD | SIGNED, 1}, {0x3a, "ds_load_u8", LOAD, 1},
    {0x3b, "ds_load_i16", LOAD | SIGNED, 2}, {0x3c, "ds_load_u16", LOAD, 2},
    {0xa0, "ds_store_b8_d16_hi", UPPER, 1}, {0xa1, "ds_store_b16_d16_hi", UPPER, 2}, {0xa2, "ds_load_u8_d16", LOAD | HALF16, 1},
    {0xa3, "ds_load_u8_d16_hi", LOAD | HALF16 | UPPER, 1}, {0xa4, "ds_load_i8_d16", LOAD | HALF16 | SIGNED, 1},
    {0xa5, "ds_load_i8_d16_hi", LOAD | HALF16 | UPPER | SIGNED, 1}, {0xa6, "ds_load_u16_d16", LOAD | HALF16, 2},
    {0xa7, "ds_load_u16_d16_hi", LOAD | HALF16 | UPPER, 2}, {0xb0, "ds_store_addtid_b32", ADDTID, 4},
    {0xb1, "ds_load_addtid_b32", LOAD | ADDTID, 4}, {0xb2, "ds_permute_b32", LOAD, 0}, {0xb3, "ds_bpermute_b32", LOAD, 0},
    {0xde, "ds_store_b96", 0, 12}, {0xdf, "ds_store_b128", 0, 16}, {0xfe, "ds_load_b96", LOAD, 12}, {0xff, "ds_load_b128", LOAD, 16},
};

// Lane by lane, from where a swizzle reads; the value of inactive lanes is 0.
int swizzled(unsigned offset, int l) {
    if (offset >= 0xe000) { // fast Fourier transform
        unsigned mask = offset & 31, j = 0;
        for (int n = 0; n < 5; n++) j |= (l >> n & 1) << (4 - n);
        return int(j >> std::popcount(mask) | (unsigned(l) & mask)) & 31;
    }
    if (offset >= 0xc000) { // rotation within what the mask leaves
        int mask = offset & 31, by = offset >> 5 & 31;
        return (l & mask) | ((offset >> 10 & 1 ? l - by : l + by) & ~mask & 31);
    }
    if (offset & 0x8000) return (l & ~3) | (offset >> 2 * (l & 3) & 3);
    return (((l & 31) & int(offset & 31)) | int(offset >> 5 & 31)) ^ int(offset >> 10 & 31);
}

void crossbar(Wave &w, const Instruction &i) {
    uint32_t exec = w.exec(), undefined = 0;
    unsigned source = i.op == 0x35 ? i.address : i.data;
    Row out = {}, in;
    std::memcpy(in, w.row(source), sizeof in);
    uint32_t from_undefined = w.lanes_undefined(source);
    if (i.op != 0x35) w.require(w.lanes_undefined(i.address) & exec, "a vector register of the lane", "which lane is read");
    for (int l = 0; l < LANES; l++) {
        int other = i.op == 0x35 ? swizzled(uint16_t(i.offset), l) : int((w.row(i.address)[l] + uint32_t(i.offset)) >> 2 & 31);
        int from = i.op == 0xb2 ? l : other, to = i.op == 0xb2 ? other : l;
        if (!(exec >> from & 1)) continue;
        out[to] = in[from];
        undefined = (undefined & ~(1u << to)) | (from_undefined >> from & 1) << to;
    }
    blend(w.target(i.dst), out, exec);
    w.define(i.dst, exec, undefined);
    w.issued(i.dst, 1, false, true);
}

// 32 banks of 4 bytes, each serving one word a cycle to any number of lanes: cycles beyond those that the words need.
struct Banks {
    uint32_t words[LANES * 8];
    unsigned count = 0;
    void add(uint64_t at, unsigned bytes) {
        for (uint64_t word = at / 4; word <= (at + bytes - 1) / 4; word++)
            if (count < std::size(words)) words[count++] = uint32_t(word);
    }
    uint64_t conflicts() {
        std::sort(words, words + count);
        unsigned distinct = unsigned(std::unique(words, words + count) - words), bank[32] = {}, most = 0;
        for (unsigned n = 0; n < distinct; n++) most = std::max(most, ++bank[words[n] % 32]);
        return most - (distinct + 31) / 32;
    }
};

} // namespace

const MemoryOp *lds_op(unsigned op) {
    static const auto all = [] {
        std::array<const MemoryOp *, 256> index{};
        for (const MemoryOp &o : table) index[o.op] = &o;
        return index;
    }();
    return op < 256 ? all[op] : nullptr;
}

void run_lds(Wave &w, const Instruction &i) {
    const MemoryOp &op = *lds_op(i.op);
    uint32_t exec = w.exec();
    if (i.op == 0x14) return;
    if (!exec) return w.issued(i.dst, 0, false, true);
    if (op.bytes == 0) return crossbar(w, i);
    bool load = op.flags & LOAD, atomic = op.flags & ATOMIC;
    unsigned step = op.bytes * (op.flags & STRIDE64 ? 64 : 1), parts = op.flags & TWO ? 2 : 1;
    if (op.flags & ADDTID) w.require(w.s_undefined[M0], "m0", "an address of LDS");
    else w.require(w.lanes_undefined(i.address) & exec, "a vector register of the lane", "an address of LDS");
    Banks banks;
    Row base; // the destination may be the address
    if (op.flags & ADDTID) for (int l = 0; l < LANES; l++) base[l] = (w.s[M0] & 0xffff) + 4 * l;
    else std::memcpy(base, w.row(i.address), sizeof base);
    for (unsigned part = 0; part < parts; part++) {
        uint32_t offset = parts == 1 ? uint32_t(i.offset) : (uint32_t(i.offset) >> 8 * part & 255) * step;
        uint16_t dst = uint16_t(i.dst + part * op.bytes / 4), data = part ? i.data2 : i.data;
        if (load) w.target(dst + (op.bytes + 3) / 4 - 1);
        for (int l = 0; l < LANES; l++) {
            if (!(exec >> l & 1)) continue;
            uint64_t at = uint64_t(base[l]) + offset;
            bool stores = !load && !atomic;
            Target t = lds_target(w, at, op.bytes, !load, atomic, l, !stores);
            banks.add(at, op.bytes);
            if (load) load_lane(w, dst, op, t, l);
            else if (stores) {
                std::array<uint8_t, 16> before, unknown;
                std::memcpy(before.data(), t.data, op.bytes), std::memcpy(unknown.data(), t.undefined, op.bytes);
                store_lane(w, data, op, t, l);
                // Waves that write what is there already do not race: bitsandbytes' each fill the same table.
                bool known = std::all_of(unknown.begin(), unknown.begin() + op.bytes, [](uint8_t u) { return !u; });
                if (!known || std::memcmp(before.data(), t.data, op.bytes)) lds_touch(w, unsigned(at), op.bytes, true, false, l);
            } else {
                Instruction part_of = i;
                part_of.dst = dst;
                bool compares = op.atomic == Atomic::CMPSWAP || op.atomic == Atomic::CMPSWAP_F || op.atomic == Atomic::MASKED_OR || op.atomic == Atomic::WRAP;
                atomic_lane(w, part_of, op.atomic, op.bytes, t, op.flags & RETURNS, words_of(w, data, op.bytes, l),
                            compares ? words_of(w, i.data2, op.bytes, l) : 0, l);
            }
        }
    }
    w.issued(i.dst, load || op.flags & RETURNS ? parts * ((op.bytes + 3) / 4) : 0, false, true, half_of(op));
    w.launch->stats.lds_conflict_cycles += banks.conflicts();
}

} // namespace gfx
