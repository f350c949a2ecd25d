// Vector operations that convert between types, and comparisons.
#include "number.h"

namespace gfx {
namespace {

constexpr float OFFSETS[16] = {0,     0.0625f,  0.125f,  0.1875f,  0.25f,  0.3125f,  0.375f,  0.4375f,
                               -0.5f, -0.4375f, -0.375f, -0.3125f, -0.25f, -0.1875f, -0.125f, -0.0625f};

uint32_t pair(uint16_t low, uint16_t high) { return uint32_t(high) << 16 | low; }
int16_t signed_norm(float v) { return v != v ? 0 : int16_t(std::nearbyint(std::fmin(std::fmax(v, -1.0f), 1.0f) * 32767.0f)); }
uint16_t unsigned_norm(float v) { return v != v ? 0 : uint16_t(std::nearbyint(std::fmin(std::fmax(v, 0.0f), 1.0f) * 65535.0f)); }

const VectorOp table[] = {
    V(0x12f, "v_cvt_pk_rtz_f16_f32", U32, F32, F32, None, 0, pair(float_to_half_toward_zero(a), float_to_half_toward_zero(b)))
    V(0x183, "v_cvt_i32_f64", I32, F64, None, None, 0, to_integer<int32_t>(a))
    V(0x184, "v_cvt_f64_i32", F64, I32, None, None, 0, a)
    V(0x185, "v_cvt_f32_i32", F32, I32, None, None, 0, float(a))
    V(0x186, "v_cvt_f32_u32", F32, U32, None, None, 0, float(a))
    V(0x187, "v_cvt_u32_f32", U32, F32, None, None, 0, to_integer<uint32_t>(a))
    V(0x188, "v_cvt_i32_f32", I32, F32, None, None, 0, to_integer<int32_t>(a))
    V(0x18a, "v_cvt_f16_f32", F16, F32, None, None, 0, a)
    V(0x18b, "v_cvt_f32_f16", F32, F16, None, None, 0, a)
    V(0x18c, "v_cvt_nearest_i32_f32", I32, F32, None, None, 0, to_integer<int32_t>(std::floor(a + 0.5f)))
    V(0x18d, "v_cvt_floor_i32_f32", I32, F32, None, None, 0, to_integer<int32_t>(std::floor(a)))
    V(0x18e, "v_cvt_off_f32_i4", F32, U32, None, None, 0, OFFSETS[a & 15])
    V(0x18f, "v_cvt_f32_f64", F32, F64, None, None, 0, float(a))
    V(0x190, "v_cvt_f64_f32", F64, F32, None, None, 0, a)
    V(0x191, "v_cvt_f32_ubyte0", F32, U32, None, None, 0, float(a & 255))
    V(0x192, "v_cvt_f32_ubyte1", F32, U32, None, None, 0, float(a >> 8 & 255))
    V(0x193, "v_cvt_f32_ubyte2", F32, U32, None, None, 0, float(a >> 16 & 255))
    V(0x194, "v_cvt_f32_ubyte3", F32, U32, None, None, 0, float(a >> 24))
    V(0x195, "v_cvt_u32_f64", U32, F64, None, None, 0, to_integer<uint32_t>(a))
    V(0x196, "v_cvt_f64_u32", F64, U32, None, None, 0, a)
    V(0x1d0, "v_cvt_f16_u16", F16, U16, None, None, 0, float(a))
    V(0x1d1, "v_cvt_f16_i16", F16, I16, None, None, 0, float(a))
    V(0x1d2, "v_cvt_u16_f16", U16, F16, None, None, 0, to_integer<uint16_t>(a))
    V(0x1d3, "v_cvt_i16_f16", I16, F16, None, None, 0, to_integer<int16_t>(a))
    V(0x1e3, "v_cvt_norm_i16_f16", I16, F16, None, None, 0, signed_norm(a))
    V(0x1e4, "v_cvt_norm_u16_f16", U16, F16, None, None, 0, unsigned_norm(a))
    V(0x1ea, "v_cvt_i32_i16", I32, I16, None, None, 0, a)
    V(0x1eb, "v_cvt_u32_u16", U32, U16, None, None, 0, a)
    V(0x226, "v_cvt_pk_u8_f32", U32, F32, U32, U32, 0, (c & ~(255u << (b & 3) * 8)) | uint32_t(to_integer<uint8_t>(a)) << (b & 3) * 8)
    V(0x306, "v_cvt_pk_i16_f32", U32, F32, F32, None, 0, pair(uint16_t(to_integer<int16_t>(a)), uint16_t(to_integer<int16_t>(b))))
    V(0x307, "v_cvt_pk_u16_f32", U32, F32, F32, None, 0, pair(to_integer<uint16_t>(a), to_integer<uint16_t>(b)))
    V(0x311, "v_pack_b32_f16", U32, F16, F16, None, 0, pair(float_to_half(a), float_to_half(b)))
    V(0x312, "v_cvt_pk_norm_i16_f16", U32, F16, F16, None, 0, pair(uint16_t(signed_norm(a)), uint16_t(signed_norm(b))))
    V(0x313, "v_cvt_pk_norm_u16_f16", U32, F16, F16, None, 0, pair(unsigned_norm(a), unsigned_norm(b)))
    V(0x321, "v_cvt_pk_norm_i16_f32", U32, F32, F32, None, 0, pair(uint16_t(signed_norm(a)), uint16_t(signed_norm(b))))
    V(0x322, "v_cvt_pk_norm_u16_f32", U32, F32, F32, None, 0, pair(unsigned_norm(a), unsigned_norm(b)))
    V(0x323, "v_cvt_pk_u16_u32", U32, U32, U32, None, 0, pair(uint16_t(std::min(a, 0xffffu)), uint16_t(std::min(b, 0xffffu))))
    V(0x324, "v_cvt_pk_i16_i32", U32, I32, I32, None, 0, pair(uint16_t(saturate<int16_t>(a)), uint16_t(saturate<int16_t>(b))))
};

template <class T> uint32_t class_of(T v, uint32_t wanted, int exponent_bits, uint64_t bits, int mantissa_bits) {
    uint64_t mantissa = bits & ((1ull << mantissa_bits) - 1), exponent = bits >> mantissa_bits & ((1ull << exponent_bits) - 1);
    bool negative = std::signbit(v);
    int number;
    if (exponent == (1ull << exponent_bits) - 1) number = mantissa ? (mantissa >> (mantissa_bits - 1) ? 1 : 0) : negative ? 2 : 9;
    else if (exponent) number = negative ? 3 : 8;
    else if (mantissa) number = negative ? 4 : 7;
    else number = negative ? 5 : 6;
    return wanted >> number & 1;
}

#define CMP(OP, NAME, T, EXPRESSION)                                                                                      \
    V(OP, "v_cmp_" NAME, Mask, T, T, None, 0, EXPRESSION) V((OP) + 0x80, "v_cmpx_" NAME, Mask, T, T, None, 0, EXPRESSION)
#define FLOATS(OP, NAME, T)                                                                                               \
    CMP(OP, "f_" NAME, T, 0) CMP(OP + 1, "lt_" NAME, T, a < b) CMP(OP + 2, "eq_" NAME, T, a == b)                          \
    CMP(OP + 3, "le_" NAME, T, a <= b) CMP(OP + 4, "gt_" NAME, T, a > b) CMP(OP + 5, "lg_" NAME, T, a < b || a > b)         \
    CMP(OP + 6, "ge_" NAME, T, a >= b) CMP(OP + 7, "o_" NAME, T, a == a && b == b) CMP(OP + 8, "u_" NAME, T, a != a || b != b) \
    CMP(OP + 9, "nge_" NAME, T, !(a >= b)) CMP(OP + 10, "nlg_" NAME, T, !(a < b || a > b)) CMP(OP + 11, "ngt_" NAME, T, !(a > b)) \
    CMP(OP + 12, "nle_" NAME, T, !(a <= b)) CMP(OP + 13, "neq_" NAME, T, a != b) CMP(OP + 14, "nlt_" NAME, T, !(a < b))     \
    CMP(OP + 15, "t_" NAME, T, 1)
#define SHORTS(OP, NAME, T)                                                                                               \
    CMP(OP + 1, "lt_" NAME, T, a < b) CMP(OP + 2, "eq_" NAME, T, a == b) CMP(OP + 3, "le_" NAME, T, a <= b)                 \
    CMP(OP + 4, "gt_" NAME, T, a > b) CMP(OP + 5, "ne_" NAME, T, a != b) CMP(OP + 6, "ge_" NAME, T, a >= b)
#define INTEGERS(OP, NAME, T) CMP(OP, "f_" NAME, T, 0) SHORTS(OP, NAME, T) CMP(OP + 7, "t_" NAME, T, 1)

const VectorOp comparisons[] = {
    FLOATS(0x00, "f16", F16) FLOATS(0x10, "f32", F32) FLOATS(0x20, "f64", F64) SHORTS(0x30, "i16", I16)
    SHORTS(0x38, "u16", U16) INTEGERS(0x40, "i32", I32) INTEGERS(0x48, "u32", U32) INTEGERS(0x50, "i64", I64)
    INTEGERS(0x58, "u64", U64)
#define CLASS(OP, NAME) \
    V(OP, NAME "_f16", Mask, F16, U32, None, 0, class_of(a, b, 5, x.lo[0][l] & 0xffff, 10)) \
    V(OP + 1, NAME "_f32", Mask, F32, U32, None, 0, class_of(a, b, 8, x.lo[0][l], 23)) \
    V(OP + 2, NAME "_f64", Mask, F64, U32, None, 0, class_of(a, b, 11, std::bit_cast<uint64_t>(a), 52))
    CLASS(0x7d, "v_cmp_class") CLASS(0xfd, "v_cmpx_class")
};

} // namespace

OpList conversion_ops() { return {table, std::size(table)}; }
OpList compare_ops() { return {comparisons, std::size(comparisons)}; }

} // namespace gfx
