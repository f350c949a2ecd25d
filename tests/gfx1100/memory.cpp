// Vector memory instructions: flat, global, scratch, buffer and LDS, each access checked lane by lane.
#include <algorithm>

#include "memory.h"
#include "number.h"

namespace gfx {

const MemoryOp *memory_op(unsigned op) {
    static const auto all = [] {
        std::array<const MemoryOp *, 128> index{};
        static const MemoryOp table[] = {
            {0x10, "load_u8", LOAD, 1}, {0x11, "load_i8", LOAD | SIGNED, 1}, {0x12, "load_u16", LOAD, 2},
            {0x13, "load_i16", LOAD | SIGNED, 2}, {0x14, "load_b32", LOAD, 4}, {0x15, "load_b64", LOAD, 8},
            {0x16, "load_b96", LOAD, 12}, {0x17, "load_b128", LOAD, 16}, {0x18, "store_b8", 0, 1}, {0x19, "store_b16", 0, 2},
            {0x1a, "store_b32", 0, 4}, {0x1b, "store_b64", 0, 8}, {0x1c, "store_b96", 0, 12}, {0x1d, "store_b128", 0, 16},
            {0x1e, "load_d16_u8", LOAD | HALF16, 1}, {0x1f, "load_d16_i8", LOAD | HALF16 | SIGNED, 1},
            {0x20, "load_d16_b16", LOAD | HALF16, 2}, {0x21, "load_d16_hi_u8", LOAD | HALF16 | UPPER, 1},
            {0x22, "load_d16_hi_i8", LOAD | HALF16 | UPPER | SIGNED, 1}, {0x23, "load_d16_hi_b16", LOAD | HALF16 | UPPER, 2},
            {0x24, "store_d16_hi_b8", UPPER, 1}, {0x25, "store_d16_hi_b16", UPPER, 2}, {0x28, "load_addtid_b32", LOAD | ADDTID, 4},
            {0x29, "store_addtid_b32", ADDTID, 4}, {0x33, "atomic_swap_b32", ATOMIC, 4, Atomic::SWAP},
            {0x34, "atomic_cmpswap_b32", ATOMIC, 4, Atomic::CMPSWAP}, {0x35, "atomic_add_u32", ATOMIC, 4, Atomic::ADD},
            {0x36, "atomic_sub_u32", ATOMIC, 4, Atomic::SUB}, {0x37, "atomic_csub_u32", ATOMIC, 4, Atomic::CSUB},
            {0x38, "atomic_min_i32", ATOMIC, 4, Atomic::MIN_I}, {0x39, "atomic_min_u32", ATOMIC, 4, Atomic::MIN_U},
            {0x3a, "atomic_max_i32", ATOMIC, 4, Atomic::MAX_I}, {0x3b, "atomic_max_u32", ATOMIC, 4, Atomic::MAX_U},
            {0x3c, "atomic_and_b32", ATOMIC, 4, Atomic::AND}, {0x3d, "atomic_or_b32", ATOMIC, 4, Atomic::OR},
            {0x3e, "atomic_xor_b32", ATOMIC, 4, Atomic::XOR}, {0x3f, "atomic_inc_u32", ATOMIC, 4, Atomic::INC},
            {0x40, "atomic_dec_u32", ATOMIC, 4, Atomic::DEC}, {0x41, "atomic_swap_b64", ATOMIC, 8, Atomic::SWAP},
            {0x42, "atomic_cmpswap_b64", ATOMIC, 8, Atomic::CMPSWAP}, {0x43, "atomic_add_u64", ATOMIC, 8, Atomic::ADD},
            {0x44, "atomic_sub_u64", ATOMIC, 8, Atomic::SUB}, {0x45, "atomic_min_i64", ATOMIC, 8, Atomic::MIN_I},
            {0x46, "atomic_min_u64", ATOMIC, 8, Atomic::MIN_U}, {0x47, "atomic_max_i64", ATOMIC, 8, Atomic::MAX_I},
            {0x48, "atomic_max_u64", ATOMIC, 8, Atomic::MAX_U}, {0x49, "atomic_and_b64", ATOMIC, 8, Atomic::AND},
            {0x4a, "atomic_or_b64", ATOMIC, 8, Atomic::OR}, {0x4b, "atomic_xor_b64", ATOMIC, 8, Atomic::XOR},
            {0x4c, "atomic_inc_u64", ATOMIC, 8, Atomic::INC}, {0x4d, "atomic_dec_u64", ATOMIC, 8, Atomic::DEC},
            {0x50, "atomic_cmpswap_f32", ATOMIC, 4, Atomic::CMPSWAP_F}, {0x51, "atomic_min_f32", ATOMIC, 4, Atomic::MIN_F},
            {0x52, "atomic_max_f32", ATOMIC, 4, Atomic::MAX_F}, {0x56, "atomic_add_f32", ATOMIC, 4, Atomic::ADD_F},
        };
        for (const MemoryOp &o : table) index[o.op] = &o;
        return index;
    }();
    return op < 128 ? all[op] : nullptr;
}

uint64_t combine(Atomic a, unsigned bytes, uint64_t old, uint64_t data, uint64_t data2) {
    auto number = [](uint64_t v) { return std::bit_cast<float>(uint32_t(v)); };
    auto bits = [](float v) { return uint64_t(std::bit_cast<uint32_t>(v)); };
    auto whole = [&](uint64_t v) { return bytes == 4 ? int64_t(int32_t(uint32_t(v))) : int64_t(v); };
    switch (a) {
    case Atomic::SWAP: return data;
    case Atomic::CMPSWAP: return old == data2 ? data : old;
    case Atomic::ADD: return old + data;
    case Atomic::SUB: return old - data;
    case Atomic::RSUB: return data - old;
    case Atomic::CSUB: return old < data ? 0 : old - data;
    case Atomic::MIN_I: return whole(data) < whole(old) ? data : old;
    case Atomic::MAX_I: return whole(data) >= whole(old) ? data : old;
    case Atomic::MIN_U: return std::min(data, old);
    case Atomic::MAX_U: return std::max(data, old);
    case Atomic::AND: return old & data;
    case Atomic::OR: return old | data;
    case Atomic::XOR: return old ^ data;
    case Atomic::INC: return old >= data ? 0 : old + 1;
    case Atomic::DEC: return old == 0 || old > data ? data : old - 1;
    case Atomic::MASKED_OR: return (old & ~data) | data2;
    case Atomic::WRAP: return old >= data ? old - data : old + data2;
    case Atomic::CMPSWAP_F: return bytes == 8 ? (std::bit_cast<double>(old) == std::bit_cast<double>(data2) ? data : old)
                                              : number(old) == number(data2) ? data : old;
    case Atomic::MIN_F: return bytes == 8 ? (std::bit_cast<double>(data) < std::bit_cast<double>(old) ? data : old)
                                          : number(data) < number(old) ? data : old;
    case Atomic::MAX_F: return bytes == 8 ? (std::bit_cast<double>(data) > std::bit_cast<double>(old) ? data : old)
                                          : number(data) > number(old) ? data : old;
    case Atomic::ADD_F: return bits(number(old) + number(data));
    case Atomic::NONE: break;
    }
    fault("an atomic operation without meaning");
}

namespace {

std::string describe(const Allocation &a, uint64_t address) {
    char text[160];
    if (!a.bytes) return "no allocation is near";
    if (address >= a.base + a.bytes) snprintf(text, sizeof text, "%llu bytes past the end of", (unsigned long long)(address - a.base - a.bytes));
    else snprintf(text, sizeof text, "%llu bytes before", (unsigned long long)(a.base - address));
    return std::string(text) + " the allocation of " + std::to_string(a.bytes) + " bytes";
}

} // namespace

uint8_t *Launch::memory(uint64_t address, unsigned bytes, bool write, int lane) {
    for (const Allocation &a : recent)
        if (address - a.base < a.bytes && a.bytes - (address - a.base) >= bytes && a.flags & (write ? 2 : 1))
            return reinterpret_cast<uint8_t *>(address);
    return elsewhere(address, bytes, write, lane);
}

uint8_t *Launch::elsewhere(uint64_t address, unsigned bytes, bool write, int lane) {
    struct { uint64_t base, bytes; const void *host; } own[] = {
        {kernel->code_address, kernel->code_bytes, kernel->code},
        {uint64_t(launch->kernarg), launch->kernarg_bytes, launch->kernarg},
        {uint64_t(packet), sizeof packet, packet},
    };
    if (!write)
        for (auto &o : own)
            if (address - o.base < o.bytes && o.bytes - (address - o.base) >= bytes)
                return const_cast<uint8_t *>(static_cast<const uint8_t *>(o.host)) + (address - o.base);
    char who[32] = "";
    if (lane >= 0) snprintf(who, sizeof who, "lane %d ", lane);
    const char *does = write ? "writes" : "reads";
    Allocation found;
    if (lookup && lookup(address, &found.base, &found.bytes, &found.flags)) {
        if (found.bytes - (address - found.base) < bytes)
            fault("%s%s %u bytes at 0x%llx, reaching past the end of the allocation of %llu bytes", who, does, bytes,
                  (unsigned long long)address, (unsigned long long)found.bytes);
        if (!(found.flags & (write ? 2 : 1)))
            fault("%s%s memory at 0x%llx that is not to be %s", who, does, (unsigned long long)address, write ? "written" : "read");
        recent[next_recent++ % std::size(recent)] = found;
        return reinterpret_cast<uint8_t *>(address);
    }
    Allocation nearest;
    uint64_t best = 1 << 20;
    for (const Allocation &a : recent) {
        uint64_t distance = address < a.base ? a.base - address : address - a.base - a.bytes;
        if (a.bytes && distance < best) best = distance, nearest = a;
    }
    fault("%s%s %u bytes at 0x%llx: %s", who, does, bytes, (unsigned long long)address, describe(nearest, address).c_str());
}

void lds_touch(Wave &w, unsigned at, unsigned bytes, bool write, bool atomic, int lane) {
    Group &g = *w.group;
    if (!w.launch->check_races) return;
    for (unsigned n = at; n < at + bytes; n++) {
        Touch &t = g.touched[n];
        uint8_t me = uint8_t(w.number);
        bool other_wrote = t.written == g.epoch && t.writer != me && !(atomic && t.atomic);
        bool other_read = t.read == g.epoch && (t.many || t.reader != me) && !(atomic && t.atomic);
        if (other_wrote || (write && other_read))
            fault("LDS byte %u is %s by lane %d of wave %u and %s by wave %u without a barrier between", n, write ? "written" : "read", lane,
                  w.number, other_wrote ? "written" : "read", other_wrote ? t.writer : t.reader);
        if (write) t.written = g.epoch, t.writer = me;
        if (!write || atomic) {
            t.many = t.read == g.epoch && (t.many || t.reader != me);
            t.read = g.epoch, t.reader = me;
        }
        t.atomic = atomic;
    }
}

Target lds_target(Wave &w, uint64_t at, unsigned bytes, bool write, bool atomic, int lane, bool touches) {
    Group &g = *w.group;
    if (at + bytes > g.lds.size())
        fault("lane %d %s %u bytes of LDS at %llu, but the workgroup has %zu", lane, write ? "writes" : "reads", bytes, (unsigned long long)at, g.lds.size());
    if (atomic && at % bytes) fault("lane %d: an atomic operation on LDS at %llu, which is not aligned", lane, (unsigned long long)at);
    if (touches) lds_touch(w, unsigned(at), bytes, write, atomic, lane);
    return {g.lds.data() + at, g.lds_undefined.data() + at};
}

namespace {

Target scratch_target(Wave &w, int64_t at, unsigned bytes, int lane) {
    uint32_t size = w.launch->scratch_bytes;
    if (at < 0 || at + bytes > size) fault("lane %d accesses %u bytes of scratch at %lld, but each lane has %u", lane, bytes, (long long)at, size);
    return {w.scratch.data() + size_t(size) * lane + at, w.scratch_undefined.data() + size_t(size) * lane + at};
}

} // namespace

// A register after one or two bytes were loaded into it, or a half of it.
static uint32_t narrow(const MemoryOp &op, uint32_t old, const uint8_t *from) {
    uint32_t v = op.bytes == 1 ? from[0] : from[0] | uint32_t(from[1]) << 8;
    if (op.flags & SIGNED) v = op.bytes == 1 ? uint32_t(int32_t(int8_t(v))) : uint32_t(int32_t(int16_t(v)));
    if (!(op.flags & HALF16)) return v;
    return op.flags & UPPER ? (old & 0xffff) | v << 16 : (old & 0xffff0000) | (v & 0xffff);
}

void load_lane(Wave &w, uint16_t dst, const MemoryOp &op, Target from, int lane) {
    uint32_t words[4] = {}, bit = 1u << lane;
    if (op.bytes < 4) {
        uint32_t undefined = 0;
        for (unsigned n = 0; from.undefined && n < op.bytes; n++) undefined |= from.undefined[n];
        w.v[dst][lane] = narrow(op, w.v[dst][lane], from.data);
        if (op.flags & HALF16) return w.define(dst, bit, undefined ? bit : 0, half_of(op));
        w.define(dst, bit, undefined ? bit : 0, 0);
        w.define(dst, bit, undefined && op.flags & SIGNED ? bit : 0, 1);
        return;
    }
    std::memcpy(words, from.data, op.bytes);
    for (unsigned n = 0; n < op.bytes / 4u; n++) {
        w.v[dst + n][lane] = words[n];
        w.define(dst + n, bit, from.undefined && from.undefined[4 * n] | from.undefined[4 * n + 1] ? bit : 0, 0);
        w.define(dst + n, bit, from.undefined && from.undefined[4 * n + 2] | from.undefined[4 * n + 3] ? bit : 0, 1);
    }
}

void store_lane(Wave &w, uint16_t data, const MemoryOp &op, Target to, int lane) {
    if (op.bytes < 4) {
        uint32_t v = w.row(data, (op.flags & UPPER) != 0)[lane] >> (op.flags & UPPER ? 16 : 0);
        std::memcpy(to.data, &v, op.bytes);
        if (to.undefined) std::memset(to.undefined, (op.flags & UPPER ? w.high_undefined : w.low_undefined)[data] >> lane & 1, op.bytes);
        return;
    }
    for (unsigned n = 0; n < op.bytes / 4u; n++) {
        std::memcpy(to.data + 4 * n, &w.row(data + n)[lane], 4);
        if (!to.undefined) continue;
        std::memset(to.undefined + 4 * n, w.low_undefined[data + n] >> lane & 1, 2);
        std::memset(to.undefined + 4 * n + 2, w.high_undefined[data + n] >> lane & 1, 2);
    }
}

uint64_t words_of(Wave &w, uint16_t vgpr, unsigned bytes, int lane) {
    return bytes == 8 ? uint64_t(w.row(vgpr + 1)[lane]) << 32 | w.row(vgpr)[lane] : w.row(vgpr)[lane];
}

void atomic_lane(Wave &w, const Instruction &i, Atomic a, unsigned bytes, Target at, bool returns, uint64_t data, uint64_t data2, int lane) {
    if (uint64_t(at.data) % bytes && !at.undefined) fault("lane %d: an atomic operation on an address that is not aligned", lane);
    uint64_t old = 0;
    if (bytes == 4) {
        uint32_t *p = reinterpret_cast<uint32_t *>(at.data), before = __atomic_load_n(p, __ATOMIC_RELAXED);
        while (!__atomic_compare_exchange_n(p, &before, uint32_t(combine(a, 4, before, uint32_t(data), uint32_t(data2))), true, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {}
        old = before;
    } else {
        uint64_t *p = reinterpret_cast<uint64_t *>(at.data), before = __atomic_load_n(p, __ATOMIC_RELAXED);
        while (!__atomic_compare_exchange_n(p, &before, combine(a, 8, before, data, data2), true, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {}
        old = before;
    }
    uint32_t bit = 1u << lane, undefined = 0;
    for (unsigned n = 0; at.undefined && n < bytes; n++) undefined |= at.undefined[n];
    if (at.undefined && a == Atomic::SWAP) std::memset(at.undefined, 0, bytes);
    if (!returns) return;
    for (unsigned n = 0; n < bytes / 4; n++) {
        w.target(i.dst + n)[lane] = uint32_t(old >> 32 * n);
        w.define(i.dst + n, bit, undefined ? bit : 0);
    }
}

// Lanes whose addresses are all in one allocation that allows it: the common case, in which none needs a look of its own.
static bool together(const Launch &launch, const MemoryOp &op, const uint64_t *at, uint32_t mask) {
    uint64_t least = ~0ull, most = 0;
    uint32_t rights = op.flags & ATOMIC ? 3 : op.flags & LOAD ? 1 : 2;
    for (int l = 0; l < LANES; l++)
        if (mask >> l & 1) least = std::min(least, at[l]), most = std::max(most, at[l]);
    for (const Allocation &a : launch.recent)
        if (least - a.base < a.bytes && most - a.base < a.bytes && a.bytes - (most - a.base) >= op.bytes && (a.flags & rights) == rights) return true;
    return false;
}

static void load_together(Wave &w, const Instruction &i, const MemoryOp &op, const uint64_t *at, uint32_t mask, bool flat) {
    unsigned words = (op.bytes + 3) / 4;
    for (unsigned n = 0; n < words; n++) {
        uint32_t *row = w.target(i.dst + n);
        for (int l = 0; l < LANES; l++) {
            if (!(mask >> l & 1)) continue;
            auto *from = reinterpret_cast<const uint8_t *>(at[l]) + 4 * n;
            if (op.bytes < 4) row[l] = narrow(op, row[l], from);
            else std::memcpy(&row[l], from, 4);
        }
        w.define(i.dst + n, mask, 0, half_of(op));
    }
    w.issued(i.dst, words, true, flat, half_of(op));
}

// What all memory instructions do once the place of each lane is known.
template <class PLACE> static void access(Wave &w, const Instruction &i, uint32_t mask, PLACE place) {
    const MemoryOp &op = *memory_op(i.op);
    bool load = op.flags & LOAD, atomic = op.flags & ATOMIC;
    bool compares = op.atomic == Atomic::CMPSWAP || op.atomic == Atomic::CMPSWAP_F;
    unsigned words = (op.bytes + 3) / 4;
    if (load) w.target(i.dst + words - 1);
    for (int l = 0; l < LANES; l++) {
        if (!(mask >> l & 1)) continue;
        Target t = place(l, op.bytes, !load, atomic);
        if (load) load_lane(w, i.dst, op, t, l);
        else if (atomic) {
            uint64_t data = words_of(w, i.data, op.bytes, l), data2 = compares ? words_of(w, i.data + op.bytes / 4, op.bytes, l) : 0;
            atomic_lane(w, i, op.atomic, op.bytes, t, i.glc, data, data2, l);
        } else store_lane(w, i.data, op, t, l);
    }
    bool flat = i.run == run_memory && i.segment == 0;
    if (load || (atomic && i.glc)) w.issued(i.dst, words, true, flat, half_of(op));
    else if (flat) w.local.issued++;
}

void run_memory(Wave &w, const Instruction &i) {
    const MemoryOp &op = *memory_op(i.op);
    uint32_t exec = w.exec(), undefined = 0;
    bool write = !(op.flags & LOAD), scalar = i.saddr != NUL && i.saddr != ABSENT;
    uint64_t base = uint64_t(int64_t(i.offset)), at[LANES];
    if (scalar) {
        undefined |= w.scalar_undefined(i.saddr) ? ALL : 0;
        if (i.segment == 1) base += int64_t(int32_t(w.scalar(i.saddr, i)));
        else base += w.scalar64(i.saddr, i), undefined |= w.scalar_undefined(i.saddr + 1) ? ALL : 0;
    }
    const uint32_t *low = nullptr, *high = nullptr;
    if (op.flags & ADDTID) {
    } else if (i.segment != 1 || i.idxen) { // idxen: scratch with a vector address
        low = w.row(i.address), undefined |= w.lanes_undefined(i.address);
        if (i.segment != 1 && !scalar) high = w.row(i.address + 1), undefined |= w.lanes_undefined(i.address + 1);
    }
    w.require(undefined & exec, "a vector register of the lane", "an address");
    bool special = false;
    for (int l = 0; l < LANES; l++) {
        at[l] = base + (low ? low[l] : 0) + (high ? uint64_t(high[l]) << 32 : 0) + (op.flags & ADDTID ? 4 * l : 0);
        special |= exec >> l & 1 && (at[l] >> 32 == SHARED_APERTURE || at[l] >> 32 == PRIVATE_APERTURE);
    }
    if (!exec) return access(w, i, 0, [](int, unsigned, bool, bool) { return Target{}; });
    if (i.segment == 1) {
        access(w, i, exec, [&](int l, unsigned bytes, bool, bool) { return scratch_target(w, int32_t(uint32_t(at[l])), bytes, l); });
        return;
    }
    uint32_t moved = uint32_t(std::popcount(exec)) * op.bytes;
    (write ? w.launch->stats.bytes_stored : w.launch->stats.bytes_loaded) += moved;
    if (i.segment == 0 && special) {
        access(w, i, exec, [&](int l, unsigned bytes, bool writes, bool atomic) -> Target {
            if (at[l] >> 32 == SHARED_APERTURE) return lds_target(w, uint32_t(at[l]), bytes, writes, atomic, l);
            if (at[l] >> 32 == PRIVATE_APERTURE) return scratch_target(w, uint32_t(at[l]), bytes, l);
            return {w.launch->memory(at[l], bytes, writes, l), nullptr};
        });
        return;
    }
    bool one = together(*w.launch, op, at, exec);
    if (one && op.flags & LOAD) return load_together(w, i, op, at, exec, i.segment == 0);
    if (one) return access(w, i, exec, [&](int l, unsigned, bool, bool) -> Target { return {reinterpret_cast<uint8_t *>(at[l]), nullptr}; });
    access(w, i, exec, [&](int l, unsigned bytes, bool writes, bool) -> Target { return {w.launch->memory(at[l], bytes, writes, l), nullptr}; });
}

void run_buffer(Wave &w, const Instruction &i) {
    if (i.bytes == 0) return; // a cache is invalidated
    const MemoryOp &op = *memory_op(i.op);
    uint32_t exec = w.exec(), undefined = 0, words[4];
    for (int n = 0; n < 4; n++) words[n] = w.scalar(i.saddr + n, i), undefined |= w.scalar_undefined(i.saddr + n) ? ALL : 0;
    undefined |= w.scalar_undefined(i.src[0]) ? ALL : 0;
    uint64_t base = words[0] | uint64_t(words[1] & 0xffff) << 32, records = words[2];
    uint32_t stride = words[1] >> 16 & 0x3fff, select = words[3] >> 28 & 3, soffset = w.scalar(i.src[0], i);
    if (words[1] >> 30 || words[3] >> 23 & 1) fault("buffers that are swizzled or add the lane's number are not known");
    if (base >> 47) base |= 0xffffull << 48;
    const uint32_t *index = nullptr, *offset = nullptr;
    unsigned at = i.address;
    if (i.idxen) index = w.row(at), undefined |= w.lanes_undefined(at++);
    if (i.offen) offset = w.row(at), undefined |= w.lanes_undefined(at);
    w.require(undefined & exec, "a register", "an address");
    if (select != 3 && !(select == 2 || stride == 0)) fault("bounds of a buffer with stride %u, mode %u, are not known", stride, select);
    uint32_t inside = 0;
    uint64_t places[LANES];
    for (int l = 0; l < LANES; l++) {
        uint64_t from = uint64_t(index ? index[l] : 0) * stride + uint64_t(uint32_t(i.offset)) + (offset ? offset[l] : 0);
        places[l] = base + soffset + from;
        if (!(exec >> l & 1)) continue;
        // Mode 2 checks nothing but an empty buffer; raw and unstructured ones check bytes.
        bool whole = select == 2 ? records != 0 : from + soffset + op.bytes <= records, none = select == 2 ? !records : from + soffset >= records;
        if (!whole && !none)
            fault("lane %d accesses %u bytes at offset %llu of a buffer of %llu bytes: partly outside, which cards do in different ways", l, op.bytes,
                  (unsigned long long)(from + soffset), (unsigned long long)records);
        if (whole) inside |= 1u << l;
    }
    bool load = op.flags & LOAD;
    (load ? w.launch->stats.bytes_loaded : w.launch->stats.bytes_stored) += uint64_t(std::popcount(inside)) * op.bytes;
    if (load && inside == exec && exec && together(*w.launch, op, places, exec)) return load_together(w, i, op, places, exec, false);
    access(w, i, inside, [&](int l, unsigned bytes, bool writes, bool) -> Target { return {w.launch->memory(places[l], bytes, writes, l), nullptr}; });
    static const uint8_t zeros[16] = {};
    if (load || (op.flags & ATOMIC && i.glc)) {
        MemoryOp plain = op;
        plain.flags |= LOAD;
        for (int l = 0; l < LANES; l++)
            if ((exec & ~inside) >> l & 1) load_lane(w, i.dst, plain, {const_cast<uint8_t *>(zeros), nullptr}, l);
    }
}

} // namespace gfx
