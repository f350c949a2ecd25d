// Types of lanes, as the tables of operations name them, and arithmetic that x86 does not do as RDNA3 does.
#pragma once
#include <limits>

#include "isa.h"

namespace gfx {

inline float half_to_float(uint16_t bits) { return float(std::bit_cast<_Float16>(bits)); }
inline uint16_t float_to_half(float v) { return std::bit_cast<uint16_t>(_Float16(v)); }
inline float bfloat_to_float(uint16_t bits) { return std::bit_cast<float>(uint32_t(bits) << 16); }
inline uint16_t float_to_bfloat(float v) { // to nearest even
    uint32_t u = std::bit_cast<uint32_t>(v);
    if (v != v) return uint16_t(u >> 16 | 0x40);
    return uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
inline uint16_t float_to_half_toward_zero(float v) {
    uint16_t h = float_to_half(v);
    if (v == v && std::fabs(half_to_float(h)) > std::fabs(v)) h--; // infinity becomes the largest number, too
    if (std::isinf(v)) h = std::signbit(v) ? 0xfc00 : 0x7c00;
    return h;
}
// a * b + c for halves, rounded once: the sum in double is made odd where it is inexact (the product is exact).
inline float fma_half(float a, float b, float c) {
    double p = double(a) * double(b), s = p + double(c);
    if (!std::isfinite(s)) return float(s);
    double v = s - p, error = (p - (s - v)) + (double(c) - v);
    uint64_t u = std::bit_cast<uint64_t>(s);
    if (error != 0 && !(u & 1)) u += (error > 0) == (s > 0) ? 1 : -1;
    return float(_Float16(std::bit_cast<double>(u)));
}

struct None {
    using T = int;
    static constexpr Kind kind = Kind::NONE;
    static T get(const uint32_t *, const uint32_t *, int) { return 0; }
    static void put(uint32_t *, uint32_t *, int, T) {}
};
template <class V, Kind K> struct Word {
    using T = V;
    static constexpr Kind kind = K;
    static T get(const uint32_t *lo, const uint32_t *, int l) { return std::bit_cast<T>(lo[l]); }
    static void put(uint32_t *lo, uint32_t *, int l, T v) { lo[l] = std::bit_cast<uint32_t>(v); }
};
template <class V, Kind K> struct Short {
    using T = V;
    static constexpr Kind kind = K;
    static T get(const uint32_t *lo, const uint32_t *, int l) { return T(uint16_t(lo[l])); }
    static void put(uint32_t *lo, uint32_t *, int l, T v) { lo[l] = uint16_t(v); }
};
template <class V, Kind K> struct Long {
    using T = V;
    static constexpr Kind kind = K;
    static T get(const uint32_t *lo, const uint32_t *hi, int l) { return std::bit_cast<T>(uint64_t(hi[l]) << 32 | lo[l]); }
    static void put(uint32_t *lo, uint32_t *hi, int l, T v) {
        uint64_t u = std::bit_cast<uint64_t>(v);
        lo[l] = uint32_t(u), hi[l] = uint32_t(u >> 32);
    }
};
using U32 = Word<uint32_t, Kind::B32>;
using I32 = Word<int32_t, Kind::B32>;
using F32 = Word<float, Kind::F32>;
using U16 = Short<uint16_t, Kind::B16>;
using I16 = Short<int16_t, Kind::B16>;
using S16 = Short<uint16_t, Kind::S16>;
using S32 = Word<uint32_t, Kind::S32>;
using U64 = Long<uint64_t, Kind::B64>;
using I64 = Long<int64_t, Kind::I64>;
using F64 = Long<double, Kind::F64>;
using Mask = Word<uint32_t, Kind::MASK>; // 0 or 1 in each lane
struct F16 { // computed as float: sums, products and quotients of halves round to halves as if once
    using T = float;
    static constexpr Kind kind = Kind::F16;
    static T get(const uint32_t *lo, const uint32_t *, int l) { return half_to_float(uint16_t(lo[l])); }
    static void put(uint32_t *lo, uint32_t *, int l, T v) { lo[l] = float_to_half(v); }
};

struct H16 { // a half as it is, where NaN must stay what it is
    using T = uint16_t;
    static constexpr Kind kind = Kind::F16;
    static T get(const uint32_t *lo, const uint32_t *, int l) { return uint16_t(lo[l]); }
    static void put(uint32_t *lo, uint32_t *, int l, T v) { lo[l] = v; }
};

template <class D, class A, class B, class C, class F> inline void each_lane(Lanes &x, F f) {
    for (int l = 0; l < LANES; l++)
        D::put(x.dlo, x.dhi, l, f(A::get(x.lo[0], x.hi[0], l), B::get(x.lo[1], x.hi[1], l), C::get(x.lo[2], x.hi[2], l), l));
}

// A line of a table: number, name, types of result and sources, flags, and the result from a, b and c; `m` is the mask
// that it writes beside it, `l` the lane, `x` the rest.
#define V(OP, NAME, D, A, B, C, FLAGS, ...)                                                                               \
    {OP, NAME, D::kind, {A::kind, B::kind, C::kind}, FLAGS, [](Lanes &x) {                                                 \
         each_lane<D, A, B, C>(x, [&](A::T a, B::T b, C::T c, int l) -> D::T {                                              \
             uint32_t unused, &m = (FLAGS) & CARRY ? x.carry[l] : unused;                                                  \
             (void)a, (void)b, (void)c, (void)l, (void)m;                                                                  \
             return D::T(__VA_ARGS__);                                                                                     \
         });                                                                                                               \
     }, nullptr},

// Minimum and maximum order -0 before +0 and give the number beside a NaN; in IEEE mode a signalling NaN wins, made quiet.
template <class T> inline T quiet_or(T a, T b, bool ieee, T number) {
    if (ieee) {
        auto signals = [](T v) {
            if constexpr (sizeof(T) == 4) return v != v && !(std::bit_cast<uint32_t>(v) & 0x400000);
            else return v != v && !(std::bit_cast<uint64_t>(v) & 0x8000000000000);
        };
        if (signals(a)) return a + a;
        if (signals(b)) return b + b;
    }
    return b != b ? a : a != a ? b : number;
}
template <class T> inline T minimum(T a, T b, bool ieee) {
    return quiet_or(a, b, ieee, a < b || (a == b && std::signbit(a)) ? a : b);
}
template <class T> inline T maximum(T a, T b, bool ieee) {
    return quiet_or(a, b, ieee, a > b || (a == b && !std::signbit(a)) ? a : b);
}
// The same for halves as they are: order by sign and magnitude.
inline uint16_t half_extreme(uint16_t a, uint16_t b, bool ieee, bool greater) {
    auto nan = [](uint16_t v) { return (v & 0x7fff) > 0x7c00; };
    auto key = [](uint16_t v) { return v & 0x8000 ? -(v & 0x7fff) - 1 : int(v); };
    if (ieee && nan(a) && !(a & 0x200)) return a | 0x200;
    if (ieee && nan(b) && !(b & 0x200)) return b | 0x200;
    if (nan(b)) return a;
    if (nan(a)) return b;
    return (key(a) > key(b)) == greater ? a : b;
}
inline uint16_t minimum(uint16_t a, uint16_t b, bool ieee) { return half_extreme(a, b, ieee, false); }
inline uint16_t maximum(uint16_t a, uint16_t b, bool ieee) { return half_extreme(a, b, ieee, true); }
template <class T> inline T median(T a, T b, T c, bool ieee) {
    auto nan = [](T v) {
        if constexpr (sizeof(T) == 2) return (v & 0x7fff) > 0x7c00;
        else return v != v;
    };
    if (nan(a) || nan(b) || nan(c)) return minimum(minimum(a, b, ieee), c, ieee);
    T top = maximum(maximum(a, b, ieee), c, ieee);
    return top == a ? maximum(b, c, ieee) : top == b ? maximum(a, c, ieee) : maximum(a, b, ieee);
}
template <class I, class F> inline I to_integer(F v) { // truncates; saturates; NaN is 0
    if (v != v) return 0;
    if (v <= F(std::numeric_limits<I>::min())) return std::numeric_limits<I>::min();
    if (v >= F(std::numeric_limits<I>::max())) return std::numeric_limits<I>::max();
    return I(v);
}
template <class I> inline I saturate(int64_t v) {
    if (v < int64_t(std::numeric_limits<I>::min())) return std::numeric_limits<I>::min();
    return v > int64_t(std::numeric_limits<I>::max()) ? std::numeric_limits<I>::max() : I(v);
}
template <class T> inline T fraction(T v) { // below 1, as the hardware's
    T f = v - std::floor(v);
    return f >= T(1) ? std::nextafter(T(1), T(0)) : f;
}
inline float without_denormal(float v) { return std::fpclassify(v) == FP_SUBNORMAL ? std::copysign(0.0f, v) : v; }

} // namespace gfx
