// From words of code to instructions, by encoding; what is not known is an error with its words.
#include <cstdarg>

#include "memory.h"

namespace gfx {

void fault(const char *format, ...) {
    char text[600];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    throw Fault(text);
}

namespace {

struct Decoder {
    const uint32_t *code;
    size_t available;
    Instruction i;

    uint32_t word(size_t n) const {
        if (n >= available) fault("the code ends within an instruction");
        return code[n];
    }
    uint32_t bits(unsigned high, unsigned low) const { // of the first two words
        uint64_t all = low < 32 && high < 32 ? word(0) : word(0) | uint64_t(word(1)) << 32;
        return uint32_t(all >> low & ((1ull << (high - low + 1)) - 1));
    }
    [[noreturn]] void unknown(const char *encoding, unsigned op) const {
        fault("unknown instruction: %s operation 0x%x (words 0x%08x 0x%08x)", encoding, op, word(0), available > 1 ? code[1] : 0);
    }
    void take_literal(bool wanted) {
        if (wanted) i.literal = word(i.words++);
    }

    void scalar(Scalar form, unsigned op, int sources, const char *encoding) {
        i.op = uint16_t(op), i.scalar = scalar_op(form, op);
        if (!i.scalar) unknown(encoding, op);
        i.name = i.scalar->name, i.run = i.scalar->special ? i.scalar->special : run_scalar, i.kind = Class::SALU;
        if (form == Scalar::SOPK) {
            i.offset = int16_t(bits(15, 0)), i.dst = uint16_t(bits(22, 16)), i.src[0] = i.dst;
            i.src[1] = LITERAL, i.literal = uint32_t(i.offset); // the generic operations take it as their second source
            if (op == 0x13) i.literal = word(i.words++);
            if (op == 0x14) i.kind = Class::BRANCH;
            return;
        }
        if (form == Scalar::SOPP) {
            i.offset = int16_t(bits(15, 0));
            i.kind = op >= 0x20 && op < 0x30 ? Class::BRANCH : Class::OTHER;
            return;
        }
        if (form != Scalar::SOPC) i.dst = uint16_t(bits(22, 16));
        i.src[0] = uint16_t(bits(7, 0));
        if (sources == 2) i.src[1] = uint16_t(bits(15, 8));
        if (form == Scalar::SOP1 && op == 0x48) i.dst = ABSENT;
        if (form == Scalar::SOP1 && op >= 0x47 && op <= 0x49) i.kind = Class::BRANCH;
        take_literal(i.src[0] == LITERAL || i.src[1] == LITERAL);
    }

    void vector_table(unsigned op, const char *encoding) {
        i.op = uint16_t(op), i.v = vector_op(op);
        if (!i.v) unknown(encoding, op);
        i.name = i.v->name, i.run = i.v->special ? i.v->special : run_vector;
        i.kind = i.v->flags & TRANS ? Class::TRANS : op >= PACKED + 0x40 && op < PACKED + 0x80 ? Class::WMMA : Class::VALU;
    }

    // The first source may stand for a word with DPP16 or DPP8 controls, or a literal.
    void first_source() {
        if (i.src[0] == 250) {
            i.dpp = 1, i.control = word(i.words++), i.src[0] = uint16_t(VGPR + (i.control & 255));
            unsigned control = i.control >> 8 & 0x1ff, kind = control >> 4;
            bool shifts = kind >= 0x10 && kind <= 0x12 && control & 15;
            if (control >= 0x100 && !shifts && control != 0x140 && control != 0x141 && kind != 0x15 && kind != 0x16) fault("unknown instruction: dpp_ctrl 0x%x", control);
            if (!i.e64) i.neg = uint8_t((i.control >> 20 & 1) | (i.control >> 22 & 1) << 1), i.abs = uint8_t((i.control >> 21 & 1) | (i.control >> 23 & 1) << 1);
        } else if (i.src[0] == 233 || i.src[0] == 234) {
            i.dpp = i.src[0] == 233 ? 2 : 3, i.control = word(i.words++), i.src[0] = uint16_t(VGPR + (i.control & 255)), i.control >>= 8;
        } else take_literal(i.src[0] == LITERAL || i.src[1] == LITERAL || i.src[2] == LITERAL);
    }

    // In 32-bit encodings, bit 7 of a vector register's number means the upper half for 16-bit operands.
    void halves() {
        for (int k = 0; k < 3; k++)
            if (bits_of(i.v->s[k]) == 16 && i.src[k] != ABSENT && i.src[k] >= VGPR + 128) i.src[k] -= 128, i.opsel |= 1 << k;
        if (bits_of(i.v->d) == 16 && i.v->d != Kind::NONE && i.dst >= 128) i.dst -= 128, i.opsel |= 8;
    }

    void vop1() {
        vector_table(0x180 + bits(16, 9), "VOP1");
        i.dst = uint16_t(bits(24, 17)), i.src[0] = uint16_t(bits(8, 0));
        if (i.v->s[0] == Kind::NONE && !i.v->special) unknown("VOP1", i.op);
        first_source();
        halves();
    }
    void vopc() {
        vector_table(bits(24, 17), "VOPC");
        i.src[0] = uint16_t(bits(8, 0)), i.src[1] = uint16_t(VGPR + bits(16, 9)), i.sdst = i.op & 0x80 ? EXEC : VCC;
        first_source();
        halves();
    }
    void vop2() {
        vector_table(0x100 + bits(30, 25), "VOP2");
        i.dst = uint16_t(bits(24, 17)), i.src[0] = uint16_t(bits(8, 0)), i.src[1] = uint16_t(VGPR + bits(16, 9));
        unsigned op = i.op - 0x100;
        first_source();
        if (op == 0x2c || op == 0x37) i.src[2] = i.src[1], i.src[1] = LITERAL; // fmamk: a * K + c
        if (op == 0x2d || op == 0x38) i.src[2] = LITERAL;
        if ((op == 0x2c || op == 0x37 || op == 0x2d || op == 0x38) && i.words == 1) i.literal = word(i.words++);
        if (i.v->s[2] == Kind::MASK) i.src[2] = VCC;
        if (i.v->flags & CARRY) i.sdst = VCC;
        halves();
        if (i.v->flags & ACCUMULATES) i.src[2] = uint16_t(VGPR + i.dst), i.opsel |= i.opsel & 8 ? 4 : 0;
    }
    void vop3() {
        i.words = 2, i.e64 = true;
        unsigned op = bits(25, 16);
        vector_table(op, "VOP3");
        for (int k = 0; k < 3; k++) i.src[k] = uint16_t(bits(40 + 9 * k, 32 + 9 * k));
        i.neg = uint8_t(bits(63, 61)), i.omod = uint8_t(bits(60, 59)), i.clamp = bits(15, 15);
        bool writes_mask = i.v->flags & CARRY, compares = i.v->d == Kind::MASK;
        if (writes_mask) i.sdst = uint16_t(bits(14, 8));
        else i.abs = uint8_t(bits(10, 8)), i.opsel = uint8_t(bits(14, 11));
        (compares ? i.sdst : i.dst) = uint16_t(bits(7, 0));
        for (int k = 0; k < 3; k++)
            if (i.v->s[k] == Kind::NONE && !(i.v->flags & SPECIAL)) i.src[k] = ABSENT;
        if (i.v->flags & SPECIAL)
            for (int k = 0; k < 3; k++) if (i.v->s[k] == Kind::NONE) i.src[k] = ABSENT;
        first_source();
        if (i.v->flags & ACCUMULATES) i.src[2] = uint16_t(VGPR + i.dst), i.opsel |= i.opsel & 8 ? 4 : 0;
        if (i.clamp && !is_float(i.v->d) && !(i.v->flags & SATURATES) && !compares) unknown("VOP3 with clamp, ", op);
    }
    void vop3p() {
        i.words = 2, i.e64 = true;
        vector_table(PACKED + bits(22, 16), "VOP3P");
        for (int k = 0; k < 3; k++) i.src[k] = i.v->s[k] == Kind::NONE ? uint16_t(ABSENT) : uint16_t(bits(40 + 9 * k, 32 + 9 * k));
        i.dst = uint16_t(bits(7, 0)), i.neg = uint8_t(bits(63, 61)), i.abs = uint8_t(bits(10, 8)), i.clamp = bits(15, 15);
        i.opsel = uint8_t(bits(13, 11)), i.opsel_hi = uint8_t(bits(60, 59) | bits(14, 14) << 2);
        first_source();
    }
    void vopd() {
        static const uint16_t OPS[] = {0x12b, 0x12d, 0x12c, 0x108, 0x103, 0x104, 0x105, 0x107, 0x181,
                                       0x101, 0x110, 0x10f, 0x102, 0x3fe, 0,     0,     0x125, 0x118, 0x11b};
        i.words = 2;
        unsigned ops[2] = {bits(25, 22), bits(21, 17)};
        bool literal = false;
        for (int half = 0; half < 2; half++) {
            unsigned op = ops[half];
            if (op >= std::size(OPS) || !OPS[op] || (half == 0 && op > 13)) unknown("VOPD", op);
            const VectorOp *v = vector_op(OPS[op]);
            uint16_t *src = half ? i.src2 : i.src;
            src[0] = uint16_t(half ? bits(40, 32) : bits(8, 0));
            src[1] = uint16_t(VGPR + (half ? bits(48, 41) : bits(16, 9)));
            if (op == 8) src[1] = ABSENT;
            (half ? i.v2 : i.v) = v;
            if (!half) i.dst = uint16_t(bits(63, 56));
            else i.dst2 = uint16_t(bits(55, 49) << 1 | (~i.dst & 1)); // of the other parity
            if (v->flags & ACCUMULATES) src[2] = uint16_t(VGPR + (half ? i.dst2 : i.dst));
            if (v->s[2] == Kind::MASK) src[2] = VCC;
            if (op == 1) src[2] = LITERAL;
            if (op == 2) src[2] = src[1], src[1] = LITERAL;
            literal |= src[0] == LITERAL || op == 1 || op == 2;
        }
        take_literal(literal);
        i.name = "v_dual", i.run = run_dual, i.kind = Class::VALU;
    }
    void smem() {
        i.words = 2, i.op = uint16_t(bits(25, 18)), i.run = run_smem, i.kind = Class::SMEM;
        static const char *names[] = {"s_load_b32", "s_load_b64", "s_load_b128", "s_load_b256", "s_load_b512"};
        static const char *buffers[] = {"s_buffer_load_b32", "s_buffer_load_b64", "s_buffer_load_b128", "s_buffer_load_b256", "s_buffer_load_b512"};
        if (i.op < 5) i.name = names[i.op], i.bytes = uint8_t(4 << i.op);
        else if (i.op >= 8 && i.op < 13) i.name = buffers[i.op - 8], i.bytes = uint8_t(4 << (i.op - 8));
        else if (i.op == 0x20 || i.op == 0x21) i.name = i.op == 0x20 ? "s_gl1_inv" : "s_dcache_inv";
        else unknown("SMEM", i.op);
        i.address = uint16_t(bits(5, 0) << 1), i.dst = uint16_t(bits(12, 6)), i.glc = bits(14, 14);
        i.offset = int32_t(bits(52, 32) << 11) >> 11, i.saddr = uint16_t(bits(63, 57));
    }
    void ds() {
        i.words = 2, i.op = uint16_t(bits(25, 18)), i.run = run_lds, i.kind = Class::LDS;
        const MemoryOp *op = lds_op(i.op);
        if (!op || bits(17, 17)) unknown("DS", i.op);
        i.name = op->name, i.bytes = op->bytes, i.offset = int32_t(bits(15, 0));
        i.address = uint16_t(bits(39, 32)), i.data = uint16_t(bits(47, 40)), i.data2 = uint16_t(bits(55, 48)), i.dst = uint16_t(bits(63, 56));
    }
    void classify(const MemoryOp &op) {
        i.kind = op.flags & ATOMIC ? Class::ATOMIC : op.flags & LOAD ? Class::VMEM_LOAD : Class::VMEM_STORE;
        i.name = op.name, i.bytes = op.bytes, i.glc = bits(14, 14);
    }
    void flat() {
        i.words = 2, i.op = uint16_t(bits(24, 18)), i.run = run_memory, i.segment = uint8_t(bits(17, 16));
        const MemoryOp *op = memory_op(i.op);
        if (!op || i.segment == 3 || (op->flags & ADDTID && i.segment != 2) || (op->flags & ATOMIC && i.segment == 1)) unknown("FLAT", i.op);
        classify(*op);
        i.offset = i.segment ? int32_t(bits(12, 0) << 19) >> 19 : int32_t(bits(12, 0)); // signed but for flat
        i.address = uint16_t(bits(39, 32)), i.data = uint16_t(bits(47, 40)), i.saddr = uint16_t(bits(54, 48)), i.idxen = bits(55, 55);
        i.dst = uint16_t(bits(63, 56));
    }
    void mubuf() {
        i.words = 2, i.op = uint16_t(bits(25, 18)), i.run = run_buffer;
        if (i.op == 0x2b || i.op == 0x2c) {
            i.name = i.op == 0x2b ? "gl0_inv" : "gl1_inv";
            return;
        }
        const MemoryOp *op = memory_op(i.op);
        if (!op || op->flags & ADDTID || bits(53, 53)) unknown("MUBUF", i.op);
        classify(*op);
        i.offset = int32_t(bits(11, 0)), i.address = uint16_t(bits(39, 32)), i.data = i.dst = uint16_t(bits(47, 40));
        i.saddr = uint16_t(bits(52, 48) * 4), i.offen = bits(54, 54), i.idxen = bits(55, 55), i.src[0] = uint16_t(bits(63, 56));
    }

    // Signs of packed operands outside VOP3P: what they mean is not documented.
    void check_modifiers() const {
        bool packs = i.v && (i.op == 0x102 || i.op == 0x13c || i.op == 0x266 || i.op == 0x267);
        if (packs && (i.neg || i.abs)) fault("unknown instruction: %s with signs changed", i.name);
    }

    // Codes that mean nothing as a source.
    void check_sources() const {
        for (const uint16_t *codes : {i.src, i.src2})
            for (int k = 0; k < 3; k++) {
                uint16_t c = codes[k];
                bool known = c < 209 || (c >= SHARED_BASE && c <= PRIVATE_LIMIT) || (c >= HALF && c <= HALF + 8) || c == EXECZ || c == SCC || c == LITERAL;
                if (!known && (c < VGPR || c >= VGPR + 256) && c != ABSENT) fault("unknown instruction: operand code %u (words 0x%08x)", c, code[0]);
            }
    }

    void decode() {
        uint32_t w = word(0);
        unsigned top = w >> 26;
        if (!(w >> 31)) {
            if (w >> 25 == 0x3f) return vop1();
            return w >> 25 == 0x3e ? vopc() : vop2();
        }
        if (w >> 30 == 2) {
            if (w >> 23 == 0x17d) return scalar(Scalar::SOP1, bits(15, 8), 1, "SOP1");
            if (w >> 23 == 0x17e) return scalar(Scalar::SOPC, bits(22, 16), 2, "SOPC");
            if (w >> 23 == 0x17f) return scalar(Scalar::SOPP, bits(22, 16), 0, "SOPP");
            if (w >> 28 == 0xb) return scalar(Scalar::SOPK, bits(27, 23), 0, "SOPK");
            return scalar(Scalar::SOP2, bits(29, 23), 2, "SOP2");
        }
        if (w >> 24 == 0xcc) return vop3p();
        switch (top) {
        case 0x32: return vopd();
        case 0x35: return vop3();
        case 0x36: return ds();
        case 0x37: return flat();
        case 0x38: return mubuf();
        case 0x3d: return smem();
        }
        fault("unknown instruction: encoding 0x%02x (words 0x%08x 0x%08x)", top, w, available > 1 ? code[1] : 0);
    }
};

} // namespace

// Cycles for which a vector instruction occupies its unit, as Mesa's compiler for these cards estimates them: products of 32
// bits have a quarter of the rate, operations on 64 bits a half, and those of double precision a sixteenth.
uint8_t cycles(const Instruction &i) {
    if (i.kind == Class::TRANS) return 4;
    if (i.kind == Class::WMMA) return 32;
    if (i.kind != Class::VALU || !i.v) return 1;
    if ((i.v->op >= 0x32c && i.v->op <= 0x32e) || i.v->op == 0x2fe || i.v->op == 0x2ff) return 4; // v_mul_lo, v_mul_hi, v_mad of 64 bits
    bool doubles = i.v->d == Kind::F64 || i.v->s[0] == Kind::F64, wide = bits_of(i.v->d) == 64 || (i.v->s[1] != Kind::NONE && bits_of(i.v->s[1]) == 64);
    return doubles ? 16 : wide ? 2 : 1;
}

Instruction decode(const uint32_t *code, size_t available, uint64_t pc) {
    Decoder d{code, available, {}};
    d.i.pc = pc;
    d.decode();
    d.check_sources();
    d.check_modifiers();
    d.i.cycles = cycles(d.i);
    return d.i;
}

} // namespace gfx
