// Instructions as llvm-objdump writes them, for messages and for the test of the decoder against it.
#include <cstdio>

#include "memory.h"

namespace gfx {
namespace {

std::string format(const char *f, long long a, long long b = 0) {
    char text[64];
    snprintf(text, sizeof text, f, a, b);
    return text;
}

std::string registers(char letter, int first, int words) {
    return words == 1 ? format(letter == 'v' ? "v%lld" : "s%lld", first) : format(letter == 'v' ? "v[%lld:%lld]" : "s[%lld:%lld]", first, first + words - 1);
}

std::string operand(const Instruction &i, uint16_t code, int words) {
    if (code >= VGPR) return registers('v', code - VGPR, words);
    if (code < VCC) return registers('s', code, words);
    if (code >= TTMP && code < NUL)
        return words == 1 ? format("ttmp%lld", code - TTMP) : format("ttmp[%lld:%lld]", code - TTMP, code - TTMP + words - 1);
    switch (code) {
    case VCC: return words >= 2 ? "vcc" : "vcc_lo";
    case VCC + 1: return "vcc_hi";
    case NUL: return "null";
    case M0: return "m0";
    case EXEC: return words >= 2 ? "exec" : "exec_lo";
    case EXEC + 1: return "exec_hi";
    case SHARED_BASE: return "src_shared_base";
    case SHARED_LIMIT: return "src_shared_limit";
    case PRIVATE_BASE: return "src_private_base";
    case PRIVATE_LIMIT: return "src_private_limit";
    case EXECZ: return "src_execz";
    case SCC: return "src_scc";
    case LITERAL: return format("0x%llx", i.literal);
    }
    if (code <= ZERO + 64) return format("%lld", code - ZERO);
    if (code < MINUS_ONE + 16) return format("%lld", int(MINUS_ONE) - 1 - code);
    static const char *values[] = {"0.5", "-0.5", "1.0", "-1.0", "2.0", "-2.0", "4.0", "-4.0", "0.15915494"};
    if (code >= HALF && code <= HALF + 8) return values[code - HALF];
    return format("?%lld", code);
}

int words_of(Kind k) { return bits_of(k) == 64 ? 2 : 1; }

void add(std::string &text, const std::string &what) { text += (text.find(' ') == text.npos ? " " : ", ") + what; }

std::string list(const char *name, unsigned bits, int count) {
    std::string text = std::string(" ") + name + ":[";
    for (int n = 0; n < count; n++) text += std::string(n ? "," : "") + (bits >> n & 1 ? "1" : "0");
    return text + "]";
}

std::string dpp(const Instruction &i) {
    if (!i.dpp) return "";
    if (i.dpp > 1) {
        std::string text = " dpp8:[";
        for (int n = 0; n < 8; n++) text += (n ? "," : "") + format("%lld", i.control >> 3 * n & 7);
        return text + "]" + (i.dpp == 3 ? " fi:1" : "");
    }
    unsigned control = i.control >> 8 & 0x1ff, n = control & 15;
    static const char *names[] = {"row_shl", "row_shr", "row_ror", "", "", "row_share", "row_xmask"};
    std::string text;
    if (control < 0x100) {
        text = " quad_perm:[";
        for (int k = 0; k < 4; k++) text += (k ? "," : "") + format("%lld", control >> 2 * k & 3);
        text += "]";
    } else if (control >> 4 == 0x14) text = n ? " row_half_mirror" : " row_mirror";
    else text = std::string(" ") + names[(control >> 4) - 0x10] + format(":%lld", n);
    text += format(" row_mask:0x%llx bank_mask:0x%llx", i.control >> 28, i.control >> 24 & 15);
    return text + (i.control >> 19 & 1 ? " bound_ctrl:1" : "") + (i.control >> 18 & 1 ? " fi:1" : "");
}

int matrix_words(const Instruction &i, int k) { // of a WMMA operand; 2: C and D
    unsigned op = i.op - PACKED;
    return k == 2 || op < 0x44 ? 8 : op == 0x44 ? 4 : 2;
}

std::string vector_text(const Instruction &i) {
    std::string text = i.name;
    const VectorOp &v = *i.v;
    bool packed = i.op >= PACKED, mix = i.op >= PACKED + 0x20 && i.op <= PACKED + 0x22, matrix = i.kind == Class::WMMA;
    bool scalar_result = i.op == 0x182 || i.op == 0x360, compares = v.d == Kind::MASK;
    if (v.d == Kind::NONE) return text;
    if (compares) {
        if (!(i.op & 0x80)) add(text, operand(i, i.sdst, 1));
    } else {
        bool upper = !i.e64 && bits_of(v.d) == 16 && i.opsel & 8;
        add(text, (scalar_result ? operand(i, i.dst, 1) : registers('v', i.dst, matrix ? 8 : words_of(v.d))) + (upper ? ".h" : ""));
    }
    if (v.flags & CARRY) add(text, operand(i, i.sdst, 1));
    int sources = 0;
    for (int k = 0; k < 3; k++) {
        if (i.src[k] == ABSENT || (v.flags & ACCUMULATES && k == 2)) continue;
        sources++;
        std::string s = operand(i, i.src[k], matrix ? matrix_words(i, k) : words_of(v.s[k]));
        if (!i.e64 && bits_of(v.s[k]) == 16 && i.opsel >> k & 1) s += ".h";
        if (mix || (!packed && has_sign(v.s[k]))) {
            if (i.abs >> k & 1) s = "|" + s + "|";
            if (i.neg >> k & 1) s = "-" + s;
        }
        add(text, s);
    }
    unsigned all = (1u << sources) - 1;
    if (packed) {
        if (i.opsel) text += list("op_sel", i.opsel, sources);
        if (mix ? i.opsel_hi != 0 : (i.opsel_hi & all) != all) text += list("op_sel_hi", i.opsel_hi, sources);
        if (!mix && i.neg) text += list("neg_lo", i.neg, sources);
        if (!mix && i.abs) text += list("neg_hi", i.abs, sources);
    } else if (i.e64 && i.opsel) {
        text += list("op_sel", (i.opsel & all) | (i.opsel >> 3 & 1) << sources, sources + (i.op == 0x25b || i.op == 0x25c ? -1 : 1));
    }
    if (i.clamp) text += " clamp";
    if (i.omod) text += i.omod == 1 ? " mul:2" : i.omod == 2 ? " mul:4" : " div:2";
    return text + dpp(i);
}

std::string dual_text(const Instruction &i) {
    std::string both;
    for (int half = 0; half < 2; half++) {
        const VectorOp &v = *(half ? i.v2 : i.v);
        const uint16_t *src = half ? i.src2 : i.src;
        std::string text = std::string("v_dual_") + (v.op == 0x12b ? "fmac_f32" : v.name + 2);
        add(text, registers('v', half ? i.dst2 : i.dst, 1));
        for (int k = 0; k < 3; k++)
            if (src[k] != ABSENT && !(k == 2 && (v.flags & ACCUMULATES || v.s[2] == Kind::MASK))) add(text, operand(i, src[k], 1));
        both += (half ? " :: " : "") + text;
    }
    return both;
}

std::string scalar_text(const Instruction &i) {
    std::string text = i.name;
    const ScalarOp &op = *i.scalar;
    if (op.form == Scalar::SOPP) return op.special && op.op != 0x30 && op.op != 0x3d && op.op != 0x0a ? text + format(" %lld", i.offset & 0xffff) : text;
    if (op.form == Scalar::SOPK) {
        add(text, operand(i, i.dst, words_of(op.d)));
        add(text, op.op == 0x14 ? format("%lld", i.offset & 0xffff) : format("0x%llx", i.offset & 0xffff));
        return text;
    }
    if (op.d != Kind::NONE) add(text, operand(i, i.dst, words_of(op.d)));
    if (op.form == Scalar::SOP1 && (op.op == 0x4c || op.op == 0x4d)) add(text, format("sendmsg(%lld)", i.src[0]));
    for (int k = 0; k < 2; k++)
        if (op.s[k] != Kind::NONE) add(text, operand(i, i.src[k], words_of(op.s[k])));
    return text;
}

std::string offset_text(const Instruction &i) { return i.offset ? format(" offset:%lld", i.offset) : ""; }

std::string memory_text(const Instruction &i, const MemoryOp &op) {
    bool buffer = i.run == run_buffer, load = op.flags & LOAD, compares = op.atomic == Atomic::CMPSWAP || op.atomic == Atomic::CMPSWAP_F;
    static const char *prefix[] = {"flat_", "scratch_", "global_"};
    std::string text = (buffer ? "buffer_" : prefix[i.segment]) + std::string(op.name);
    int words = (op.bytes + 3) / 4 * (compares ? 2 : 1);
    if (buffer) {
        add(text, registers('v', i.data, words));
        int address = i.offen + i.idxen;
        add(text, address ? registers('v', i.address, address) : "off");
        add(text, operand(i, i.saddr, 4));
        add(text, operand(i, i.src[0], 1));
        text += std::string(i.idxen ? " idxen" : "") + (i.offen ? " offen" : "");
        return text + offset_text(i) + (i.glc ? " glc" : "");
    }
    bool scalar = i.saddr != NUL;
    std::string place = i.segment == 1 ? (i.idxen ? registers('v', i.address, 1) : "off") : registers('v', i.address, i.segment == 2 && scalar ? 1 : 2);
    if (load || (op.flags & ATOMIC && i.glc)) add(text, registers('v', i.dst, (op.bytes + 3) / 4));
    if (!(op.flags & ADDTID)) add(text, place);
    if (!load) add(text, registers('v', i.data, words));
    if (i.segment) add(text, scalar ? operand(i, i.saddr, i.segment == 2 ? 2 : 1) : "off");
    return text + offset_text(i) + (i.glc ? " glc" : "");
}

std::string lds_text(const Instruction &i) {
    const MemoryOp &op = *lds_op(i.op);
    std::string text = op.name;
    int words = std::max(1, (op.bytes + 3) / 4), parts = op.flags & TWO ? 2 : 1;
    bool swizzle = i.op == 0x35, permutes = i.op == 0xb2 || i.op == 0xb3, load = op.flags & LOAD;
    bool compares = op.atomic == Atomic::CMPSWAP || op.atomic == Atomic::CMPSWAP_F || op.atomic == Atomic::MASKED_OR || op.atomic == Atomic::WRAP;
    if (i.op == 0x14) return text;
    if (load || op.flags & RETURNS) add(text, registers('v', i.dst, words * parts));
    if (!(op.flags & ADDTID)) add(text, registers('v', i.address, 1));
    if ((!load || permutes) && !swizzle) add(text, registers('v', i.data, words));
    if (!load && (parts == 2 || compares)) add(text, registers('v', i.data2, words));
    if (parts == 1) return text + offset_text(i);
    if (i.offset & 255) text += format(" offset0:%lld", i.offset & 255);
    return i.offset >> 8 ? text + format(" offset1:%lld", i.offset >> 8) : text;
}

std::string smem_text(const Instruction &i) {
    std::string text = i.name;
    if (!i.bytes) return text;
    add(text, operand(i, i.dst, i.bytes / 4));
    add(text, operand(i, i.address, i.op >= 8 ? 4 : 2));
    if (i.saddr == NUL) add(text, i.offset < 0 ? format("-0x%llx", -i.offset) : i.offset ? format("0x%llx", i.offset) : "null");
    else add(text, operand(i, i.saddr, 1) + (i.offset ? format(" offset:0x%llx", i.offset) : ""));
    return text + (i.glc ? " glc" : "");
}

} // namespace

std::string text_of(const Instruction &i) {
    if (i.v2) return dual_text(i);
    if (i.v) return vector_text(i);
    if (i.scalar) return scalar_text(i);
    if (i.run == run_smem) return smem_text(i);
    if (i.run == run_lds) return lds_text(i);
    return i.bytes ? memory_text(i, *memory_op(i.op)) : "buffer_" + std::string(i.name);
}

} // namespace gfx

extern "C" int gfx_text(const void *code, uint64_t code_bytes, uint64_t pc, char *text, size_t text_bytes) {
    try {
        gfx::Instruction i = gfx::decode(static_cast<const uint32_t *>(code), code_bytes / 4, pc);
        snprintf(text, text_bytes, "%s", gfx::text_of(i).c_str());
        return 4 * i.words;
    } catch (const gfx::Fault &f) {
        snprintf(text, text_bytes, "%s", f.what());
        return 0;
    }
}
