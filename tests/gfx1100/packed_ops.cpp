// VOP3P: two 16-bit operations a lane, dot products, mixed precision, and matrix products (WMMA).
#include <algorithm>

#include "number.h"

namespace gfx {
namespace {

// Three sources as they are in registers, DPP applied; the constant 1.0 means a half in the lower bits where `halves`.
struct Sources {
    Buffer buffer[3];
    const uint32_t *row[3], *unused;
    uint32_t undefined[2] = {}; // lanes in which the sources of the lower and of the upper result were never written
};

// `mixed`: a source is a half only where opsel_hi says so, and then opsel says which.
void read(Wave &w, const Instruction &i, int count, bool halves, Sources &s, bool mixed = false) {
    Instruction plain = i;
    plain.neg = plain.abs = plain.opsel = 0;
    for (int k = 0; k < count; k++) {
        uint16_t code = i.src[k];
        int of[2] = {i.opsel >> k & 1, i.opsel_hi >> k & 1}; // the half that each result takes
        if (mixed) of[1] = of[1] ? of[0] : 1 - of[0];
        fetch(w, plain, k, code, Kind::B32, s.buffer[k], s.row[k], s.unused, of[0] == of[1] ? of[0] : -1);
        if (halves && code >= HALF && code <= HALF + 8) {
            std::fill_n(s.buffer[k].lo, LANES, inline_constant(code, Kind::F16));
            s.row[k] = s.buffer[k].lo;
        }
        for (int h = 0; h < 2; h++) {
            if (code >= VGPR) s.undefined[h] |= (of[h] ? w.high_undefined : w.low_undefined)[code - VGPR];
            else if (w.scalar_undefined(code)) s.undefined[h] = ALL;
        }
    }
    for (uint32_t &lanes : s.undefined)
        if (i.dpp && lanes) lanes = ALL;
}

void write(Wave &w, const Instruction &i, const uint32_t *out, uint32_t low, uint32_t high) {
    uint32_t mask = w.exec();
    if (i.dpp == 1 && (i.control >> 19 & 1) == 0) fault("DPP that leaves lanes unwritten is not known for packed operations");
    if (i.dpp == 1 && i.control >> 24 != 0xff) fault("DPP with row or bank masks is not known for packed operations");
    blend(w.row(i.dst), out, mask);
    w.define(i.dst, mask, low, 0);
    w.define(i.dst, mask, high, 1);
}

float clamped(const Wave &w, float v, bool clamp) {
    if (!clamp) return v;
    return v != v ? (w.launch->dx10_clamp ? 0 : v) : std::min(std::max(v, 0.0f), 1.0f);
}
float flushed_half(const Wave &w, float v) { return w.flush16_64 && std::fabs(v) < 0x1p-14f ? std::copysign(0.0f, v) : v; }
float flushed(const Wave &w, float v) { return w.flush32 ? without_denormal(v) : v; }

struct Raw { // a half as it is
    uint16_t bits;
};

// F takes the two or three halves and gives one; T is float for halves, Raw, or an integer.
template <class T, int COUNT, class F> void each_half(Wave &w, const Instruction &i, F f) {
    constexpr bool RAW = std::is_same_v<T, Raw>, FLOAT = RAW || std::is_same_v<T, float>;
    Sources s;
    read(w, i, COUNT, FLOAT, s);
    Row out;
    for (int l = 0; l < LANES; l++) {
        out[l] = 0;
        for (int h = 0; h < 2; h++) {
            T v[3] = {};
            for (int k = 0; k < COUNT; k++) {
                bool upper = (h ? i.opsel_hi : i.opsel) >> k & 1, negate = (h ? i.abs : i.neg) >> k & 1;
                uint16_t bits = uint16_t(s.row[k][l] >> (upper ? 16 : 0));
                if (FLOAT && negate) bits ^= 0x8000;
                if constexpr (RAW) v[k] = {w.flush16_64 && !(bits & 0x7c00) ? uint16_t(bits & 0x8000) : bits};
                else if constexpr (FLOAT) v[k] = flushed_half(w, half_to_float(bits));
                else v[k] = T(bits);
            }
            uint16_t bits;
            if constexpr (RAW) {
                bits = f(v[0], v[1], v[2]).bits;
                if (i.clamp) bits = float_to_half(clamped(w, half_to_float(bits), true));
            } else if constexpr (FLOAT) bits = float_to_half(clamped(w, flushed_half(w, f(v[0], v[1], v[2])), i.clamp));
            else bits = uint16_t(i.clamp ? saturate<T>(f(v[0], v[1], v[2])) : T(f(v[0], v[1], v[2])));
            out[l] |= uint32_t(bits) << (16 * h);
        }
    }
    write(w, i, out, s.undefined[0], s.undefined[1]);
}

void pk_fmac(Wave &w, const Instruction &i) {
    Instruction as_fma = i;
    as_fma.src[2] = uint16_t(VGPR + i.dst), as_fma.opsel = 0, as_fma.opsel_hi = 7;
    if (as_fma.src[0] < VGPR) as_fma.opsel_hi = 6; // a scalar or constant for both halves
    each_half<float, 3>(w, as_fma, fma_half);
}

// FROM gives a number for 16 bits; products are exact, sums rounded one after the other. CLAMPS: the card takes no notice
// of v_dot2_f32_f16's bit. ROCm's device library sets it always, and sums above 1 of what calls that are right on cards.
template <bool CLAMPS, class FROM> void dot2(Wave &w, const Instruction &i, FROM from) {
    Sources s;
    read(w, i, 2, true, s);
    const uint32_t *c, *unused;
    Buffer buffer;
    fetch(w, i, 2, i.src[2], Kind::F32, buffer, c, unused);
    uint32_t undefined = s.undefined[0] | s.undefined[1] | (i.src[2] >= VGPR ? w.lanes_undefined(i.src[2] - VGPR) : 0);
    Row out;
    for (int l = 0; l < LANES; l++) {
        float sum = std::bit_cast<float>(c[l]);
        for (int h = 0; h < 2; h++) {
            float v[2];
            for (int k = 0; k < 2; k++) {
                bool upper = (h ? i.opsel_hi : i.opsel) >> k & 1, negate = (h ? i.abs : i.neg) >> k & 1;
                float value = from(uint16_t(s.row[k][l] >> (upper ? 16 : 0)));
                v[k] = negate ? -value : value;
            }
            sum = flushed(w, sum + v[0] * v[1]);
        }
        out[l] = std::bit_cast<uint32_t>(clamped(w, sum, CLAMPS && i.clamp));
    }
    write(w, i, out, undefined, undefined);
}

int64_t element(uint32_t word, int index, int bits, bool is_signed) {
    uint32_t v = word >> (index * bits) & ((1u << bits) - 1);
    return is_signed ? int32_t(v << (32 - bits)) >> (32 - bits) : int64_t(v);
}
template <int BITS, bool ANY_SIGN> void dot_integers(Wave &w, const Instruction &i) {
    Sources s;
    read(w, i, 3, false, s);
    bool a = ANY_SIGN && (i.neg & 1), b = ANY_SIGN && (i.neg & 2);
    Row out;
    for (int l = 0; l < LANES; l++) {
        int64_t sum = ANY_SIGN ? int64_t(int32_t(s.row[2][l])) : int64_t(s.row[2][l]);
        for (int n = 0; n < 32 / BITS; n++) sum += element(s.row[0][l], n, BITS, a) * element(s.row[1][l], n, BITS, b);
        out[l] = !i.clamp ? uint32_t(sum) : ANY_SIGN ? uint32_t(saturate<int32_t>(sum)) : saturate<uint32_t>(sum);
    }
    uint32_t undefined = s.undefined[0] | s.undefined[1];
    write(w, i, out, undefined, undefined);
}

// Each source is a float, or a half where opsel_hi says so; the result a float, or one half of the register.
template <int WHERE> void fma_mix(Wave &w, const Instruction &i) {
    Sources s;
    read(w, i, 3, false, s, true);
    for (int k = 0; k < 3; k++) {
        bool half = i.opsel_hi >> k & 1;
        if (half && i.src[k] >= HALF && i.src[k] <= HALF + 8) std::fill_n(s.buffer[k].lo, LANES, inline_constant(i.src[k], Kind::F16));
    }
    Row out;
    uint32_t *row = w.row(i.dst, WHERE == 2 ? -1 : WHERE);
    for (int l = 0; l < LANES; l++) {
        float v[3];
        for (int k = 0; k < 3; k++) {
            uint32_t bits = s.row[k][l];
            bool half = i.opsel_hi >> k & 1;
            v[k] = half ? flushed_half(w, half_to_float(uint16_t(bits >> (i.opsel >> k & 1 ? 16 : 0)))) : flushed(w, std::bit_cast<float>(bits));
            if (i.abs >> k & 1) v[k] = std::fabs(v[k]);
            if (i.neg >> k & 1) v[k] = -v[k];
        }
        float result = std::fma(v[0], v[1], v[2]);
        if (WHERE == 2) {
            out[l] = std::bit_cast<uint32_t>(clamped(w, flushed(w, result), i.clamp));
            continue;
        }
        uint32_t half = float_to_half(clamped(w, flushed_half(w, result), i.clamp)); // rounded twice, as the reference says
        out[l] = WHERE ? (row[l] & 0xffff) | half << 16 : (row[l] & 0xffff0000) | half;
    }
    blend(row, out, w.exec());
    if (i.dpp) fault("%s with DPP is not known", i.name);
    w.define(i.dst, w.exec(), s.undefined[0] | s.undefined[1], WHERE == 2 ? -1 : WHERE);
}

// D = A B + C of 16 x 16 elements. Lane l holds row l mod 16 of A and column l mod 16 of B, the half waves the same; register
// r of C and D holds row 2 r + l / 16, column l mod 16. The card's order of summation is not documented: products and their
// sum are in double here, rounded once.
enum class Element { HALF, BFLOAT, I8, I4 };
template <Element FROM, bool WIDE> void wmma(Wave &w, const Instruction &i) {
    constexpr bool INTEGER = FROM == Element::I8 || FROM == Element::I4;
    constexpr int BITS = FROM == Element::I4 ? 4 : FROM == Element::I8 ? 8 : 16, REGISTERS = BITS / 2;
    if (w.exec() != ALL) fault("a matrix product with inactive lanes");
    static thread_local double in[2][16][16]; // row of A or column of B, k
    uint32_t undefined = 0;
    for (int k = 0; k < 2; k++) {
        for (int r = 0; r < REGISTERS; r++) {
            if (i.src[k] < VGPR) fault("a matrix that is not in vector registers");
            unsigned number = i.src[k] - VGPR + r;
            const uint32_t *row = w.row(number);
            undefined |= w.lanes_undefined(number);
            for (int l = 0; l < 16; l++) {
                if (row[l] != row[l + 16])
                    fault("matrix operand v%u differs between lane %d (0x%08x) and lane %d (0x%08x)", number, l, row[l], l + 16, row[l + 16]);
                for (int n = 0; n < 32 / BITS; n++) {
                    double v;
                    if (INTEGER) v = double(element(row[l], n, BITS, i.neg >> k & 1));
                    else {
                        uint16_t bits = uint16_t(row[l] >> (n * 16));
                        v = FROM == Element::HALF ? half_to_float(bits) : bfloat_to_float(bits);
                        if ((n ? i.abs : i.neg) >> k & 1) v = -v;
                    }
                    in[k][l][r * (32 / BITS) + n] = v;
                }
            }
        }
    }
    uint32_t out[8][LANES];
    bool upper = i.opsel >> 2 & 1;
    for (int r = 0; r < 8; r++) {
        Buffer buffer;
        const uint32_t *c = buffer.lo;
        if (i.src[2] >= VGPR) {
            c = w.row(i.src[2] - VGPR + r, WIDE ? -1 : upper);
            undefined |= !WIDE ? (upper ? w.high_undefined : w.low_undefined)[i.src[2] - VGPR + r] : w.lanes_undefined(i.src[2] - VGPR + r);
        } else {
            bool constant = i.src[2] >= HALF && i.src[2] <= HALF + 8;
            std::fill_n(buffer.lo, LANES, constant && !WIDE ? inline_constant(i.src[2], Kind::F16) : w.scalar(i.src[2], i));
            if (!WIDE && upper) for (uint32_t &v : buffer.lo) v <<= 16;
        }
        for (int l = 0; l < LANES; l++) {
            int m = 2 * r + l / 16, n = l % 16;
            double sum = 0;
            for (int k = 0; k < 16; k++) sum += in[0][m][k] * in[1][n][k];
            if (INTEGER) {
                int64_t total = int64_t(sum) + int32_t(c[l]);
                out[r][l] = i.clamp ? uint32_t(saturate<int32_t>(total)) : uint32_t(total);
                continue;
            }
            uint16_t bits = uint16_t(c[l] >> (upper ? 16 : 0));
            double plus = WIDE ? std::bit_cast<float>(c[l]) : FROM == Element::HALF ? half_to_float(bits) : bfloat_to_float(bits);
            if (i.abs >> 2 & 1) plus = std::fabs(plus);
            if (i.neg >> 2 & 1) plus = -plus;
            float total = float(sum + plus);
            if (WIDE) out[r][l] = std::bit_cast<uint32_t>(total);
            else {
                uint32_t half = FROM == Element::HALF ? std::bit_cast<uint16_t>(_Float16(sum + plus)) : float_to_bfloat(total);
                uint32_t old = w.row(i.dst + r, upper)[l];
                out[r][l] = upper ? (old & 0xffff) | half << 16 : (old & 0xffff0000) | half;
            }
        }
    }
    for (int r = 0; r < 8; r++) {
        std::memcpy(w.row(i.dst + r, WIDE ? -1 : upper), out[r], sizeof out[r]);
        w.define(i.dst + r, ALL, undefined ? ALL : 0, WIDE ? -1 : upper);
    }
}

template <class T> T shift(T v, T by, bool left) { return left ? T(uint32_t(uint16_t(v)) << (by & 15)) : T(v >> (by & 15)); }

#define P(OP, NAME, ...) \
    {PACKED + OP, NAME, Kind::B32, {Kind::B32, Kind::B32, Kind::B32}, SPECIAL, nullptr, [](Wave &w, const Instruction &i) { __VA_ARGS__; }},
#define P2(OP, NAME, ...) \
    {PACKED + OP, NAME, Kind::B32, {Kind::B32, Kind::B32, Kind::NONE}, SPECIAL, nullptr, [](Wave &w, const Instruction &i) { __VA_ARGS__; }},
#define F(...) [&](float a, float b, float c) -> float { (void)b, (void)c; return __VA_ARGS__; }
#define I(...) [](int64_t a, int64_t b, int64_t c) -> int64_t { (void)b, (void)c; return __VA_ARGS__; }
const VectorOp table[] = {
    P(0x00, "v_pk_mad_i16", each_half<int16_t, 3>(w, i, I(a *b + c)))
    P2(0x01, "v_pk_mul_lo_u16", each_half<uint16_t, 2>(w, i, I(uint16_t(a *b))))
    P2(0x02, "v_pk_add_i16", each_half<int16_t, 2>(w, i, I(a + b)))
    P2(0x03, "v_pk_sub_i16", each_half<int16_t, 2>(w, i, I(a - b)))
    P2(0x04, "v_pk_lshlrev_b16", each_half<uint16_t, 2>(w, i, I(uint16_t(b << (a & 15)))))
    P2(0x05, "v_pk_lshrrev_b16", each_half<uint16_t, 2>(w, i, I(b >> (a & 15))))
    P2(0x06, "v_pk_ashrrev_i16", each_half<int16_t, 2>(w, i, I(b >> (a & 15))))
    P2(0x07, "v_pk_max_i16", each_half<int16_t, 2>(w, i, I(std::max(a, b))))
    P2(0x08, "v_pk_min_i16", each_half<int16_t, 2>(w, i, I(std::min(a, b))))
    P(0x09, "v_pk_mad_u16", each_half<uint16_t, 3>(w, i, I(a *b + c)))
    P2(0x0a, "v_pk_add_u16", each_half<uint16_t, 2>(w, i, I(a + b)))
    P2(0x0b, "v_pk_sub_u16", each_half<uint16_t, 2>(w, i, I(a - b)))
    P2(0x0c, "v_pk_max_u16", each_half<uint16_t, 2>(w, i, I(std::max(a, b))))
    P2(0x0d, "v_pk_min_u16", each_half<uint16_t, 2>(w, i, I(std::min(a, b))))
    P(0x0e, "v_pk_fma_f16", each_half<float, 3>(w, i, F(fma_half(a, b, c))))
    P2(0x0f, "v_pk_add_f16", each_half<float, 2>(w, i, F(a + b)))
    P2(0x10, "v_pk_mul_f16", each_half<float, 2>(w, i, F(a *b)))
    P2(0x11, "v_pk_min_f16", each_half<Raw, 2>(w, i, [&](Raw a, Raw b, Raw) { return Raw{minimum(a.bits, b.bits, w.launch->ieee)}; }))
    P2(0x12, "v_pk_max_f16", each_half<Raw, 2>(w, i, [&](Raw a, Raw b, Raw) { return Raw{maximum(a.bits, b.bits, w.launch->ieee)}; }))
    P(0x13, "v_dot2_f32_f16", dot2<false>(w, i, [](uint16_t v) { return half_to_float(v); }))
    P(0x16, "v_dot4_i32_iu8", dot_integers<8, true>(w, i))
    P(0x17, "v_dot4_u32_u8", dot_integers<8, false>(w, i))
    P(0x18, "v_dot8_i32_iu4", dot_integers<4, true>(w, i))
    P(0x19, "v_dot8_u32_u4", dot_integers<4, false>(w, i))
    P(0x1a, "v_dot2_f32_bf16", dot2<true>(w, i, [](uint16_t v) { return bfloat_to_float(v); }))
    P(0x20, "v_fma_mix_f32", fma_mix<2>(w, i))
    P(0x21, "v_fma_mixlo_f16", fma_mix<0>(w, i))
    P(0x22, "v_fma_mixhi_f16", fma_mix<1>(w, i))
    P(0x40, "v_wmma_f32_16x16x16_f16", wmma<Element::HALF, true>(w, i))
    P(0x41, "v_wmma_f32_16x16x16_bf16", wmma<Element::BFLOAT, true>(w, i))
    P(0x42, "v_wmma_f16_16x16x16_f16", wmma<Element::HALF, false>(w, i))
    P(0x43, "v_wmma_bf16_16x16x16_bf16", wmma<Element::BFLOAT, false>(w, i))
    P(0x44, "v_wmma_i32_16x16x16_iu8", wmma<Element::I8, true>(w, i))
    P(0x45, "v_wmma_i32_16x16x16_iu4", wmma<Element::I4, true>(w, i))
    P2(0x13c - 0x400, "v_pk_fmac_f16", pk_fmac(w, i))
    // Dots in VOP2, VOP3 and VOPD: of packed halves, without selectors.
#define DOT(OP, NAME, D, C, FLAGS, ...) V(OP, NAME, D, U32, U32, C, FLAGS, __VA_ARGS__)
    DOT(0x102, "v_dot2acc_f32_f16", F32, F32, ACCUMULATES, c + half_to_float(uint16_t(a)) * half_to_float(uint16_t(b)) + half_to_float(uint16_t(a >> 16)) * half_to_float(uint16_t(b >> 16)))
    DOT(0x3fe, "v_dot2acc_f32_bf16", F32, F32, ACCUMULATES, c + bfloat_to_float(uint16_t(a)) * bfloat_to_float(uint16_t(b)) + bfloat_to_float(uint16_t(a >> 16)) * bfloat_to_float(uint16_t(b >> 16)))
    DOT(0x266, "v_dot2_f16_f16", F16, F16, 0, [&] {
        float first = half_to_float(float_to_half(half_to_float(uint16_t(a)) * half_to_float(uint16_t(b))));
        float second = half_to_float(float_to_half(half_to_float(uint16_t(a >> 16)) * half_to_float(uint16_t(b >> 16))));
        return half_to_float(float_to_half(c + first)) + second;
    }())
    DOT(0x267, "v_dot2_bf16_bf16", U16, U16, 0, [&] {
        auto number = [](uint32_t v) { return bfloat_to_float(uint16_t(v)); };
        auto rounded = [&](float v) { return number(float_to_bfloat(v)); };
        return float_to_bfloat(rounded(number(c) + rounded(number(a) * number(b))) + rounded(number(a >> 16) * number(b >> 16)));
    }())
};

} // namespace

OpList packed_ops() { return {table, std::size(table)}; }

} // namespace gfx
