// Scalar operations, branches, and loads into scalar registers.
#include <algorithm>

#include "number.h"

namespace gfx {
namespace {

enum : uint8_t {
    NONZERO = 1,  // scc: the result is not 0
    SETS = 2,     // the operation sets scc
    READS = 4,    // it reads scc
    BITWISE = 8,  // each bit of the result depends on the same bit of the sources
    OLD = 16,     // it reads the destination
};

using std::bit_cast;
int32_t i32(uint64_t v) { return int32_t(uint32_t(v)); }
uint64_t u32(uint64_t v) { return uint32_t(v); }
uint64_t ones(uint64_t width) { return width >= 64 ? ~0ull : (1ull << width) - 1; }
uint64_t sign_extended(uint64_t v, unsigned width) { return width == 0 ? 0 : uint64_t(int64_t(v << (64 - width)) >> (64 - width)); }
uint64_t bfe(uint64_t v, uint64_t control, unsigned bits, bool is_signed) { // control: offset, width in bits 22:16
    unsigned at = control & (bits - 1), width = std::min<unsigned>(control >> 16 & 127, bits);
    uint64_t value = is_signed ? uint64_t(int64_t(sign_extended(v, bits)) >> at) : (v & ones(bits)) >> at;
    return is_signed ? sign_extended(value & ones(width), width) : value & ones(width);
}
uint64_t add(uint64_t a, uint64_t b, bool &scc) { return scc = a + b > 0xffffffff, u32(a + b); }
uint64_t sub(uint64_t a, uint64_t b, bool &scc) { return scc = a < b, u32(a - b); }
uint64_t add_signed(uint64_t a, uint64_t b, bool &scc) {
    int64_t t = int64_t(i32(a)) + i32(b);
    return scc = t != int32_t(t), u32(uint64_t(t));
}
uint64_t sub_signed(uint64_t a, uint64_t b, bool &scc) {
    int64_t t = int64_t(i32(a)) - i32(b);
    return scc = t != int32_t(t), u32(uint64_t(t));
}
uint64_t shifted_add(uint64_t a, uint64_t b, int by, bool &scc) {
    uint64_t t = (a << by) + b;
    return scc = t > 0xffffffff, u32(t);
}
uint64_t quads(uint64_t v, bool whole) { // one bit for each quad that has any, or four
    uint64_t r = 0;
    for (int q = 0; q < 16; q++) if (v >> 4 * q & 15) r |= whole ? 15ull << 4 * q : 1ull << q;
    return r;
}
int count_sign(uint64_t v, int bits) {
    bool top = v >> (bits - 1) & 1;
    for (int n = 1; n < bits; n++) if ((v >> (bits - 1 - n) & 1) != top) return n;
    return -1;
}
uint64_t reversed(uint64_t v, int bits) {
    uint64_t r = 0;
    for (int n = 0; n < bits; n++) r |= (v >> n & 1) << (bits - 1 - n);
    return r;
}
uint64_t doubled(uint64_t v) {
    uint64_t r = 0;
    for (int n = 0; n < 32; n++) if (v >> n & 1) r |= 3ull << 2 * n;
    return r;
}

void branch(Wave &w, const Instruction &i, bool taken, uint32_t undefined = 0) {
    w.require(undefined, "a condition", "a branch");
    if (taken) w.pc += int64_t(i.offset) * 4;
}
// vccz is known as soon as one bit that is defined is 1.
uint32_t undecided(const Wave &w) { return w.s[VCC] & ~w.s_undefined[VCC] ? 0 : w.s_undefined[VCC]; }
void nothing(Wave &, const Instruction &) {}
void jump(Wave &w, const Instruction &i) {
    w.require(w.scalar_undefined(i.src[0]) | w.scalar_undefined(i.src[0] + 1), "an address", "a branch");
    uint64_t next = w.pc;
    w.pc = w.scalar64(i.src[0], i);
    if (i.dst != ABSENT) w.set64(i.dst, next);
}
void message(Wave &, const Instruction &i) {
    if (i.offset != 3) fault("s_sendmsg %d: only 3, vector registers are given back, is known", i.offset);
}
// What will come into scalar registers, in any order with what was asked for before.
void sent(Wave &w, const Instruction &i, unsigned words) {
    w.local.scalar = ++w.local.issued;
    for (unsigned n = 0; n < words; n++) w.to_scalar[i.dst + n] = w.local.issued;
    if (!w.launch->check_undefined) w.local.wait(0);
}

void message_with_answer(Wave &w, const Instruction &i) {
    if (i.src[0] != 131) fault("%s %u: only 131, the time, is known", i.name, i.src[0]);
    bool wide = i.op == 0x4d;
    if (wide) w.set64(i.dst, w.launch->stats.instructions);
    else w.set(i.dst, uint32_t(w.launch->stats.instructions));
    sent(w, i, wide ? 2 : 1);
}
// vmcnt in bits 15:10, lgkmcnt in 9:4; SOPK's forms have one in the immediate.
void wait(Wave &w, const Instruction &i) {
    uint32_t n = uint32_t(i.offset) & 0xffff;
    if (i.scalar->form == Scalar::SOPP) w.memory.wait(n >> 10 & 63), w.local.wait(n >> 4 & 63);
    else if (i.op == 0x19) w.memory.wait(n);
    else if (i.op == 0x1b) w.local.wait(n);
}
void set_mode(Wave &w, uint32_t mode) { // as the hardware register: rounding, denormals
    if (mode & 15) fault("rounding mode %u: only to nearest even is known", mode & 15);
    for (int part : {4, 6})
        if (uint32_t keep = mode >> part & 3; keep == 1 || keep == 2) fault("denormals kept on one side only are not known");
    w.flush32 = !(mode >> 4 & 3), w.flush16_64 = !(mode >> 6 & 3);
}
uint32_t get_mode(const Wave &w) { return (w.flush32 ? 0 : 0x30) | (w.flush16_64 ? 0 : 0xc0) | uint32_t(w.launch->dx10_clamp) << 8 | uint32_t(w.launch->ieee) << 9; }
void hardware_register(Wave &w, const Instruction &i, bool write, uint32_t value) {
    unsigned id = i.offset & 63, at = i.offset >> 6 & 31, width = (i.offset >> 11 & 31) + 1;
    uint32_t mask = uint32_t(ones(width));
    if (id == 29 && !write) return w.set(i.dst, uint32_t(w.launch->stats.instructions) & mask); // SHADER_CYCLES
    if (id != 1) fault("hardware register %u is not known", id);
    if (!write) return w.set(i.dst, get_mode(w) >> at & mask);
    uint32_t mode = (get_mode(w) & ~(mask << at)) | (value & mask) << at;
    if ((mode ^ get_mode(w)) & ~0xffu) fault("a change of MODE beyond rounding and denormals");
    set_mode(w, mode);
}
template <int NUMBER> void saveexec(Wave &w, const Instruction &i) {
    uint32_t a = w.scalar(i.src[0], i), e = w.exec(), r;
    switch (NUMBER & 0x1e) {
    case 0x00: r = a & e; break;
    case 0x02: r = a | e; break;
    case 0x04: r = a ^ e; break;
    case 0x06: r = ~(a & e); break;
    case 0x08: r = ~(a | e); break;
    case 0x0a: r = ~(a ^ e); break;
    case 0x0c: case 0x14: r = ~a & e; break;
    case 0x0e: r = ~a | e; break;
    case 0x10: case 0x16: r = a & ~e; break;
    default: r = a | ~e;
    }
    uint32_t u = w.scalar_undefined(i.src[0]);
    w.set(EXEC, r, (NUMBER & 0x1e) == 0x0 || (NUMBER & 0x1e) == 0xc || (NUMBER & 0x1e) == 0x14 ? u & e : u);
    w.set(i.dst, NUMBER >= 0x14 ? r : e);
    w.scc = r != 0, w.scc_undefined = false;
}
unsigned relative(Wave &w, unsigned code, int shift, uint32_t mask) {
    w.require(w.s_undefined[M0], "m0", "which register is meant");
    unsigned to = code + (w.s[M0] >> shift & mask);
    if (to >= VCC) fault("a relative scalar register beyond s105");
    return to;
}
void copy(Wave &w, unsigned to, unsigned from, int words) {
    uint32_t value[2] = {w.s[from], w.s[from + 1]}, undefined[2] = {w.s_undefined[from], w.s_undefined[from + 1]};
    for (int n = 0; n < words; n++) w.set(to + n, value[n], undefined[n]);
}

#define D32 Kind::B32
#define D64 Kind::B64
#define NO Kind::NONE
#define ROW(FORM, OP, NAME, D, A, B, FLAGS, ...)                                                                            \
    {Scalar::FORM, OP, NAME, D, {A, B}, FLAGS, [](uint64_t a, uint64_t b, uint64_t d, bool &scc) -> uint64_t {              \
         (void)a, (void)b, (void)d, (void)scc; return __VA_ARGS__; }, nullptr},
#define TWO(OP, NAME, FLAGS, ...) ROW(SOP2, OP, NAME, D32, D32, D32, FLAGS, __VA_ARGS__)
#define TWO64(OP, NAME, FLAGS, ...) ROW(SOP2, OP, NAME, D64, D64, D64, FLAGS, __VA_ARGS__)
#define BOTH(OP, NAME, FLAGS, ...) TWO(OP, NAME "_b32", FLAGS, __VA_ARGS__) TWO64(OP + 1, NAME "_b64", FLAGS, __VA_ARGS__)
#define ONE(OP, NAME, FLAGS, ...) ROW(SOP1, OP, NAME, D32, D32, NO, FLAGS, __VA_ARGS__)
#define ONE64(OP, NAME, FLAGS, ...) ROW(SOP1, OP, NAME, D64, D64, NO, FLAGS, __VA_ARGS__)
#define TO32(OP, NAME, FLAGS, ...) ROW(SOP1, OP, NAME, D32, D64, NO, FLAGS, __VA_ARGS__)
#define COMPARE(OP, NAME, ...) ROW(SOPC, OP, NAME, NO, D32, D32, SETS, (scc = (__VA_ARGS__), 0))
#define COMPAREK(OP, NAME, ...) ROW(SOPK, OP, NAME, NO, D32, D32, SETS, (scc = (__VA_ARGS__), 0))
#define DO(FORM, OP, NAME, D, A, ...) \
    {Scalar::FORM, OP, NAME, D, {A, NO}, 0, nullptr, [](Wave &w, const Instruction &i) { (void)w, (void)i; __VA_ARGS__; }},
#define SAVE(OP, NAME) {Scalar::SOP1, OP, NAME, D32, {D32, NO}, 0, nullptr, saveexec<OP - 0x20>},
#define IDLE(OP, NAME) {Scalar::SOPP, OP, NAME, NO, {NO, NO}, 0, nullptr, nothing},

const ScalarOp table[] = {
    TWO(0x00, "s_add_u32", SETS, add(a, b, scc))
    TWO(0x01, "s_sub_u32", SETS, sub(a, b, scc))
    TWO(0x02, "s_add_i32", SETS, add_signed(a, b, scc))
    TWO(0x03, "s_sub_i32", SETS, sub_signed(a, b, scc))
    TWO(0x04, "s_addc_u32", SETS | READS, [&] { uint64_t t = a + b + scc; scc = t > 0xffffffff; return u32(t); }())
    TWO(0x05, "s_subb_u32", SETS | READS, [&] { uint64_t t = a - b - scc; scc = a < b + scc; return u32(t); }())
    TWO(0x06, "s_absdiff_i32", NONZERO, [&] { uint32_t t = uint32_t(a - b); return u32(int32_t(t) < 0 ? -t : t); }())
    TWO(0x08, "s_lshl_b32", NONZERO, u32(a << (b & 31)))
    ROW(SOP2, 0x09, "s_lshl_b64", D64, D64, D32, NONZERO, a << (b & 63))
    TWO(0x0a, "s_lshr_b32", NONZERO, a >> (b & 31))
    ROW(SOP2, 0x0b, "s_lshr_b64", D64, D64, D32, NONZERO, a >> (b & 63))
    TWO(0x0c, "s_ashr_i32", NONZERO, u32(uint64_t(i32(a) >> (b & 31))))
    ROW(SOP2, 0x0d, "s_ashr_i64", D64, Kind::I64, D32, NONZERO, uint64_t(int64_t(a) >> (b & 63)))
    TWO(0x0e, "s_lshl1_add_u32", SETS, shifted_add(a, b, 1, scc))
    TWO(0x0f, "s_lshl2_add_u32", SETS, shifted_add(a, b, 2, scc))
    TWO(0x10, "s_lshl3_add_u32", SETS, shifted_add(a, b, 3, scc))
    TWO(0x11, "s_lshl4_add_u32", SETS, shifted_add(a, b, 4, scc))
    TWO(0x12, "s_min_i32", SETS, (scc = i32(a) < i32(b)) ? a : b)
    TWO(0x13, "s_min_u32", SETS, (scc = a < b) ? a : b)
    TWO(0x14, "s_max_i32", SETS, (scc = i32(a) >= i32(b)) ? a : b)
    TWO(0x15, "s_max_u32", SETS, (scc = a >= b) ? a : b)
    BOTH(0x16, "s_and", NONZERO | BITWISE, a &b)
    BOTH(0x18, "s_or", NONZERO | BITWISE, a | b)
    BOTH(0x1a, "s_xor", NONZERO | BITWISE, a ^ b)
    BOTH(0x1c, "s_nand", NONZERO | BITWISE, ~(a & b))
    BOTH(0x1e, "s_nor", NONZERO | BITWISE, ~(a | b))
    BOTH(0x20, "s_xnor", NONZERO | BITWISE, ~(a ^ b))
    BOTH(0x22, "s_and_not1", NONZERO | BITWISE, a & ~b)
    BOTH(0x24, "s_or_not1", NONZERO | BITWISE, a | ~b)
    TWO(0x26, "s_bfe_u32", NONZERO, bfe(a, b, 32, false))
    TWO(0x27, "s_bfe_i32", NONZERO, u32(bfe(a, b, 32, true)))
    ROW(SOP2, 0x28, "s_bfe_u64", D64, D64, D32, NONZERO, bfe(a, b, 64, false))
    ROW(SOP2, 0x29, "s_bfe_i64", D64, Kind::I64, D32, NONZERO, bfe(a, b, 64, true))
    TWO(0x2a, "s_bfm_b32", 0, u32(ones(a & 31) << (b & 31)))
    ROW(SOP2, 0x2b, "s_bfm_b64", D64, D32, D32, 0, ones(a & 63) << (b & 63))
    TWO(0x2c, "s_mul_i32", 0, u32(a *b))
    TWO(0x2d, "s_mul_hi_u32", 0, a *b >> 32)
    TWO(0x2e, "s_mul_hi_i32", 0, u32(uint64_t(int64_t(i32(a)) * i32(b) >> 32)))
    BOTH(0x30, "s_cselect", READS, scc ? a : b)
    TWO(0x32, "s_pack_ll_b32_b16", 0, (a & 0xffff) | (b & 0xffff) << 16)
    TWO(0x33, "s_pack_lh_b32_b16", 0, (a & 0xffff) | (b & 0xffff0000))
    TWO(0x34, "s_pack_hh_b32_b16", 0, a >> 16 | (b & 0xffff0000))
    TWO(0x35, "s_pack_hl_b32_b16", 0, a >> 16 | (b & 0xffff) << 16)

    ONE(0x00, "s_mov_b32", BITWISE, a)
    ONE64(0x01, "s_mov_b64", BITWISE, a)
    ONE(0x02, "s_cmov_b32", READS | OLD, scc ? a : d)
    ONE64(0x03, "s_cmov_b64", READS | OLD, scc ? a : d)
    ONE(0x04, "s_brev_b32", 0, reversed(a, 32))
    ONE64(0x05, "s_brev_b64", 0, reversed(a, 64))
    ONE(0x08, "s_ctz_i32_b32", 0, a ? std::countr_zero(a) : ALL)
    TO32(0x09, "s_ctz_i32_b64", 0, a ? std::countr_zero(a) : ALL)
    ONE(0x0a, "s_clz_i32_u32", 0, a ? std::countl_zero(uint32_t(a)) : ALL)
    TO32(0x0b, "s_clz_i32_u64", 0, a ? std::countl_zero(a) : ALL)
    ONE(0x0c, "s_cls_i32", 0, u32(uint64_t(count_sign(a, 32))))
    TO32(0x0d, "s_cls_i32_i64", 0, u32(uint64_t(count_sign(a, 64))))
    ONE(0x0e, "s_sext_i32_i8", 0, u32(uint64_t(int8_t(a))))
    ONE(0x0f, "s_sext_i32_i16", 0, u32(uint64_t(int16_t(a))))
    ONE(0x10, "s_bitset0_b32", OLD, d & ~(1ull << (a & 31)))
    ROW(SOP1, 0x11, "s_bitset0_b64", D64, D32, NO, OLD, d & ~(1ull << (a & 63)))
    ONE(0x12, "s_bitset1_b32", OLD, d | 1ull << (a & 31))
    ROW(SOP1, 0x13, "s_bitset1_b64", D64, D32, NO, OLD, d | 1ull << (a & 63))
    ROW(SOP1, 0x14, "s_bitreplicate_b64_b32", D64, D32, NO, 0, doubled(a))
    ONE(0x15, "s_abs_i32", NONZERO, i32(a) < 0 ? u32(-a) : a)
    ONE(0x16, "s_bcnt0_i32_b32", NONZERO, 32 - std::popcount(a))
    TO32(0x17, "s_bcnt0_i32_b64", NONZERO, 64 - std::popcount(a))
    ONE(0x18, "s_bcnt1_i32_b32", NONZERO, std::popcount(a))
    TO32(0x19, "s_bcnt1_i32_b64", NONZERO, std::popcount(a))
    ONE(0x1a, "s_quadmask_b32", NONZERO, quads(a, false))
    ONE64(0x1b, "s_quadmask_b64", NONZERO, quads(a, false))
    ONE(0x1c, "s_wqm_b32", NONZERO, quads(a, true))
    ONE64(0x1d, "s_wqm_b64", NONZERO, quads(a, true))
    ONE(0x1e, "s_not_b32", NONZERO | BITWISE, ~a)
    ONE64(0x1f, "s_not_b64", NONZERO | BITWISE, ~a)
    SAVE(0x20, "s_and_saveexec_b32") SAVE(0x22, "s_or_saveexec_b32") SAVE(0x24, "s_xor_saveexec_b32")
    SAVE(0x26, "s_nand_saveexec_b32") SAVE(0x28, "s_nor_saveexec_b32") SAVE(0x2a, "s_xnor_saveexec_b32")
    SAVE(0x2c, "s_and_not0_saveexec_b32") SAVE(0x2e, "s_or_not0_saveexec_b32") SAVE(0x30, "s_and_not1_saveexec_b32")
    SAVE(0x32, "s_or_not1_saveexec_b32") SAVE(0x34, "s_and_not0_wrexec_b32") SAVE(0x36, "s_and_not1_wrexec_b32")
    DO(SOP1, 0x40, "s_movrels_b32", D32, D32, copy(w, i.dst, relative(w, i.src[0], 0, 127), 1))
    DO(SOP1, 0x41, "s_movrels_b64", D64, D64, copy(w, i.dst, relative(w, i.src[0], 0, 127), 2))
    DO(SOP1, 0x42, "s_movreld_b32", D32, D32, w.set(relative(w, i.dst, 0, 127), w.scalar(i.src[0], i), w.scalar_undefined(i.src[0])))
    DO(SOP1, 0x43, "s_movreld_b64", D64, D64, w.set64(relative(w, i.dst, 0, 127), w.scalar64(i.src[0], i)))
    DO(SOP1, 0x44, "s_movrelsd_2_b32", D32, D32, copy(w, relative(w, i.dst, 16, 1023), relative(w, i.src[0], 0, 1023), 1))
    DO(SOP1, 0x47, "s_getpc_b64", D64, NO, w.set64(i.dst, w.pc))
    DO(SOP1, 0x48, "s_setpc_b64", NO, D64, jump(w, i))
    DO(SOP1, 0x49, "s_swappc_b64", D64, D64, jump(w, i))
    DO(SOP1, 0x4c, "s_sendmsg_rtn_b32", D32, NO, message_with_answer(w, i))
    DO(SOP1, 0x4d, "s_sendmsg_rtn_b64", D64, NO, message_with_answer(w, i))

    COMPARE(0x00, "s_cmp_eq_i32", a == b) COMPARE(0x01, "s_cmp_lg_i32", a != b)
    COMPARE(0x02, "s_cmp_gt_i32", i32(a) > i32(b)) COMPARE(0x03, "s_cmp_ge_i32", i32(a) >= i32(b))
    COMPARE(0x04, "s_cmp_lt_i32", i32(a) < i32(b)) COMPARE(0x05, "s_cmp_le_i32", i32(a) <= i32(b))
    COMPARE(0x06, "s_cmp_eq_u32", a == b) COMPARE(0x07, "s_cmp_lg_u32", a != b)
    COMPARE(0x08, "s_cmp_gt_u32", a > b) COMPARE(0x09, "s_cmp_ge_u32", a >= b)
    COMPARE(0x0a, "s_cmp_lt_u32", a < b) COMPARE(0x0b, "s_cmp_le_u32", a <= b)
    COMPARE(0x0c, "s_bitcmp0_b32", !(a >> (b & 31) & 1)) COMPARE(0x0d, "s_bitcmp1_b32", a >> (b & 31) & 1)
    ROW(SOPC, 0x0e, "s_bitcmp0_b64", NO, D64, D32, SETS, (scc = !(a >> (b & 63) & 1), 0))
    ROW(SOPC, 0x0f, "s_bitcmp1_b64", NO, D64, D32, SETS, (scc = a >> (b & 63) & 1, 0))
    ROW(SOPC, 0x10, "s_cmp_eq_u64", NO, D64, D64, SETS, (scc = a == b, 0))
    ROW(SOPC, 0x11, "s_cmp_lg_u64", NO, D64, D64, SETS, (scc = a != b, 0))

    ROW(SOPK, 0x00, "s_movk_i32", D32, NO, D32, 0, b)
    ROW(SOPK, 0x02, "s_cmovk_i32", D32, NO, D32, READS | OLD, scc ? b : d)
    COMPAREK(0x03, "s_cmpk_eq_i32", a == b) COMPAREK(0x04, "s_cmpk_lg_i32", a != b)
    COMPAREK(0x05, "s_cmpk_gt_i32", i32(a) > i32(b)) COMPAREK(0x06, "s_cmpk_ge_i32", i32(a) >= i32(b))
    COMPAREK(0x07, "s_cmpk_lt_i32", i32(a) < i32(b)) COMPAREK(0x08, "s_cmpk_le_i32", i32(a) <= i32(b))
    COMPAREK(0x09, "s_cmpk_eq_u32", a == (b & 0xffff)) COMPAREK(0x0a, "s_cmpk_lg_u32", a != (b & 0xffff))
    COMPAREK(0x0b, "s_cmpk_gt_u32", a > (b & 0xffff)) COMPAREK(0x0c, "s_cmpk_ge_u32", a >= (b & 0xffff))
    COMPAREK(0x0d, "s_cmpk_lt_u32", a < (b & 0xffff)) COMPAREK(0x0e, "s_cmpk_le_u32", a <= (b & 0xffff))
    ROW(SOPK, 0x0f, "s_addk_i32", D32, NO, D32, SETS | OLD, add_signed(d, b, scc))
    ROW(SOPK, 0x10, "s_mulk_i32", D32, NO, D32, OLD, u32(d *b))
    DO(SOPK, 0x11, "s_getreg_b32", D32, NO, hardware_register(w, i, false, 0))
    DO(SOPK, 0x12, "s_setreg_b32", NO, D32, hardware_register(w, i, true, w.scalar(i.src[0], i)))
    DO(SOPK, 0x13, "s_setreg_imm32_b32", NO, NO, hardware_register(w, i, true, i.literal))
    DO(SOPK, 0x14, "s_call_b64", D64, NO, uint64_t next = w.pc; w.pc += int64_t(i.offset) * 4; w.set64(i.dst, next))
    DO(SOPK, 0x18, "s_waitcnt_vscnt", NO, NO, nothing(w, i)) DO(SOPK, 0x19, "s_waitcnt_vmcnt", NO, NO, wait(w, i))
    DO(SOPK, 0x1a, "s_waitcnt_expcnt", NO, NO, nothing(w, i)) DO(SOPK, 0x1b, "s_waitcnt_lgkmcnt", NO, NO, wait(w, i))

    IDLE(0x00, "s_nop") IDLE(0x03, "s_sleep") IDLE(0x04, "s_set_inst_prefetch_distance") IDLE(0x05, "s_clause")
    IDLE(0x07, "s_delay_alu") IDLE(0x08, "s_waitcnt_depctr") DO(SOPP, 0x09, "s_waitcnt", NO, NO, wait(w, i)) DO(SOPP, 0x0a, "s_wait_idle", NO, NO, w.memory.wait(0); w.local.wait(0))
    IDLE(0x0b, "s_wait_event") IDLE(0x34, "s_wakeup") IDLE(0x35, "s_setprio") IDLE(0x38, "s_incperflevel")
    IDLE(0x39, "s_decperflevel") IDLE(0x3a, "s_ttracedata") IDLE(0x3b, "s_ttracedata_imm") IDLE(0x3c, "s_icache_inv")
    DO(SOPP, 0x10, "s_trap", NO, NO, fault("s_trap %d: an assertion of the kernel failed", i.offset))
    DO(SOPP, 0x11, "s_round_mode", NO, NO, set_mode(w, (get_mode(w) & ~15u) | (i.offset & 15)))
    DO(SOPP, 0x12, "s_denorm_mode", NO, NO, set_mode(w, (get_mode(w) & ~0xf0u) | (i.offset & 15) << 4))
    DO(SOPP, 0x1f, "s_code_end", NO, NO, fault("the program ran past its end"))
    DO(SOPP, 0x20, "s_branch", NO, NO, branch(w, i, true))
    DO(SOPP, 0x21, "s_cbranch_scc0", NO, NO, branch(w, i, !w.scc, w.scc_undefined))
    DO(SOPP, 0x22, "s_cbranch_scc1", NO, NO, branch(w, i, w.scc, w.scc_undefined))
    DO(SOPP, 0x23, "s_cbranch_vccz", NO, NO, branch(w, i, !w.s[VCC], undecided(w)))
    DO(SOPP, 0x24, "s_cbranch_vccnz", NO, NO, branch(w, i, w.s[VCC], undecided(w)))
    DO(SOPP, 0x25, "s_cbranch_execz", NO, NO, branch(w, i, !w.exec()))
    DO(SOPP, 0x26, "s_cbranch_execnz", NO, NO, branch(w, i, w.exec()))
    DO(SOPP, 0x30, "s_endpgm", NO, NO, w.state = Wave::ENDED)
    DO(SOPP, 0x36, "s_sendmsg", NO, NO, message(w, i))
    DO(SOPP, 0x3d, "s_barrier", NO, NO, w.state = Wave::WAITING)
};

uint64_t undefined64(const Wave &w, uint16_t code, Kind kind) {
    if (code == ABSENT || kind == NO) return 0;
    uint64_t low = w.scalar_undefined(code);
    return bits_of(kind) == 64 && code < 128 && code != NUL ? uint64_t(w.scalar_undefined(code + 1)) << 32 | low : low;
}

} // namespace

void run_scalar(Wave &w, const Instruction &i) {
    const ScalarOp &op = *i.scalar;
    uint64_t v[2] = {}, u[2] = {};
    for (int k = 0; k < 2; k++) {
        if (op.s[k] == NO) continue;
        v[k] = bits_of(op.s[k]) == 64 ? w.scalar64(i.src[k], i, op.s[k] == Kind::I64) : w.scalar(i.src[k], i);
        u[k] = undefined64(w, i.src[k], op.s[k]);
    }
    bool wide = bits_of(op.d) == 64, scc = w.scc;
    uint64_t width = wide ? ~0ull : ALL, old = 0, old_undefined = 0;
    if (op.flags & OLD) old = wide ? w.scalar64(i.dst, i) : w.scalar(i.dst, i), old_undefined = undefined64(w, i.dst, op.d);
    uint64_t result = op.result(v[0], v[1], old, scc) & width, undefined = 0;
    if (op.flags & READS && w.scc_undefined) undefined = width;
    if (u[0] | u[1] | old_undefined) {
        if (op.flags & BITWISE) {
            bool ignored = false;
            uint64_t base = op.result(v[0] & ~u[0], v[1] & ~u[1], old, ignored);
            for (int n = 1; n < 4; n++)
                undefined |= base ^ op.result(n & 1 ? v[0] | u[0] : v[0] & ~u[0], n & 2 ? v[1] | u[1] : v[1] & ~u[1], old, ignored);
            undefined &= width;
        } else if (op.flags & READS && !(op.flags & SETS) && !w.scc_undefined) { // a choice
            undefined = (w.scc ? u[0] | (op.s[0] == NO ? u[1] : 0) : op.flags & OLD ? old_undefined : u[1]) & width;
        } else undefined = width;
    }
    if (op.d != NO) {
        if (wide) w.set64(i.dst, result, undefined);
        else w.set(i.dst, uint32_t(result), uint32_t(undefined));
    }
    if (op.flags & NONZERO) w.scc = result != 0, w.scc_undefined = undefined && !(result & ~undefined);
    if (op.flags & SETS) w.scc = scc, w.scc_undefined = op.d == NO ? (u[0] | u[1]) != 0 : undefined != 0;
}

const ScalarOp *scalar_op(Scalar form, unsigned op) {
    static const auto all = [] {
        std::array<std::array<const ScalarOp *, 256>, 5> index{};
        for (const ScalarOp &o : table) index[size_t(o.form)][o.op] = &o;
        return index;
    }();
    return op < 256 ? all[size_t(form)][op] : nullptr;
}

void run_smem(Wave &w, const Instruction &i) {
    if (i.bytes == 0) return; // a cache is invalidated
    uint64_t at = w.scalar64(i.address, i);
    uint32_t undefined = w.scalar_undefined(i.address) | w.scalar_undefined(i.address + 1);
    int64_t offset = i.offset;
    if (i.saddr != NUL && i.saddr != ABSENT) offset += w.scalar(i.saddr, i), undefined |= w.scalar_undefined(i.saddr);
    uint32_t records = ALL;
    if (i.op >= 8) { // through a buffer's descriptor
        at &= 0xffffffffffff, records = w.scalar(i.address + 2, i);
        undefined |= w.scalar_undefined(i.address + 2);
        if (uint32_t stride = w.scalar(i.address + 1, i) >> 16 & 0x3fff) records *= stride;
    }
    w.require(undefined, "a scalar register", "an address");
    unsigned words = i.bytes / 4;
    if (i.op >= 8) {
        for (unsigned n = 0; n < words; n++) {
            uint64_t from = (uint64_t(offset) & ~3ull) + 4 * n;
            uint32_t value = 0;
            if (from + 4 <= records) std::memcpy(&value, w.launch->memory(at + from, 4, false, -1), 4);
            w.set(i.dst + n, value);
        }
        return sent(w, i, words);
    }
    const uint8_t *from = w.launch->memory((at + uint64_t(offset)) & ~3ull, i.bytes, false, -1);
    uint32_t values[16];
    std::memcpy(values, from, i.bytes);
    for (unsigned n = 0; n < words; n++) w.set(i.dst + n, values[n]);
    sent(w, i, words);
    w.launch->stats.bytes_loaded += i.bytes;
}

} // namespace gfx
