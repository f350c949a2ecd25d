// Vector operations on integers and bits, and those that move values.
#include "number.h"

namespace gfx {
namespace {

int32_t signed24(uint32_t v) { return int32_t(v << 8) >> 8; }
uint32_t extract(uint32_t v, uint32_t at, uint32_t width) { return v >> (at & 31) & ((1u << (width & 31)) - 1); }
int32_t extract_signed(int32_t v, uint32_t at, uint32_t width) {
    at &= 31, width &= 31;
    return width ? int32_t(uint32_t(v >> at) << (32 - width)) >> (32 - width) : 0;
}
uint32_t permute_byte(uint64_t data, uint32_t select) {
    if (select >= 13) return 255;
    if (select == 12) return 0;
    if (select >= 8) return data >> ((select - 8) * 16 + 15) & 1 ? 255 : 0;
    return data >> (select * 8) & 255;
}
uint32_t permute(uint32_t a, uint32_t b, uint32_t select) {
    uint64_t data = uint64_t(a) << 32 | b;
    uint32_t v = 0;
    for (int i = 0; i < 4; i++) v |= permute_byte(data, select >> (8 * i) & 255) << (8 * i);
    return v;
}
uint32_t reversed(uint32_t v) {
    uint32_t r = 0;
    for (int i = 0; i < 32; i++) r |= (v >> i & 1) << (31 - i);
    return r;
}
uint32_t difference(uint32_t a, uint32_t b) { return a > b ? a - b : b - a; }
uint32_t sad8(uint32_t a, uint32_t b, uint32_t skip_zero) {
    uint32_t sum = 0;
    for (int i = 0; i < 32; i += 8)
        if (!skip_zero || (b >> i & 255)) sum += difference(a >> i & 255, b >> i & 255);
    return sum;
}
template <class T> T middle(T a, T b, T c) { return std::max(std::min(a, b), std::min(std::max(a, b), c)); }

// Sums in 64 bits, cut off or, with `clamp`, saturated.
#define CUT(T, ...) (x.clamp ? saturate<T>(__VA_ARGS__) : T(__VA_ARGS__))

const VectorOp table[] = {
    V(0x101, "v_cndmask_b32", U32, S32, S32, Mask, 0, c ? b : a)
    V(0x109, "v_mul_i32_i24", I32, U32, U32, None, 0, uint32_t(signed24(a)) * uint32_t(signed24(b)))
    V(0x10a, "v_mul_hi_i32_i24", I32, U32, U32, None, 0, int64_t(signed24(a)) * signed24(b) >> 32)
    V(0x10b, "v_mul_u32_u24", U32, U32, U32, None, 0, (a & 0xffffff) * (b & 0xffffff))
    V(0x10c, "v_mul_hi_u32_u24", U32, U32, U32, None, 0, uint64_t(a & 0xffffff) * (b & 0xffffff) >> 32)
    V(0x111, "v_min_i32", I32, I32, I32, None, 0, a < b ? a : b)
    V(0x112, "v_max_i32", I32, I32, I32, None, 0, a > b ? a : b)
    V(0x113, "v_min_u32", U32, U32, U32, None, 0, a < b ? a : b)
    V(0x114, "v_max_u32", U32, U32, U32, None, 0, a > b ? a : b)
    V(0x118, "v_lshlrev_b32", U32, U32, U32, None, 0, b << (a & 31))
    V(0x119, "v_lshrrev_b32", U32, U32, U32, None, 0, b >> (a & 31))
    V(0x11a, "v_ashrrev_i32", I32, U32, I32, None, 0, b >> (a & 31))
    V(0x11b, "v_and_b32", U32, U32, U32, None, 0, a &b)
    V(0x11c, "v_or_b32", U32, U32, U32, None, 0, a | b)
    V(0x11d, "v_xor_b32", U32, U32, U32, None, 0, a ^ b)
    V(0x11e, "v_xnor_b32", U32, U32, U32, None, 0, ~(a ^ b))
    V(0x120, "v_add_co_ci_u32", U32, U32, U32, Mask, CARRY | SATURATES, [&] { uint64_t t = uint64_t(a) + b + c; m = uint32_t(t >> 32); return CUT(uint32_t, int64_t(t)); }())
    V(0x121, "v_sub_co_ci_u32", U32, U32, U32, Mask, CARRY | SATURATES, [&] { int64_t t = int64_t(a) - b - c; m = t < 0; return CUT(uint32_t, t); }())
    V(0x122, "v_subrev_co_ci_u32", U32, U32, U32, Mask, CARRY | SATURATES, [&] { int64_t t = int64_t(b) - a - c; m = t < 0; return CUT(uint32_t, t); }())
    V(0x125, "v_add_nc_u32", U32, U32, U32, None, SATURATES, CUT(uint32_t, int64_t(a) + b))
    V(0x126, "v_sub_nc_u32", U32, U32, U32, None, SATURATES, CUT(uint32_t, int64_t(a) - b))
    V(0x127, "v_subrev_nc_u32", U32, U32, U32, None, SATURATES, CUT(uint32_t, int64_t(b) - a))
    V(0x181, "v_mov_b32", U32, U32, None, None, 0, a)
    V(0x19c, "v_mov_b16", U16, U16, None, None, 0, a)
    V(0x1b7, "v_not_b32", U32, U32, None, None, 0, ~a)
    V(0x1b8, "v_bfrev_b32", U32, U32, None, None, 0, reversed(a))
    V(0x1b9, "v_clz_i32_u32", I32, U32, None, None, 0, a ? std::countl_zero(a) : -1)
    V(0x1ba, "v_ctz_i32_b32", I32, U32, None, None, 0, a ? std::countr_zero(a) : -1)
    V(0x1bb, "v_cls_i32", I32, I32, None, None, 0, a == 0 || a == -1 ? -1 : std::countl_zero(uint32_t(a ^ (a >> 31))))
    V(0x1e2, "v_sat_pk_u8_i16", U16, U32, None, None, 0, saturate<uint8_t>(int16_t(a)) | saturate<uint8_t>(int16_t(a >> 16)) << 8)
    V(0x1e9, "v_not_b16", U16, U16, None, None, 0, ~a)
    V(0x20a, "v_mad_i32_i24", I32, U32, U32, I32, SATURATES, CUT(int32_t, int64_t(signed24(a)) * signed24(b) + c))
    V(0x20b, "v_mad_u32_u24", U32, U32, U32, U32, SATURATES, CUT(uint32_t, int64_t(a & 0xffffff) * (b & 0xffffff) + c))
    V(0x210, "v_bfe_u32", U32, U32, U32, U32, 0, extract(a, b, c))
    V(0x211, "v_bfe_i32", I32, I32, U32, U32, 0, extract_signed(a, b, c))
    V(0x212, "v_bfi_b32", U32, U32, U32, U32, 0, (a & b) | (~a & c))
    V(0x215, "v_lerp_u8", U32, U32, U32, U32, 0, [&] { uint32_t v = 0; for (int i = 0; i < 32; i += 8) v |= ((a >> i & 255) + (b >> i & 255) + (c >> i & 1)) >> 1 << i; return v; }())
    V(0x216, "v_alignbit_b32", U32, U32, U32, U32, 0, (uint64_t(a) << 32 | b) >> (c & 31))
    V(0x217, "v_alignbyte_b32", U32, U32, U32, U32, 0, (uint64_t(a) << 32 | b) >> (c & 3) * 8)
    V(0x21a, "v_min3_i32", I32, I32, I32, I32, 0, std::min(std::min(a, b), c))
    V(0x21b, "v_min3_u32", U32, U32, U32, U32, 0, std::min(std::min(a, b), c))
    V(0x21d, "v_max3_i32", I32, I32, I32, I32, 0, std::max(std::max(a, b), c))
    V(0x21e, "v_max3_u32", U32, U32, U32, U32, 0, std::max(std::max(a, b), c))
    V(0x220, "v_med3_i32", I32, I32, I32, I32, 0, middle(a, b, c))
    V(0x221, "v_med3_u32", U32, U32, U32, U32, 0, middle(a, b, c))
    V(0x222, "v_sad_u8", U32, U32, U32, U32, 0, sad8(a, b, 0) + c)
    V(0x223, "v_sad_hi_u8", U32, U32, U32, U32, 0, (sad8(a, b, 0) << 16) + c)
    V(0x224, "v_sad_u16", U32, U32, U32, U32, 0, difference(a & 0xffff, b & 0xffff) + difference(a >> 16, b >> 16) + c)
    V(0x225, "v_sad_u32", U32, U32, U32, U32, 0, difference(a, b) + c)
    V(0x239, "v_msad_u8", U32, U32, U32, U32, 0, sad8(a, b, 1) + c)
    V(0x240, "v_xor3_b32", U32, U32, U32, U32, 0, a ^ b ^ c)
    V(0x241, "v_mad_u16", U16, U16, U16, U16, SATURATES, CUT(uint16_t, int64_t(a) * b + c))
    V(0x244, "v_perm_b32", U32, U32, U32, U32, 0, permute(a, b, c))
    V(0x245, "v_xad_u32", U32, U32, U32, U32, 0, (a ^ b) + c)
    V(0x246, "v_lshl_add_u32", U32, U32, U32, U32, 0, (a << (b & 31)) + c)
    V(0x247, "v_add_lshl_u32", U32, U32, U32, U32, 0, (a + b) << (c & 31))
    V(0x24a, "v_min3_i16", I16, I16, I16, I16, 0, std::min(std::min(a, b), c))
    V(0x24b, "v_min3_u16", U16, U16, U16, U16, 0, std::min(std::min(a, b), c))
    V(0x24d, "v_max3_i16", I16, I16, I16, I16, 0, std::max(std::max(a, b), c))
    V(0x24e, "v_max3_u16", U16, U16, U16, U16, 0, std::max(std::max(a, b), c))
    V(0x250, "v_med3_i16", I16, I16, I16, I16, 0, middle(a, b, c))
    V(0x251, "v_med3_u16", U16, U16, U16, U16, 0, middle(a, b, c))
    V(0x253, "v_mad_i16", I16, I16, I16, I16, SATURATES, CUT(int16_t, int64_t(a) * b + c))
    V(0x255, "v_add3_u32", U32, U32, U32, U32, 0, a + b + c)
    V(0x256, "v_lshl_or_b32", U32, U32, U32, U32, 0, (a << (b & 31)) | c)
    V(0x257, "v_and_or_b32", U32, U32, U32, U32, 0, (a & b) | c)
    V(0x258, "v_or3_b32", U32, U32, U32, U32, 0, a | b | c)
    V(0x259, "v_mad_u32_u16", U32, U16, U16, U32, SATURATES, CUT(uint32_t, int64_t(a) * b + c))
    V(0x25a, "v_mad_i32_i16", I32, I16, I16, I32, SATURATES, CUT(int32_t, int64_t(a) * b + c))
    V(0x25d, "v_cndmask_b16", U16, S16, S16, Mask, 0, c ? b : a)
    V(0x262, "v_maxmin_u32", U32, U32, U32, U32, 0, std::min(std::max(a, b), c))
    V(0x263, "v_minmax_u32", U32, U32, U32, U32, 0, std::max(std::min(a, b), c))
    V(0x264, "v_maxmin_i32", I32, I32, I32, I32, 0, std::min(std::max(a, b), c))
    V(0x265, "v_minmax_i32", I32, I32, I32, I32, 0, std::max(std::min(a, b), c))
    V(0x2fe, "v_mad_u64_u32", U64, U32, U32, U64, CARRY, [&] { unsigned __int128 t = (unsigned __int128)(uint64_t(a) * b) + c; m = uint32_t(t >> 64); return uint64_t(t); }())
    V(0x2ff, "v_mad_i64_i32", I64, I32, I32, I64, CARRY, [&] { __int128 t = (__int128)(int64_t(a) * b) + c; m = uint32_t(t >> 64) & 1; return int64_t(t); }())
    V(0x300, "v_add_co_u32", U32, U32, U32, None, CARRY | SATURATES, [&] { uint64_t t = uint64_t(a) + b; m = uint32_t(t >> 32); return CUT(uint32_t, int64_t(t)); }())
    V(0x301, "v_sub_co_u32", U32, U32, U32, None, CARRY | SATURATES, [&] { m = a < b; return CUT(uint32_t, int64_t(a) - b); }())
    V(0x302, "v_subrev_co_u32", U32, U32, U32, None, CARRY | SATURATES, [&] { m = b < a; return CUT(uint32_t, int64_t(b) - a); }())
    V(0x303, "v_add_nc_u16", U16, U16, U16, None, SATURATES, CUT(uint16_t, int64_t(a) + b))
    V(0x304, "v_sub_nc_u16", U16, U16, U16, None, SATURATES, CUT(uint16_t, int64_t(a) - b))
    V(0x305, "v_mul_lo_u16", U16, U16, U16, None, 0, uint32_t(a) * b)
    V(0x309, "v_max_u16", U16, U16, U16, None, 0, a > b ? a : b)
    V(0x30a, "v_max_i16", I16, I16, I16, None, 0, a > b ? a : b)
    V(0x30b, "v_min_u16", U16, U16, U16, None, 0, a < b ? a : b)
    V(0x30c, "v_min_i16", I16, I16, I16, None, 0, a < b ? a : b)
    V(0x30d, "v_add_nc_i16", I16, I16, I16, None, SATURATES, CUT(int16_t, int64_t(a) + b))
    V(0x30e, "v_sub_nc_i16", I16, I16, I16, None, SATURATES, CUT(int16_t, int64_t(a) - b))
    V(0x31d, "v_bfm_b32", U32, U32, U32, None, 0, ((1u << (a & 31)) - 1) << (b & 31))
    V(0x31e, "v_bcnt_u32_b32", U32, U32, U32, None, 0, std::popcount(a) + b)
    V(0x31f, "v_mbcnt_lo_u32_b32", U32, U32, U32, None, 0, std::popcount(a & ((1u << l) - 1)) + b)
    V(0x320, "v_mbcnt_hi_u32_b32", U32, U32, U32, None, 0, b) // lanes 32 to 63 are not there
    V(0x325, "v_sub_nc_i32", I32, I32, I32, None, SATURATES, CUT(int32_t, int64_t(a) - b))
    V(0x326, "v_add_nc_i32", I32, I32, I32, None, SATURATES, CUT(int32_t, int64_t(a) + b))
    V(0x32c, "v_mul_lo_u32", U32, U32, U32, None, 0, a *b)
    V(0x32d, "v_mul_hi_u32", U32, U32, U32, None, 0, uint64_t(a) * b >> 32)
    V(0x32e, "v_mul_hi_i32", I32, I32, I32, None, 0, int64_t(a) * b >> 32)
    V(0x338, "v_lshlrev_b16", U16, U16, U16, None, 0, uint32_t(b) << (a & 15))
    V(0x339, "v_lshrrev_b16", U16, U16, U16, None, 0, b >> (a & 15))
    V(0x33a, "v_ashrrev_i16", I16, U16, I16, None, 0, b >> (a & 15))
    V(0x33c, "v_lshlrev_b64", U64, U32, U64, None, 0, b << (a & 63))
    V(0x33d, "v_lshrrev_b64", U64, U32, U64, None, 0, b >> (a & 63))
    V(0x33e, "v_ashrrev_i64", I64, U32, I64, None, 0, b >> (a & 63))
    V(0x362, "v_and_b16", U16, U16, U16, None, 0, a &b)
    V(0x363, "v_or_b16", U16, U16, U16, None, 0, a | b)
    V(0x364, "v_xor_b16", U16, U16, U16, None, 0, a ^ b)
};

} // namespace

OpList integer_ops() { return {table, std::size(table)}; }

} // namespace gfx
