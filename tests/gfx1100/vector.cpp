// How a vector instruction runs: sources fetched as rows, the operation on all lanes, the result into active ones.
#include <algorithm>

#include "number.h"

namespace gfx {

uint32_t inline_constant(unsigned code, Kind kind) { return uint32_t(inline_constant64(code, kind)); }

uint64_t inline_constant64(unsigned code, Kind kind) {
    if (code >= ZERO && code <= ZERO + 64) return code - ZERO;
    if (code >= MINUS_ONE && code < MINUS_ONE + 16) return uint64_t(int64_t(int(MINUS_ONE) - 1 - int(code)));
    static const double values[] = {0.5, -0.5, 1, -1, 2, -2, 4, -4, 0.15915494309189532};
    if (code < HALF || code > HALF + 8) fault("operand code %u is reserved", code);
    double v = values[code - HALF];
    if (bits_of(kind) == 64) return std::bit_cast<uint64_t>(v);
    return bits_of(kind) == 16 ? float_to_half(float(v)) : std::bit_cast<uint32_t>(float(v));
}

uint32_t Wave::scalar(unsigned code, const Instruction &i) const {
    if (code < 128) {
        if (to_scalar[code] > local.come) awaited('s', code);
        return code == NUL ? 0 : s[code];
    }
    switch (code) {
    case LITERAL: return i.literal;
    case SCC: return scc;
    case EXECZ: return exec() == 0;
    case SHARED_BASE: case PRIVATE_BASE: return 0; // only the upper halves of these are not 0
    case SHARED_LIMIT: case PRIVATE_LIMIT: return 0xffffffff;
    }
    return inline_constant(code, Kind::B32);
}

uint64_t Wave::scalar64(unsigned code, const Instruction &i, bool sign) const {
    if (code < 128) return code == NUL ? 0 : uint64_t(scalar(code + 1, i)) << 32 | scalar(code, i);
    if (code == LITERAL) return sign ? uint64_t(int64_t(int32_t(i.literal))) : i.literal;
    if (code == SHARED_BASE || code == SHARED_LIMIT) return uint64_t(SHARED_APERTURE) << 32 | scalar(code, i);
    if (code == PRIVATE_BASE || code == PRIVATE_LIMIT) return uint64_t(PRIVATE_APERTURE) << 32 | scalar(code, i);
    if (code == SCC || code == EXECZ) return scalar(code, i);
    return inline_constant64(code, Kind::B64);
}

uint32_t Wave::scalar_undefined(unsigned code) const {
    if (code == SCC) return scc_undefined ? ALL : 0;
    return code < 128 && code != NUL ? s_undefined[code] : 0;
}

void Wave::set(unsigned code, uint32_t value, uint32_t undefined) {
    if (code == NUL) return;
    if (code >= 128) fault("scalar destination %u does not exist", code);
    if (to_scalar[code] > local.come) awaited('s', code);
    if (code == EXEC) require(undefined, "the mask of active lanes", "which lanes go on");
    s[code] = value, s_undefined[code] = undefined;
}

void Wave::awaited(char kind, unsigned number) const {
    fault("%c%u is used, but the program has not waited for the load into it", kind, number);
}

void Wave::issued(unsigned vgpr, unsigned words, bool by_memory, bool by_local, int half) {
    uint32_t number = by_memory ? ++memory.issued : 0, local_number = by_local ? ++local.issued : 0;
    if (!launch->check_undefined) return memory.wait(0), local.wait(0);
    for (unsigned r = vgpr; r < vgpr + words; r++)
        for (int each : {0, 1}) {
            if (half == 1 - each) continue;
            if (by_memory) from_memory[each][r] = number;
            if (by_local) from_local[each][r] = local_number;
        }
}

uint32_t *Wave::target(unsigned vgpr) {
    if (vgpr >= launch->vgprs) fault("v%u is used, but the kernel has %u vector registers", vgpr, launch->vgprs);
    return v[vgpr];
}

void Wave::define(unsigned vgpr, uint32_t mask, uint32_t undefined, int half) {
    if (half != 1) low_undefined[vgpr] = (low_undefined[vgpr] & ~mask) | (undefined & mask);
    if (half != 0) high_undefined[vgpr] = (high_undefined[vgpr] & ~mask) | (undefined & mask);
}

void Wave::require(uint32_t undefined, const char *what, const char *decides) const {
    if (undefined && launch->check_undefined)
        fault("%s holds what was never written, and decides %s (first at bit or lane %d)", what, decides, std::countr_zero(undefined));
}

namespace {

// From which lane each lane reads (-1: from none), and which lanes may write.
struct Permutation {
    int8_t from[LANES];
    uint32_t writes = ALL, zeros = 0;
};

Permutation permutation(const Instruction &i, uint32_t exec) {
    Permutation p;
    uint32_t c = i.control;
    if (i.dpp > 1) {
        for (int l = 0; l < LANES; l++) {
            p.from[l] = int8_t((l & ~7) | (c >> (3 * (l & 7)) & 7));
            if (i.dpp == 2 && !(exec >> p.from[l] & 1)) p.zeros |= 1u << l;
        }
        return p;
    }
    unsigned control = c >> 8 & 0x1ff, n = control & 15;
    bool fetch_inactive = c >> 18 & 1, zero = c >> 19 & 1;
    for (int l = 0; l < LANES; l++) {
        int row = l & 16, at = l & 15, from;
        switch (control >> 4) {
        case 0x10: from = at + int(n); break; // row_shl
        case 0x11: from = at - int(n); break;
        case 0x12: from = (at - int(n)) & 15; break;
        case 0x14: from = n == 0 ? 15 - at : at ^ 7; break;
        case 0x15: from = int(n); break;
        case 0x16: from = at ^ int(n); break;
        default: from = (at & ~3) | int(control >> 2 * (at & 3) & 3);
        }
        bool there = from >= 0 && from < 16 && (fetch_inactive || exec >> (row | from) & 1);
        p.from[l] = int8_t(row | (from & 15));
        if (!there) (zero ? p.zeros : p.writes) ^= 1u << l;
        if (!(c >> 28 >> (l >> 4) & 1) || !(c >> 24 >> (l >> 2 & 3) & 1)) p.writes &= ~(1u << l);
    }
    return p;
}

uint32_t permuted(uint32_t bits, const Permutation &p) {
    uint32_t r = 0;
    for (int l = 0; l < LANES; l++) r |= (bits >> p.from[l] & 1) << l;
    return r & ~p.zeros;
}

void flush(uint32_t *lo, uint32_t *hi, Kind kind) {
    for (int l = 0; l < LANES; l++) {
        if (kind == Kind::F32) lo[l] = lo[l] & 0x7f800000 ? lo[l] : lo[l] & 0x80000000;
        else if (kind == Kind::F16) lo[l] = lo[l] & 0x7c00 ? lo[l] : lo[l] & 0x8000;
        else if (!(hi[l] & 0x7ff00000)) lo[l] = 0, hi[l] &= 0x80000000;
    }
}

uint32_t lanes_undefined(Wave &w, uint16_t code, Kind kind, bool upper) {
    if (code < VGPR) {
        if (kind == Kind::MASK) return w.scalar_undefined(code);
        bool any = w.scalar_undefined(code) || (bits_of(kind) == 64 && code < NUL && w.scalar_undefined(code + 1));
        return any ? ALL : 0;
    }
    unsigned r = code - VGPR;
    if (bits_of(kind) == 16) return upper ? w.high_undefined[r] : w.low_undefined[r];
    return w.lanes_undefined(r) | (bits_of(kind) == 64 ? w.lanes_undefined(r + 1) : 0);
}

// Undefined bits of one lane's result, where operations let defined bits through; all of them otherwise.
uint32_t undefined_bits(unsigned op, const uint32_t u[3], const uint32_t v[3], const VectorOp &table) {
    auto conjunction = [](uint32_t ua, uint32_t ub, uint32_t a, uint32_t b) { return (ua & ub) | (ua & b) | (ub & a); };
    uint32_t any = u[0] | u[1] | u[2];
    auto through = [&](uint32_t a, uint32_t b, uint32_t c) { // the operation itself on the undefined bits
        Buffer in[3], out;
        in[0].lo[0] = a, in[1].lo[0] = b, in[2].lo[0] = c;
        Row carry;
        Lanes x{{in[0].lo, in[1].lo, in[2].lo}, {in[0].hi, in[1].hi, in[2].hi}, out.lo, out.hi, carry, 0, false, false};
        table.run(x);
        return out.lo[0];
    };
    switch (op) {
    case 0x11b: return conjunction(u[0], u[1], v[0], v[1]);
    case 0x11c: return conjunction(u[0], u[1], ~v[0], ~v[1]);
    case 0x257: return conjunction(conjunction(u[0], u[1], v[0], v[1]), u[2], ~(v[0] & v[1]), ~v[2]);
    case 0x256: return u[1] ? ALL : conjunction(u[0] << (v[1] & 31), u[2], ~(v[0] << (v[1] & 31)), ~v[2]);
    case 0x11d: case 0x11e: case 0x181: case 0x1b7: case 0x240: case 0x258: return any;
    case 0x101: return u[2] ? (v[0] ^ v[1]) | u[0] | u[1] : v[2] ? u[1] : u[0];
    case 0x118: case 0x119: case 0x11a: return u[0] ? ALL : through(v[0], u[1], 0);
    case 0x210: case 0x211: return u[1] | u[2] ? ALL : through(u[0], v[1], v[2]);
    case 0x216: case 0x217: case 0x244: return u[2] ? ALL : through(u[0], u[1], v[2]);
    case 0x212: return u[0] ? ALL : through(v[0], u[1], u[2]);
    case 0x311: return through(u[0], u[1], 0) ? (u[0] & 0xffff) | u[1] << 16 : 0;
    case 0x103: case 0x104: break;
    case 0x125: case 0x126: case 0x127: case 0x255: return any | -any; // carries go up
    }
    return any ? ALL : 0;
}

void write_result(Wave &w, const Instruction &i, const VectorOp &op, unsigned dst, Buffer &out, uint32_t mask, uint32_t low,
                  uint32_t high, uint32_t top = 0) {
    if (op.d == Kind::F32 && w.flush32) flush(out.lo, out.hi, op.d);
    if ((op.d == Kind::F16 || op.d == Kind::F64) && w.flush16_64) flush(out.lo, out.hi, op.d);
    if (is_float(op.d) && (i.omod || i.clamp)) {
        // Output modifiers are ignored where denormals are kept or in IEEE mode.
        bool scale = i.omod && !w.launch->ieee && (op.d == Kind::F32 ? w.flush32 : w.flush16_64);
        double by = !scale ? 1 : i.omod == 1 ? 2 : i.omod == 2 ? 4 : 0.5;
        auto change = [&](auto v) {
            v = decltype(v)(v * by);
            if (!i.clamp) return v;
            if (v != v) return w.launch->dx10_clamp ? decltype(v)(0) : v;
            return std::min(std::max(v, decltype(v)(0)), decltype(v)(1));
        };
        for (int l = 0; l < LANES; l++) {
            if (op.d == Kind::F32) F32::put(out.lo, out.hi, l, change(F32::get(out.lo, out.hi, l)));
            else if (op.d == Kind::F16) F16::put(out.lo, out.hi, l, change(F16::get(out.lo, out.hi, l)));
            else F64::put(out.lo, out.hi, l, change(F64::get(out.lo, out.hi, l)));
        }
    }
    bool upper = i.opsel >> 3 & 1;
    uint32_t *row = w.row(dst, bits_of(op.d) == 16 ? upper : -1);
    if (bits_of(op.d) == 16) {
        for (int l = 0; l < LANES; l++)
            out.lo[l] = upper ? (row[l] & 0xffff) | out.lo[l] << 16 : (row[l] & 0xffff0000) | (out.lo[l] & 0xffff);
        blend(row, out.lo, mask);
        w.define(dst, mask, low, upper);
        return;
    }
    blend(row, out.lo, mask);
    w.define(dst, mask, low, 0);
    w.define(dst, mask, high, 1);
    if (bits_of(op.d) == 64) {
        blend(w.row(dst + 1), out.hi, mask);
        w.define(dst + 1, mask, low | high | top);
    }
}

uint32_t collapse(const uint32_t *flags) {
    uint32_t mask = 0;
    for (int l = 0; l < LANES; l++) mask |= (flags[l] & 1) << l;
    return mask;
}

struct Result {
    Buffer out;
    Row carry;
    uint32_t low = 0, high = 0, top = 0; // undefined lanes of its halves; and of the upper register alone
};

// Everything but the writing, which for dual instructions comes after both halves have read.
void compute(Wave &w, const Instruction &i, const VectorOp &op, const uint16_t *src, uint32_t exec, Result &r, const Permutation *p) {
    Buffer in[3];
    Lanes x;
    uint32_t undefined[3] = {}, any = 0;
    for (int k = 0; k < 3; k++) {
        if (op.s[k] == Kind::NONE) continue;
        if (src[k] == ABSENT) fault("an operand is missing");
        fetch(w, i, k, src[k], op.s[k], in[k], x.lo[k], x.hi[k]);
        undefined[k] = lanes_undefined(w, src[k], op.s[k], i.opsel >> k & 1);
        if (k == 0 && p) undefined[k] = permuted(undefined[k], *p);
        any |= undefined[k];
    }
    x.dlo = r.out.lo, x.dhi = r.out.hi, x.carry = r.carry;
    x.vcc = w.s[VCC], x.clamp = i.clamp, x.ieee = w.launch->ieee;
    op.run(x);
    any &= exec;
    r.low = r.high = any;
    if (op.op == 0x2fe || op.op == 0x2ff) { // v_mad_[ui]64_*: the lower sum is that of the lower parts
        uint32_t lower = src[2] >= VGPR ? w.lanes_undefined(src[2] - VGPR) : undefined[2];
        r.top = any, r.low = r.high = (undefined[0] | undefined[1] | lower) & exec;
    }
    if (!any || op.d != Kind::B32 || op.run == nullptr) return;
    r.low = r.high = 0;
    for (int l = 0; l < LANES; l++) {
        if (!(any >> l & 1)) continue;
        uint32_t u[3] = {}, v[3] = {};
        for (int k = 0; k < 3; k++) {
            if (op.s[k] == Kind::NONE) continue;
            v[k] = x.lo[k][l];
            if (!(undefined[k] >> l & 1)) continue;
            u[k] = ALL;
            if (src[k] < VGPR || op.s[k] == Kind::MASK || bits_of(op.s[k]) == 16) continue;
            int from = k == 0 && p ? p->from[l] : l;
            u[k] = (w.low_undefined[src[k] - VGPR] >> from & 1 ? 0xffff : 0) | (w.high_undefined[src[k] - VGPR] >> from & 1 ? 0xffff0000 : 0);
        }
        uint32_t bits = undefined_bits(op.op, u, v, op);
        if (bits & 0xffff) r.low |= 1u << l;
        if (bits >> 16) r.high |= 1u << l;
    }
}

} // namespace

void fetch(Wave &w, const Instruction &i, int k, uint16_t code, Kind kind, Buffer &b, const uint32_t *&lo, const uint32_t *&hi, int half) {
    bool wide = bits_of(kind) == 64, copied = false;
    hi = b.hi;
    if (kind == Kind::MASK) {
        uint32_t mask = w.scalar(code, i);
        for (int l = 0; l < LANES; l++) b.lo[l] = mask >> l & 1;
        lo = b.lo;
        return;
    }
    if (code >= VGPR) {
        lo = w.row(code - VGPR, bits_of(kind) == 16 ? i.opsel >> k & 1 : half);
        if (wide) hi = w.row(code - VGPR + 1);
    } else {
        uint64_t value;
        if (code >= ZERO && code < SHARED_BASE) value = inline_constant64(code, kind);
        else if (code >= HALF && code <= HALF + 8) value = inline_constant64(code, kind);
        else if (code == LITERAL && kind == Kind::F64) value = uint64_t(i.literal) << 32;
        else value = wide ? w.scalar64(code, i, kind == Kind::I64) : w.scalar(code, i);
        std::fill_n(b.lo, LANES, uint32_t(value));
        if (wide) std::fill_n(b.hi, LANES, uint32_t(value >> 32));
        lo = b.lo, copied = true;
    }
    auto copy = [&] {
        if (copied) return;
        std::memcpy(b.lo, lo, sizeof b.lo);
        if (wide) std::memcpy(b.hi, hi, sizeof b.hi);
        lo = b.lo, hi = b.hi, copied = true;
    };
    if (k == 0 && i.dpp) {
        Permutation p = permutation(i, w.exec());
        Row from;
        std::memcpy(from, lo, sizeof from);
        for (int l = 0; l < LANES; l++) b.lo[l] = p.zeros >> l & 1 ? 0 : from[p.from[l]];
        lo = b.lo, copied = true;
    }
    if (bits_of(kind) == 16 && i.opsel >> k & 1) {
        copy();
        for (int l = 0; l < LANES; l++) b.lo[l] >>= 16;
    }
    if (!has_sign(kind)) return;
    if (is_float(kind) && (kind == Kind::F32 ? w.flush32 : w.flush16_64)) copy(), flush(b.lo, b.hi, kind);
    bool negate = i.neg >> k & 1, absolute = i.abs >> k & 1;
    if (!negate && !absolute) return;
    copy();
    uint32_t *row = wide ? b.hi : b.lo, sign = bits_of(kind) == 16 ? 0x8000 : 0x80000000;
    for (int l = 0; l < LANES; l++) row[l] = (absolute ? row[l] & ~sign : row[l]) ^ (negate ? sign : 0);
}

void run_vector(Wave &w, const Instruction &i) {
    const VectorOp &op = *i.v;
    uint32_t exec = w.exec();
    Result r;
    if (i.dpp) {
        Permutation p = permutation(i, exec);
        exec &= p.writes;
        compute(w, i, op, i.src, exec, r, &p);
    } else {
        compute(w, i, op, i.src, exec, r, nullptr);
    }
    if (op.d == Kind::MASK) {
        w.set(i.sdst, collapse(r.out.lo) & exec, (r.low | r.high) & exec);
        return;
    }
    write_result(w, i, op, i.dst, r.out, exec, r.low, r.high, r.top);
    if (op.flags & CARRY) w.set(i.sdst, collapse(r.carry) & exec, (r.low | r.high | r.top) & exec);
}

void run_dual(Wave &w, const Instruction &i) {
    Result x, y;
    compute(w, i, *i.v, i.src, w.exec(), x, nullptr);
    compute(w, i, *i.v2, i.src2, w.exec(), y, nullptr);
    write_result(w, i, *i.v, i.dst, x.out, w.exec(), x.low, x.high);
    write_result(w, i, *i.v2, i.dst2, y.out, w.exec(), y.low, y.high);
}

// Operations that read or write registers across lanes, or others than those that they name.
namespace {

uint32_t undefined_everywhere(Wave &w, uint16_t code, int lane) {
    return code < VGPR ? w.scalar_undefined(code) : w.lanes_undefined(code - VGPR) >> lane & 1 ? ALL : 0;
}
uint32_t lane_value(Wave &w, const Instruction &i, uint16_t code, int lane) {
    return code < VGPR ? w.scalar(code, i) : w.row(code - VGPR)[lane];
}
void nothing(Wave &, const Instruction &) {}
void readfirstlane(Wave &w, const Instruction &i) {
    int lane = w.exec() ? std::countr_zero(w.exec()) : 0;
    w.set(i.dst, lane_value(w, i, i.src[0], lane), undefined_everywhere(w, i.src[0], lane));
}
void readlane(Wave &w, const Instruction &i) {
    w.require(w.scalar_undefined(i.src[1]), "the number of a lane", "which lane is read");
    int lane = w.scalar(i.src[1], i) & 31;
    w.set(i.dst, lane_value(w, i, i.src[0], lane), undefined_everywhere(w, i.src[0], lane));
}
void writelane(Wave &w, const Instruction &i) {
    w.require(w.scalar_undefined(i.src[1]), "the number of a lane", "which lane is written");
    int lane = w.scalar(i.src[1], i) & 31;
    w.row(i.dst)[lane] = w.scalar(i.src[0], i);
    w.define(i.dst, 1u << lane, w.scalar_undefined(i.src[0]) ? ALL : 0);
}
template <int CROSS> void permlane16(Wave &w, const Instruction &i) {
    uint64_t select = uint64_t(w.scalar(i.src[2], i)) << 32 | w.scalar(i.src[1], i);
    w.require(w.scalar_undefined(i.src[1]) | w.scalar_undefined(i.src[2]), "a lane selector", "which lane is read");
    bool fetch_inactive = i.opsel & 1, zero = i.opsel >> 1 & 1;
    Row out, source;
    std::memcpy(source, w.row(i.src[0] - VGPR), sizeof source);
    uint32_t undefined = w.lanes_undefined(i.src[0] - VGPR), mask = w.exec(), bits = 0;
    for (int l = 0; l < LANES; l++) {
        int from = ((l & 16) ^ (CROSS ? 16 : 0)) | int(select >> 4 * (l & 15) & 15);
        bool there = fetch_inactive || w.exec() >> from & 1;
        out[l] = there ? source[from] : 0;
        if (there) bits |= (undefined >> from & 1) << l;
        else if (!zero) mask &= ~(1u << l);
    }
    blend(w.row(i.dst), out, mask);
    w.define(i.dst, mask, bits);
}
unsigned relative(Wave &w, int shift, uint32_t mask) {
    w.require(w.s_undefined[M0], "m0", "which register is meant");
    return w.s[M0] >> shift & mask;
}
void move(Wave &w, const Instruction &i, unsigned to, unsigned from) {
    if (i.src[0] < VGPR) { // only the source of v_movreld_b32 can be a scalar
        for (int l = 0; l < LANES; l++) if (w.exec() >> l & 1) w.row(to)[l] = w.scalar(i.src[0], i);
        w.define(to, w.exec(), w.scalar_undefined(i.src[0]) ? ALL : 0);
        return;
    }
    blend(w.row(to), w.row(from), w.exec());
    w.define(to, w.exec(), w.low_undefined[from], 0);
    w.define(to, w.exec(), w.high_undefined[from], 1);
}
void swap(Wave &w, unsigned a, unsigned b) {
    for (int l = 0; l < LANES; l++) if (w.exec() >> l & 1) std::swap(w.row(a)[l], w.row(b)[l]);
    uint32_t low = w.low_undefined[a], high = w.high_undefined[a];
    w.define(a, w.exec(), w.low_undefined[b], 0), w.define(a, w.exec(), w.high_undefined[b], 1);
    w.define(b, w.exec(), low, 0), w.define(b, w.exec(), high, 1);
}
void swap_b16(Wave &w, const Instruction &i) {
    unsigned a = i.dst, b = i.src[0] - VGPR;
    int shift_a = i.opsel & 8 ? 16 : 0, shift_b = i.opsel & 1 ? 16 : 0;
    uint32_t *ua = shift_a ? w.high_undefined : w.low_undefined, *ub = shift_b ? w.high_undefined : w.low_undefined;
    uint32_t of_a = ua[a], of_b = ub[b], *row_a = w.row(a, shift_a != 0), *row_b = w.row(b, shift_b != 0);
    for (int l = 0; l < LANES; l++) {
        if (!(w.exec() >> l & 1)) continue;
        uint32_t x = row_a[l] >> shift_a & 0xffff, y = row_b[l] >> shift_b & 0xffff;
        row_a[l] = (row_a[l] & ~(0xffffu << shift_a)) | y << shift_a;
        row_b[l] = (row_b[l] & ~(0xffffu << shift_b)) | x << shift_b;
    }
    w.define(a, w.exec(), of_b, shift_a != 0), w.define(b, w.exec(), of_a, shift_b != 0);
}

#define S(OP, NAME, ...) \
    {OP, NAME, Kind::B32, {Kind::B32, Kind::NONE, Kind::NONE}, SPECIAL, nullptr, [](Wave &w, const Instruction &i) { (void)w, (void)i; __VA_ARGS__; }},
#define FROM (i.src[0] - VGPR)
const VectorOp table[] = {
    {0x180, "v_nop", Kind::NONE, {Kind::NONE, Kind::NONE, Kind::NONE}, SPECIAL, nullptr, nothing},
    {0x19b, "v_pipeflush", Kind::NONE, {Kind::NONE, Kind::NONE, Kind::NONE}, SPECIAL, nullptr, nothing},
    S(0x182, "v_readfirstlane_b32", readfirstlane(w, i))
    S(0x1c2, "v_movreld_b32", move(w, i, i.dst + relative(w, 0, 255), FROM))
    S(0x1c3, "v_movrels_b32", move(w, i, i.dst, FROM + relative(w, 0, 255)))
    S(0x1c4, "v_movrelsd_b32", move(w, i, i.dst + relative(w, 0, 255), FROM + relative(w, 0, 255)))
    S(0x1c8, "v_movrelsd_2_b32", move(w, i, i.dst + relative(w, 16, 1023), FROM + relative(w, 0, 1023)))
    S(0x1e5, "v_swap_b32", swap(w, i.dst, FROM))
    {0x1e6, "v_swap_b16", Kind::B16, {Kind::B16, Kind::NONE, Kind::NONE}, SPECIAL, nullptr, swap_b16},
    S(0x1e7, "v_permlane64_b32", (void)0) // nothing in waves of 32 lanes
    S(0x1e8, "v_swaprel_b32", swap(w, i.dst + relative(w, 16, 1023), FROM + relative(w, 0, 1023)))
    {0x25b, "v_permlane16_b32", Kind::B32, {Kind::B32, Kind::B32, Kind::B32}, SPECIAL, nullptr, permlane16<0>},
    {0x25c, "v_permlanex16_b32", Kind::B32, {Kind::B32, Kind::B32, Kind::B32}, SPECIAL, nullptr, permlane16<1>},
    {0x360, "v_readlane_b32", Kind::B32, {Kind::B32, Kind::B32, Kind::NONE}, SPECIAL, nullptr, readlane},
    {0x361, "v_writelane_b32", Kind::B32, {Kind::B32, Kind::B32, Kind::NONE}, SPECIAL, nullptr, writelane},
};

} // namespace

OpList special_ops() { return {table, std::size(table)}; }

const VectorOp *vector_op(unsigned op) {
    static const auto all = [] {
        std::array<const VectorOp *, PACKED + 128> index{};
        for (OpList list : {float_ops(), integer_ops(), conversion_ops(), compare_ops(), special_ops(), packed_ops()})
            for (size_t n = 0; n < list.count; n++) index[list.begin[n].op] = &list.begin[n];
        return index;
    }();
    return op < all.size() ? all[op] : nullptr;
}

} // namespace gfx
