// A launch: registers as the hardware sets them, waves that take turns between barriers, and where a fault is.
#include <algorithm>
#include <cstdio>

#include "isa.h"

namespace gfx {

constexpr size_t PAGE = 1024; // words of code: a library's image has millions, of which a launch meets a few thousand

const Instruction &Launch::at(uint64_t pc) {
    uint64_t offset = pc - kernel->code_address;
    if (offset >= kernel->code_bytes || pc & 3) fault("the program counter left the code");
    auto &page = decoded[offset / 4 / PAGE];
    if (page.empty()) page.assign(PAGE, -1);
    int32_t &index = page[offset / 4 % PAGE];
    if (index < 0) {
        auto *code = reinterpret_cast<const uint32_t *>(static_cast<const uint8_t *>(kernel->code) + offset);
        instructions.push_back(std::make_unique<Instruction>(decode(code, (kernel->code_bytes - offset) / 4, pc)));
        index = int32_t(instructions.size()) - 1;
    }
    return *instructions[size_t(index)];
}

namespace {

constexpr uint64_t TURN = 1 << 16;         // instructions that a wave may run before others go on: some spin on what others write
constexpr uint64_t ENDLESS = 2'000'000'000; // instructions of one wave

template <class T> T field(const void *descriptor, size_t offset) {
    T value;
    std::memcpy(&value, static_cast<const uint8_t *>(descriptor) + offset, sizeof value);
    return value;
}

void count(gfx_stats &s, const Instruction &i, uint32_t exec) {
    s.instructions++;
    int lanes = std::popcount(exec);
    switch (i.kind) {
    case Class::SALU: s.salu++; break;
    case Class::VALU: s.valu++, s.valu_cycles += i.cycles, s.lane_operations += lanes; break;
    case Class::TRANS: s.valu++, s.trans++, s.valu_cycles += i.cycles, s.lane_operations += lanes; break;
    case Class::WMMA: s.valu++, s.wmma++, s.valu_cycles += i.cycles, s.lane_operations += lanes; break;
    case Class::VMEM_LOAD: s.vmem_load++, s.lane_operations += lanes; break;
    case Class::VMEM_STORE: s.vmem_store++, s.lane_operations += lanes; break;
    case Class::ATOMIC: s.atomics++, s.lane_operations += lanes; break;
    case Class::LDS: s.lds++, s.lane_operations += lanes; break;
    case Class::SMEM: s.smem++; break;
    case Class::BRANCH: s.branches++; break;
    case Class::OTHER: break;
    }
}

// Until a barrier, the end, or the end of its turn.
void go_on(Wave &w) {
    Launch &launch = *w.launch;
    for (uint64_t n = 0; n < TURN && w.state == Wave::RUNNING; n++) {
        uint64_t pc = w.pc;
        try {
            const Instruction &i = launch.at(pc);
            w.pc = pc + 4 * i.words;
            count(launch.stats, i, w.s[EXEC]);
            i.run(w, i);
        } catch (...) {
            w.pc = pc; // of the instruction at fault
            throw;
        }
    }
}

void start(Wave &w, Launch &launch, Group &group, unsigned number) {
    const void *d = launch.kernel->descriptor;
    const gfx_launch &l = *launch.launch;
    w.launch = &launch, w.group = &group, w.number = number, w.pc = launch.kernel->entry, w.state = Wave::RUNNING;
    w.scc = false, w.scc_undefined = true, w.flush32 = launch.flush32, w.flush16_64 = launch.flush16_64;
    std::fill_n(w.s, 128, 0xdeadbeef), std::fill_n(w.s_undefined, 128, ALL);
    for (unsigned r = 0; r < launch.vgprs; r++) std::fill_n(w.v[r], LANES, 0xdeadbeef);
    std::fill_n(w.low_undefined, 256, ALL), std::fill_n(w.high_undefined, 256, ALL);
    w.memory = w.local = {};
    std::fill_n(w.from_memory[0], 512, 0), std::fill_n(w.from_local[0], 512, 0), std::fill_n(w.to_scalar, 128, 0);
    w.scratch.assign(size_t(launch.scratch_bytes) * LANES, 0xcc), w.scratch_undefined.assign(w.scratch.size(), 1);

    uint32_t lanes = l.block[0] * l.block[1] * l.block[2], first = number * LANES;
    w.set(EXEC, lanes - first >= LANES ? ALL : (1u << (lanes - first)) - 1);
    unsigned r = 0;
    uint32_t rsrc2 = field<uint32_t>(d, 52), properties = field<uint16_t>(d, 56);
    auto user = [&](unsigned bit, std::initializer_list<uint32_t> words) {
        if (properties >> bit & 1) for (uint32_t v : words) w.set(r++, v);
    };
    uint64_t packet = uint64_t(launch.packet), arguments = uint64_t(l.kernarg);
    user(0, {0, 0, 0, 0});
    user(1, {uint32_t(packet), uint32_t(packet >> 32)});
    user(2, {0, 0});
    user(3, {uint32_t(arguments), uint32_t(arguments >> 32)});
    user(4, {0, 0});
    user(5, {0, 0});
    user(6, {launch.scratch_bytes});
    r = std::max(r, rsrc2 >> 1 & 31);
    for (int n = 0; n < 3; n++)
        if (rsrc2 >> (7 + n) & 1) w.set(r++, group.id[n]);
    if (rsrc2 >> 10 & 1) w.set(r++, 0);
    for (int lane = 0; lane < LANES; lane++) {
        uint32_t n = first + lane, x = n % l.block[0], y = n / l.block[0] % l.block[1], z = n / l.block[0] / l.block[1];
        w.v[0][lane] = x | y << 10 | z << 20;
    }
    w.define(0, ALL);
    launch.stats.waves++;
}

// An order of `count` things that differs from seed to seed.
std::vector<uint32_t> order(uint64_t count, uint32_t seed) {
    std::vector<uint32_t> all(count);
    for (uint64_t n = 0; n < count; n++) all[n] = uint32_t(n);
    uint64_t state = seed;
    if (seed)
        for (uint64_t n = count; n > 1; n--) {
            state = state * 6364136223846793005ull + 1442695040888963407ull;
            std::swap(all[n - 1], all[(state >> 33) % n]);
        }
    return all;
}

void run_group(Launch &launch, Group &group, std::vector<std::unique_ptr<Wave>> &waves, Wave *&current) {
    std::vector<uint32_t> turns = order(waves.size(), launch.launch->seed ? launch.launch->seed + group.id[0] : 0);
    for (unsigned n = 0; n < waves.size(); n++) start(*waves[n], launch, group, n);
    for (uint64_t round = 0;; round++) {
        size_t ended = 0, waiting = 0;
        for (uint32_t n : turns) {
            current = waves[n].get();
            if (current->state == Wave::RUNNING) go_on(*current);
            ended += current->state == Wave::ENDED, waiting += current->state == Wave::WAITING;
        }
        if (round * TURN > ENDLESS) fault("no end after %llu instructions of a wave", (unsigned long long)ENDLESS);
        if (ended == waves.size()) return;
        if (ended + waiting < waves.size()) continue;
        for (auto &w : waves) // an ended wave counts as arrived
            if (w->state == Wave::WAITING) w->state = Wave::RUNNING;
        group.epoch++;
    }
}

// "name +0x1234 (file:12)"
std::string source_line(const gfx_kernel &k, uint64_t offset) {
    const char *best = nullptr;
    for (const char *p = k.lines; p && *p;) {
        char *after;
        uint64_t at = std::strtoull(p, &after, 16);
        if (at > offset) break;
        best = *after == ' ' ? after + 1 : after;
        p = std::strchr(p, '\n');
        if (p) p++;
    }
    if (!best) return "";
    const char *end = std::strchr(best, '\n');
    return " (" + (end ? std::string(best, end) : std::string(best)) + ")";
}

void prepare(Launch &launch) {
    const gfx_kernel &k = *launch.kernel;
    const gfx_launch &l = *launch.launch;
    uint32_t rsrc1 = field<uint32_t>(k.descriptor, 48), properties = field<uint16_t>(k.descriptor, 56);
    uint64_t lanes = uint64_t(l.block[0]) * l.block[1] * l.block[2];
    if (!(properties >> 10 & 1)) fault("it is compiled for waves of 64 lanes; only 32 are known");
    if (lanes == 0 || lanes > 1024) fault("a workgroup of %llu lanes", (unsigned long long)lanes);
    if (field<uint32_t>(k.descriptor, 8) > l.kernarg_bytes)
        fault("it takes %u bytes of arguments, and the launch gives %llu", field<uint32_t>(k.descriptor, 8), (unsigned long long)l.kernarg_bytes);
    if (rsrc1 >> 12 & 15) fault("rounding mode %u: only to nearest even is known", rsrc1 >> 12 & 15);
    for (int at : {16, 18})
        if (uint32_t keep = rsrc1 >> at & 3; keep == 1 || keep == 2) fault("denormals kept on one side only are not known");
    launch.flush32 = !(rsrc1 >> 16 & 3), launch.flush16_64 = !(rsrc1 >> 18 & 3);
    launch.dx10_clamp = rsrc1 >> 21 & 1, launch.ieee = rsrc1 >> 23 & 1;
    launch.vgprs = std::min(256u, ((rsrc1 & 63) + 1) * 8);
    launch.lds_bytes = field<uint32_t>(k.descriptor, 0) + l.dynamic_lds;
    launch.scratch_bytes = field<uint32_t>(k.descriptor, 4);
    if (launch.lds_bytes > 65536) fault("%u bytes of LDS; a workgroup can have 65536", launch.lds_bytes);
    launch.check_undefined = l.checks & GFX_CHECK_UNINITIALISED, launch.check_races = l.checks & GFX_CHECK_RACES;
    launch.decoded.resize(k.code_bytes / 4 / PAGE + 1);
    // The dispatch packet, as HSA defines it.
    auto put = [&](size_t at, auto value) { std::memcpy(launch.packet + at, &value, sizeof value); };
    put(2, uint16_t(3));
    for (int n = 0; n < 3; n++) put(4 + 2 * n, uint16_t(l.block[n])), put(12 + 4 * n, uint32_t(l.grid[n] * l.block[n]));
    put(24, launch.scratch_bytes), put(28, launch.lds_bytes), put(40, uint64_t(l.kernarg));
    launch.stats.sgprs = 128, launch.stats.vgprs = launch.vgprs, launch.stats.lds_bytes = launch.lds_bytes;
}

} // namespace
} // namespace gfx

extern "C" int gfx_run(const gfx_kernel *kernel, const gfx_launch *launch, gfx_lookup lookup, gfx_stats *stats, char *error, size_t error_bytes) {
    using namespace gfx;
    auto state = std::make_unique<Launch>();
    state->kernel = kernel, state->launch = launch, state->lookup = lookup;
    Wave *current = nullptr;
    std::vector<std::unique_ptr<Wave>> waves;
    Group group{state.get(), {}, 1, {}, {}, {}};
    try {
        prepare(*state);
        unsigned count = (launch->block[0] * launch->block[1] * launch->block[2] + LANES - 1) / LANES;
        for (unsigned n = 0; n < count; n++) waves.push_back(std::make_unique<Wave>());
        uint64_t groups = uint64_t(launch->grid[0]) * launch->grid[1] * launch->grid[2];
        for (uint64_t n : order(groups, launch->seed)) {
            group.id[0] = uint32_t(n % launch->grid[0]), group.id[1] = uint32_t(n / launch->grid[0] % launch->grid[1]);
            group.id[2] = uint32_t(n / launch->grid[0] / launch->grid[1]), group.epoch = 1;
            group.lds.assign(state->lds_bytes, 0xcc), group.lds_undefined.assign(state->lds_bytes, 1);
            group.touched.assign(state->check_races ? state->lds_bytes : 0, {});
            run_group(*state, group, waves, current);
        }
    } catch (const Fault &f) {
        char place[300] = "";
        std::string text;
        if (current && current->group) {
            uint64_t offset = current->pc - kernel->code_address;
            try {
                text = " " + text_of(state->at(current->pc));
            } catch (const Fault &) { // the instruction is unknown, which the message says
            }
            snprintf(place, sizeof place, "at 0x%llx%s, workgroup %u,%u,%u wave %u: ", (unsigned long long)offset,
                     source_line(*kernel, offset).c_str(), current->group->id[0], current->group->id[1], current->group->id[2], current->number);
        }
        snprintf(error, error_bytes, "kernel %s %s%s%s%s", kernel->name, place, f.what(), text.empty() ? "" : "; instruction:", text.c_str());
        return 1;
    }
    if (stats) *stats = state->stats;
    return 0;
}
