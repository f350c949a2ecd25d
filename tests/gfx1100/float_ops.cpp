// Vector operations on floating-point numbers. The transcendental ones are computed in double and rounded; a card's differ
// by up to 1 ulp.
#include "number.h"

namespace gfx {
namespace {

float flushed(double v) { return without_denormal(float(v)); } // units that know no denormals, whatever the mode

// Numbers of turns: exact for whole and half ones, which the card's range reduction also gives.
double sine(double turns) { return std::sin((turns - std::rint(turns)) * 6.283185307179586476925); }
double cosine(double turns) { return std::cos((turns - std::rint(turns)) * 6.283185307179586476925); }

template <class T> int exponent(T v) { // as stored: 0 for zero and denormals
    if constexpr (sizeof(T) == 4) return int(std::bit_cast<uint32_t>(v) >> 23 & 255);
    else return int(std::bit_cast<uint64_t>(v) >> 52 & 2047);
}
// Division is: v_div_scale twice, v_rcp, a few v_fma, v_div_fmas, v_div_fixup. Scales a numerator or denominator (a, which is
// b or c) of c / b so that nothing overflows or gets lost between.
template <class T> T div_scale(T a, T b, T c, uint32_t &m) {
    constexpr bool SINGLE = sizeof(T) == 4;
    constexpr int UP = SINGLE ? 64 : 128, FAR = SINGLE ? 96 : 768, TINY = SINGLE ? 23 : 53;
    auto denormal = [](T v) { return std::fpclassify(v) == FP_SUBNORMAL; };
    m = 0;
    if (b == 0 || c == 0) return std::numeric_limits<T>::quiet_NaN();
    bool inverse = SINGLE ? std::fabs(1 / double(b)) < 0x1p-126 && std::isfinite(b) : denormal(T(1) / b);
    if (exponent(c) - exponent(b) >= FAR) return m = 1, a == b ? std::ldexp(a, UP) : a;
    if (denormal(b)) return std::ldexp(a, UP);
    if (inverse && denormal(c / b)) return m = 1, a == b ? std::ldexp(a, UP) : a;
    if (inverse) return std::ldexp(a, -UP);
    if (denormal(c / b)) return m = 1, a == c ? std::ldexp(a, UP) : a;
    return exponent(c) <= TINY ? std::ldexp(a, UP) : a;
}
template <class T> T div_fixup(T a, T b, T c) { // a is the quotient so far, of c / b
    bool negative = std::signbit(b) != std::signbit(c);
    auto with_sign = [&](T v) { return negative ? -v : v; };
    if (c != c) return c + c;
    if (b != b) return b + b;
    if ((b == 0 && c == 0) || (std::isinf(b) && std::isinf(c))) return -std::numeric_limits<T>::quiet_NaN();
    if (b == 0 || std::isinf(c)) return with_sign(std::numeric_limits<T>::infinity());
    if (std::isinf(b) || c == 0) return with_sign(T(0));
    if (sizeof(T) == 4 && exponent(c) - exponent(b) < -150) return with_sign(T(0));
    if (sizeof(T) == 8 && exponent(c) - exponent(b) < -1075) return with_sign(T(0));
    return with_sign(std::fabs(a));
}
template <class T> T dx9(T a, T b, T product) { return a == 0 || b == 0 ? T(0) : product; } // 0 times anything is 0

const VectorOp table[] = {
#define MIN(A, B) minimum(A, B, x.ieee)
#define MAX(A, B) maximum(A, B, x.ieee)
    V(0x103, "v_add_f32", F32, F32, F32, None, 0, a + b)
    V(0x104, "v_sub_f32", F32, F32, F32, None, 0, a - b)
    V(0x105, "v_subrev_f32", F32, F32, F32, None, 0, b - a)
    V(0x106, "v_fmac_dx9_zero_f32", F32, F32, F32, F32, ACCUMULATES, a == 0 || b == 0 ? c : std::fma(a, b, c))
    V(0x107, "v_mul_dx9_zero_f32", F32, F32, F32, None, 0, dx9(a, b, a *b))
    V(0x108, "v_mul_f32", F32, F32, F32, None, 0, a *b)
    V(0x10f, "v_min_f32", F32, F32, F32, None, 0, MIN(a, b))
    V(0x110, "v_max_f32", F32, F32, F32, None, 0, MAX(a, b))
    V(0x12b, "v_fmac_f32", F32, F32, F32, F32, ACCUMULATES, std::fma(a, b, c))
    V(0x12c, "v_fmamk_f32", F32, F32, F32, F32, 0, std::fma(a, b, c))
    V(0x12d, "v_fmaak_f32", F32, F32, F32, F32, 0, std::fma(a, b, c))
    V(0x132, "v_add_f16", F16, F16, F16, None, 0, a + b)
    V(0x133, "v_sub_f16", F16, F16, F16, None, 0, a - b)
    V(0x134, "v_subrev_f16", F16, F16, F16, None, 0, b - a)
    V(0x135, "v_mul_f16", F16, F16, F16, None, 0, a *b)
    V(0x136, "v_fmac_f16", F16, F16, F16, F16, ACCUMULATES, fma_half(a, b, c))
    V(0x137, "v_fmamk_f16", F16, F16, F16, F16, 0, fma_half(a, b, c))
    V(0x138, "v_fmaak_f16", F16, F16, F16, F16, 0, fma_half(a, b, c))
    V(0x139, "v_max_f16", H16, H16, H16, None, 0, MAX(a, b))
    V(0x13a, "v_min_f16", H16, H16, H16, None, 0, MIN(a, b))
    V(0x13b, "v_ldexp_f16", F16, F16, I16, None, 0, float(std::ldexp(double(a), b)))
    V(0x197, "v_trunc_f64", F64, F64, None, None, 0, std::trunc(a))
    V(0x198, "v_ceil_f64", F64, F64, None, None, 0, std::ceil(a))
    V(0x199, "v_rndne_f64", F64, F64, None, None, 0, std::nearbyint(a))
    V(0x19a, "v_floor_f64", F64, F64, None, None, 0, std::floor(a))
    V(0x1a0, "v_fract_f32", F32, F32, None, None, 0, fraction(a))
    V(0x1a1, "v_trunc_f32", F32, F32, None, None, 0, std::trunc(a))
    V(0x1a2, "v_ceil_f32", F32, F32, None, None, 0, std::ceil(a))
    V(0x1a3, "v_rndne_f32", F32, F32, None, None, 0, std::nearbyint(a))
    V(0x1a4, "v_floor_f32", F32, F32, None, None, 0, std::floor(a))
    V(0x1a5, "v_exp_f32", F32, F32, None, None, TRANS, flushed(std::exp2(double(without_denormal(a)))))
    V(0x1a7, "v_log_f32", F32, F32, None, None, TRANS, flushed(std::log2(double(without_denormal(a)))))
    V(0x1aa, "v_rcp_f32", F32, F32, None, None, TRANS, 1 / a)
    V(0x1ab, "v_rcp_iflag_f32", F32, F32, None, None, TRANS, 1 / a)
    V(0x1ae, "v_rsq_f32", F32, F32, None, None, TRANS, flushed(1 / std::sqrt(double(without_denormal(a)))))
    V(0x1af, "v_rcp_f64", F64, F64, None, None, TRANS, 1 / a)
    V(0x1b1, "v_rsq_f64", F64, F64, None, None, TRANS, 1 / std::sqrt(a))
    V(0x1b3, "v_sqrt_f32", F32, F32, None, None, TRANS, flushed(std::sqrt(double(without_denormal(a)))))
    V(0x1b4, "v_sqrt_f64", F64, F64, None, None, TRANS, std::sqrt(a))
    V(0x1b5, "v_sin_f32", F32, F32, None, None, TRANS, flushed(sine(a)))
    V(0x1b6, "v_cos_f32", F32, F32, None, None, TRANS, flushed(cosine(a)))
    V(0x1be, "v_fract_f64", F64, F64, None, None, 0, fraction(a))
    V(0x1bc, "v_frexp_exp_i32_f64", I32, F64, None, None, 0, [&] { int e = 0; if (std::isfinite(a)) std::frexp(a, &e); return e; }())
    V(0x1bd, "v_frexp_mant_f64", F64, F64, None, None, 0, [&] { int e; return std::isfinite(a) ? std::frexp(a, &e) : a; }())
    V(0x1bf, "v_frexp_exp_i32_f32", I32, F32, None, None, 0, [&] { int e = 0; if (std::isfinite(a)) std::frexp(a, &e); return e; }())
    V(0x1c0, "v_frexp_mant_f32", F32, F32, None, None, 0, [&] { int e; return std::isfinite(a) ? std::frexp(a, &e) : a; }())
    V(0x1d4, "v_rcp_f16", F16, F16, None, None, TRANS, 1 / a)
    V(0x1d5, "v_sqrt_f16", F16, F16, None, None, TRANS, std::sqrt(a))
    V(0x1d6, "v_rsq_f16", F16, F16, None, None, TRANS, 1 / std::sqrt(double(a)))
    V(0x1d7, "v_log_f16", F16, F16, None, None, TRANS, std::log2(double(a)))
    V(0x1d8, "v_exp_f16", F16, F16, None, None, TRANS, std::exp2(double(a)))
    V(0x1d9, "v_frexp_mant_f16", F16, F16, None, None, 0, [&] { int e; return std::isfinite(a) ? std::frexp(a, &e) : a; }())
    V(0x1da, "v_frexp_exp_i16_f16", I16, F16, None, None, 0, [&] { int e = 0; if (std::isfinite(a)) std::frexp(a, &e); return e; }())
    V(0x1db, "v_floor_f16", F16, F16, None, None, 0, std::floor(a))
    V(0x1dc, "v_ceil_f16", F16, F16, None, None, 0, std::ceil(a))
    V(0x1dd, "v_trunc_f16", F16, F16, None, None, 0, std::trunc(a))
    V(0x1de, "v_rndne_f16", F16, F16, None, None, 0, std::nearbyint(a))
    V(0x1df, "v_fract_f16", F16, F16, None, None, 0, [&] { float f = a - std::floor(a); return f >= 1 ? 0x1.ffcp-1f : f; }())
    V(0x1e0, "v_sin_f16", F16, F16, None, None, TRANS, sine(a))
    V(0x1e1, "v_cos_f16", F16, F16, None, None, TRANS, cosine(a))
    V(0x209, "v_fma_dx9_zero_f32", F32, F32, F32, F32, 0, a == 0 || b == 0 ? c : std::fma(a, b, c))
    V(0x213, "v_fma_f32", F32, F32, F32, F32, 0, std::fma(a, b, c))
    V(0x214, "v_fma_f64", F64, F64, F64, F64, 0, std::fma(a, b, c))
    V(0x219, "v_min3_f32", F32, F32, F32, F32, 0, MIN(MIN(a, b), c))
    V(0x21c, "v_max3_f32", F32, F32, F32, F32, 0, MAX(MAX(a, b), c))
    V(0x21f, "v_med3_f32", F32, F32, F32, F32, 0, median(a, b, c, x.ieee))
    V(0x227, "v_div_fixup_f32", F32, F32, F32, F32, 0, div_fixup(a, b, c))
    V(0x228, "v_div_fixup_f64", F64, F64, F64, F64, 0, div_fixup(a, b, c))
    V(0x237, "v_div_fmas_f32", F32, F32, F32, F32, 0, std::fma(a, b, c) * (x.vcc >> l & 1 ? 0x1p32f : 1.0f))
    V(0x238, "v_div_fmas_f64", F64, F64, F64, F64, 0, std::fma(a, b, c) * (x.vcc >> l & 1 ? 0x1p64 : 1.0))
    V(0x248, "v_fma_f16", F16, F16, F16, F16, 0, fma_half(a, b, c))
    V(0x249, "v_min3_f16", H16, H16, H16, H16, 0, MIN(MIN(a, b), c))
    V(0x24c, "v_max3_f16", H16, H16, H16, H16, 0, MAX(MAX(a, b), c))
    V(0x24f, "v_med3_f16", H16, H16, H16, H16, 0, median(a, b, c, x.ieee))
    V(0x254, "v_div_fixup_f16", F16, F16, F16, F16, 0, div_fixup(a, b, c))
    V(0x25e, "v_maxmin_f32", F32, F32, F32, F32, 0, MIN(MAX(a, b), c))
    V(0x25f, "v_minmax_f32", F32, F32, F32, F32, 0, MAX(MIN(a, b), c))
    V(0x260, "v_maxmin_f16", H16, H16, H16, H16, 0, MIN(MAX(a, b), c))
    V(0x261, "v_minmax_f16", H16, H16, H16, H16, 0, MAX(MIN(a, b), c))
    V(0x2fc, "v_div_scale_f32", F32, F32, F32, F32, CARRY, div_scale(a, b, c, m))
    V(0x2fd, "v_div_scale_f64", F64, F64, F64, F64, CARRY, div_scale(a, b, c, m))
    V(0x31c, "v_ldexp_f32", F32, F32, I32, None, 0, std::ldexp(a, b))
    V(0x327, "v_add_f64", F64, F64, F64, None, 0, a + b)
    V(0x328, "v_mul_f64", F64, F64, F64, None, 0, a *b)
    V(0x329, "v_min_f64", F64, F64, F64, None, 0, MIN(a, b))
    V(0x32a, "v_max_f64", F64, F64, F64, None, 0, MAX(a, b))
    V(0x32b, "v_ldexp_f64", F64, F64, I32, None, 0, std::ldexp(a, b))
};

} // namespace

OpList float_ops() { return {table, std::size(table)}; }

} // namespace gfx
