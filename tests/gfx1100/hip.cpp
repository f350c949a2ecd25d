// The HIP runtime's stand-in: libamdhip64 for a simulated card, whose kernels the interpreter of gfx1100 code executes.
//
// It has what Triton's driver asks for, what bitsandbytes' ROCm library imports, and what AMD's rocBLAS and hipBLASLt do.
// Kernels are queued on the streams of the simulated card; the memory that was live when they were queued, and nothing
// else, is theirs to touch. Where AMD's libraries are not loaded, the int8 products of bitsandbytes are on the CPU.
#define __HIP_PLATFORM_AMD__
#include "blas.h"
#include "gfx1100.h"

#include <hip/hip_runtime_api.h>
#include <hip/library_types.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

extern "C" { // of the simulated card
void sim_push(void *stream, void (*run)(void *), void *context);
int sim_stream_device(void *stream); // of the current one for none
int sim_live(int device, uint64_t (*rows)[3], int room);
int sim_device_count();
int sim_current_device();
void sim_use_device(int device);
void sim_wait(void *stream, int device); // for a stream, or for all of a device
}

namespace {
enum Kind : uint32_t { EXPLICIT, BLOCK_COUNT, GROUP_SIZE, REMAINDER, GLOBAL_OFFSET, GRID_DIMS, DYNAMIC_LDS, ABSENT };
struct Argument {
    uint32_t offset, size, kind, axis;
};
struct Function {
    gfx_kernel kernel;
    const Argument *arguments;
    uint32_t count, most_lanes, lds, vgprs, scratch;
};
struct Module {
    const void *image = nullptr;
    std::once_flag loaded;
    std::map<std::string, Function *> functions;
};
using Loader = void (*)(uint64_t image, void *module);
Loader loader = nullptr;
int log_file = -1;
uint32_t checks = 0, seed = 1;
bool dry = false; // launches are told, not executed

thread_local hipError_t last_error = hipSuccess;
hipError_t said(hipError_t error) {
    if (error != hipSuccess) last_error = error;
    return error;
}

std::mutex registered_lock;
std::map<const void *, std::pair<Module *, std::string>> &registered() {
    static auto *all = new std::map<const void *, std::pair<Module *, std::string>>;
    return *all;
}
Function *function_of(Module *module, const std::string &name) {
    std::call_once(module->loaded, [&] { loader(uint64_t(module->image), module); });
    auto found = module->functions.find(name);
    return found == module->functions.end() ? nullptr : found->second;
}

// ---- memory ------------------------------------------------------------------------------------------------------
struct Span {
    uint64_t base, bytes;
    uint32_t flags;
};
// What was allocated here: pages that move between host and card, and what libraries have of a card's memory.
std::mutex allocated_lock;
std::map<uint64_t, std::pair<Span, int>> &allocated() { // by address; the device, -1 for any
    static auto *all = new std::map<uint64_t, std::pair<Span, int>>;
    return *all;
}
hipError_t allocate(void **out, size_t bytes, int device) {
    *out = nullptr;
    if (!bytes) return hipSuccess;
    void *memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (!memory) return said(hipErrorOutOfMemory);
    std::lock_guard<std::mutex> guard(allocated_lock);
    allocated()[uint64_t(memory)] = {{uint64_t(memory), bytes, 3}, device};
    *out = memory;
    return hipSuccess;
}
hipError_t release(void *memory) { // its users have ended
    if (!memory) return hipSuccess;
    std::lock_guard<std::mutex> guard(allocated_lock);
    if (!allocated().erase(uint64_t(memory))) return said(hipErrorInvalidValue);
    std::free(memory);
    return hipSuccess;
}
std::vector<Span> live(int device) {
    std::vector<std::array<uint64_t, 3>> rows;
    int room = 512, found = 512;
    while (found >= room) {
        rows.resize(size_t(room *= 2));
        found = sim_live(device, reinterpret_cast<uint64_t(*)[3]>(rows.data()), room);
    }
    rows.resize(size_t(found));
    std::vector<Span> spans;
    for (auto &row : rows) {
        spans.push_back({row[0], row[1], 3});
        if (row[2] > row[1]) spans.push_back({row[0] + row[1], row[2] - row[1], 1}); // the granule's rest may be read, unused
    }
    std::lock_guard<std::mutex> guard(allocated_lock);
    for (auto &[_, each] : allocated())
        if (each.second < 0 || each.second == device) spans.push_back(each.first);
    std::sort(spans.begin(), spans.end(), [](const Span &a, const Span &b) { return a.base < b.base; });
    return spans;
}
const Span *holder(const std::vector<Span> &spans, uint64_t address) {
    auto after = std::upper_bound(spans.begin(), spans.end(), address, [](uint64_t a, const Span &s) { return a < s.base; });
    if (after == spans.begin()) return nullptr;
    --after;
    return address - after->base < after->bytes ? &*after : nullptr;
}

// ---- launches ----------------------------------------------------------------------------------------------------
struct Launch {
    const Function *function;
    gfx_launch how;
    std::vector<char> kernarg;
    std::vector<Span> spans;
};
thread_local const Launch *running = nullptr;
int lookup(uint64_t address, uint64_t *base, uint64_t *bytes, uint32_t *flags) {
    const gfx_kernel &kernel = running->function->kernel;
    const Span *span = holder(running->spans, address);
    const Span code{kernel.code_address, kernel.code_bytes, 1};
    if (!span && address - code.base < code.bytes) span = &code;
    if (!span) return 0;
    *base = span->base;
    *bytes = span->bytes;
    *flags = span->flags;
    return 1;
}
void write_log(const Launch &launch, const gfx_stats &s, double seconds) {
    char line[2000];
    const auto &how = launch.how;
    const unsigned long long counts[] = {s.instructions, s.salu, s.valu, s.vmem_load, s.vmem_store, s.atomics, s.lds, s.smem, s.wmma,
                                         s.trans, s.branches, s.waves, s.bytes_loaded, s.bytes_stored, s.lds_conflict_cycles,
                                         s.lane_operations, s.valu_cycles, s.sgprs, s.vgprs, s.lds_bytes};
    int n = snprintf(line, sizeof line, "%d\t%.1000s\t%u,%u,%u\t%u,%u,%u\t%u\t%.6f", getpid(), launch.function->kernel.name, how.grid[0],
                     how.grid[1], how.grid[2], how.block[0], how.block[1], how.block[2], how.dynamic_lds, seconds);
    for (auto count : counts) n += snprintf(line + n, sizeof line - size_t(n), "\t%llu", count);
    line[n++] = '\n';
    if (write(log_file, line, size_t(n)) != n) throw std::runtime_error("the log of kernels cannot be written");
}
void run(void *context) {
    std::unique_ptr<Launch> launch(static_cast<Launch *>(context));
    char error[2000] = "";
    gfx_stats stats{};
    const auto begin = std::chrono::steady_clock::now();
    running = launch.get();
    const int failed = dry ? 0 : gfx_run(&launch->function->kernel, &launch->how, &lookup, &stats, error, sizeof error);
    running = nullptr;
    if (failed) throw std::runtime_error(error);
    if (log_file >= 0) write_log(*launch, stats, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
}
// Arguments come one by one in `given`, or packed by the caller in `extra`; the hidden ones are filled in here either way.
hipError_t queue(const Function *function, dim3 grid, dim3 block, void **given, void **extra, size_t dynamic_lds, hipStream_t stream) {
    const uint64_t lanes = uint64_t(block.x) * block.y * block.z;
    if (!grid.x || !grid.y || !grid.z || !lanes || lanes > function->most_lanes) return said(hipErrorInvalidConfiguration);
    if (dynamic_lds + function->lds > 1 << 16) return said(hipErrorInvalidValue);
    auto launch = std::make_unique<Launch>();
    launch->function = function;
    launch->kernarg.resize(function->kernel.kernarg_bytes);
    if (extra) {
        const void *packed = nullptr;
        size_t bytes = 0;
        for (void **each = extra; *each != HIP_LAUNCH_PARAM_END; each += 2) {
            if (*each == HIP_LAUNCH_PARAM_BUFFER_POINTER) packed = each[1];
            if (*each == HIP_LAUNCH_PARAM_BUFFER_SIZE) bytes = *static_cast<size_t *>(each[1]);
        }
        if (!packed) return said(hipErrorInvalidValue);
        std::memcpy(launch->kernarg.data(), packed, std::min(bytes, launch->kernarg.size()));
    }
    const uint32_t groups[] = {grid.x, grid.y, grid.z}, sizes[] = {block.x, block.y, block.z};
    for (uint32_t i = 0, next = 0; i < function->count; ++i) {
        const Argument &argument = function->arguments[i];
        uint64_t value = 0; // of a remainder or an offset: launches have whole workgroups only
        if (argument.kind == BLOCK_COUNT) value = groups[argument.axis];
        if (argument.kind == GROUP_SIZE) value = sizes[argument.axis];
        if (argument.kind == GRID_DIMS) value = grid.z > 1 ? 3 : grid.y > 1 ? 2 : 1;
        if (argument.kind == DYNAMIC_LDS) value = dynamic_lds;
        char *place = launch->kernarg.data() + argument.offset;
        if (argument.kind != EXPLICIT) std::memcpy(place, &value, std::min<size_t>(argument.size, sizeof value));
        else if (!extra) std::memcpy(place, given[next++], argument.size);
    }
    gfx_launch &how = launch->how;
    how = {};
    std::memcpy(how.grid, groups, sizeof groups);
    std::memcpy(how.block, sizes, sizeof sizes);
    how.kernarg = launch->kernarg.data();
    how.kernarg_bytes = launch->kernarg.size();
    how.dynamic_lds = uint32_t(dynamic_lds);
    how.seed = seed;
    how.checks = checks;
    launch->spans = live(sim_stream_device(stream));
    sim_push(stream, &run, launch.release());
    return hipSuccess;
}

// ---- products on the CPU, for hipBLAS: int8 by int8 to int32, by columns ---------------------------------------------
struct Layout {
    int type;
    uint64_t rows, columns;
    int64_t leading;
};
struct Product {
    bool across_a, across_b;
    int64_t m, n, k, lda, ldb, ldc, stride_a, stride_b, stride_c, batches;
    const int8_t *a, *b;
    int32_t *c;
};
void multiply(void *context) {
    std::unique_ptr<Product> p(static_cast<Product *>(context));
    for (int64_t batch = 0; batch < p->batches; ++batch) {
        const int8_t *a = p->a + batch * p->stride_a, *b = p->b + batch * p->stride_b;
        int32_t *c = p->c + batch * p->stride_c;
        for (int64_t j = 0; j < p->n; ++j)
            for (int64_t i = 0; i < p->m; ++i) {
                int32_t sum = 0;
                for (int64_t l = 0; l < p->k; ++l)
                    sum += int32_t(a[p->across_a ? i * p->lda + l : l * p->lda + i]) * b[p->across_b ? l * p->ldb + j : j * p->ldb + l];
                c[j * p->ldc + i] = sum;
            }
    }
}
constexpr int BLAS_NOT_SUPPORTED = 7, TRANSPOSED = 112;
struct Operations {
    int a = 111, b = 111;
};
} // namespace

#define API extern "C" __attribute__((visibility("default")))

// ---- for the loader -------------------------------------------------------------------------------------------------
API void gfx_hip_loader(Loader load) { loader = load; }
API void gfx_hip_configure(const char *log_path, uint32_t first_seed, uint32_t wanted_checks, uint32_t wanted_dry) {
    dry = wanted_dry;
    seed = first_seed;
    checks = wanted_checks;
    if (log_file >= 0) close(log_file);
    log_file = *log_path ? open(log_path, O_WRONLY | O_CREAT | O_APPEND, 0644) : -1;
}
API void gfx_hip_add(void *module, const char *name, Function *function) { static_cast<Module *>(module)->functions[name] = function; }

// ---- kernels of a library that was linked with device code --------------------------------------------------------------
struct FatBinary {
    uint32_t magic, version;
    const void *binary, *unused;
};
API void **__hipRegisterFatBinary(const FatBinary *wrapper) {
    auto *module = new Module;
    module->image = wrapper->binary;
    return reinterpret_cast<void **>(module);
}
API void __hipUnregisterFatBinary(void **) {}
API void __hipRegisterFunction(void **module, const void *host, char *, const char *name, unsigned, void *, void *, void *, void *, int *) {
    std::lock_guard<std::mutex> guard(registered_lock);
    registered()[host] = {reinterpret_cast<Module *>(module), name};
}
struct Call {
    dim3 grid, block;
    size_t shared;
    hipStream_t stream;
};
thread_local std::vector<Call> calls;
API hipError_t __hipPushCallConfiguration(dim3 grid, dim3 block, size_t shared, hipStream_t stream) {
    calls.push_back({grid, block, shared, stream});
    return hipSuccess;
}
API hipError_t __hipPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, hipStream_t *stream) {
    *grid = calls.back().grid;
    *block = calls.back().block;
    *shared = calls.back().shared;
    *stream = calls.back().stream;
    calls.pop_back();
    return hipSuccess;
}
API hipError_t hipLaunchKernel(const void *host, dim3 grid, dim3 block, void **given, size_t shared, hipStream_t stream) {
    std::pair<Module *, std::string> known;
    {
        std::lock_guard<std::mutex> guard(registered_lock);
        auto found = registered().find(host);
        if (found == registered().end()) return said(hipErrorInvalidDeviceFunction);
        known = found->second;
    }
    const Function *function = function_of(known.first, known.second);
    return function ? queue(function, grid, block, given, nullptr, shared, stream) : said(hipErrorNoBinaryForGpu);
}

// ---- modules --------------------------------------------------------------------------------------------------------
API hipError_t hipModuleLoadDataEx(hipModule_t *out, const void *image, unsigned, hipJitOption *, void **) {
    auto *module = new Module;
    module->image = image;
    function_of(module, "");
    *out = reinterpret_cast<hipModule_t>(module);
    return module->functions.empty() ? said(hipErrorNoBinaryForGpu) : hipSuccess;
}
API hipError_t hipModuleLoadData(hipModule_t *out, const void *image) { return hipModuleLoadDataEx(out, image, 0, nullptr, nullptr); }
API hipError_t hipModuleLoad(hipModule_t *out, const char *path) {
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    struct stat about;
    if (file < 0 || fstat(file, &about)) return said(hipErrorFileNotFound);
    const void *image = mmap(nullptr, size_t(about.st_size), PROT_READ, MAP_PRIVATE, file, 0);
    close(file);
    if (image == MAP_FAILED) return said(hipErrorOutOfMemory);
    const auto error = hipModuleLoadData(out, image);
    munmap(const_cast<void *>(image), size_t(about.st_size)); // its kernels lie elsewhere now
    return error;
}
API hipError_t hipModuleUnload(hipModule_t) { return hipSuccess; } // the code stays: kernels may be queued
API hipError_t hipModuleGetFunction(hipFunction_t *out, hipModule_t module, const char *name) {
    *out = reinterpret_cast<hipFunction_t>(function_of(reinterpret_cast<Module *>(module), name));
    return *out ? hipSuccess : said(hipErrorNotFound);
}
API hipError_t hipFuncGetAttribute(int *value, hipFunction_attribute attribute, hipFunction_t handle) {
    const auto &function = *reinterpret_cast<Function *>(handle);
    switch (attribute) {
    case HIP_FUNC_ATTRIBUTE_NUM_REGS: *value = int(function.vgprs); break;
    case HIP_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: *value = int(function.scratch); break;
    case HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = int(function.most_lanes); break;
    default: return said(hipErrorInvalidValue);
    }
    return hipSuccess;
}
API hipError_t hipModuleLaunchKernel(hipFunction_t function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                                     unsigned shared, hipStream_t stream, void **given, void **extra) {
    return queue(reinterpret_cast<Function *>(function), {x, y, z}, {bx, by, bz}, given, extra, shared, stream);
}
// Sizes are in lanes here.
API hipError_t hipExtModuleLaunchKernel(hipFunction_t function, uint32_t x, uint32_t y, uint32_t z, uint32_t bx, uint32_t by, uint32_t bz,
                                        size_t shared, hipStream_t stream, void **given, void **extra, hipEvent_t begin, hipEvent_t end, uint32_t) {
    if (begin || end) return said(hipErrorNotSupported);
    if (!bx || !by || !bz || x % bx || y % by || z % bz) return said(hipErrorInvalidValue);
    return queue(reinterpret_cast<Function *>(function), {x / bx, y / by, z / bz}, {bx, by, bz}, given, extra, shared, stream);
}
// Of a work-group processor: 128 KiB of LDS, and of its four SIMDs 16 waves and 1536 vector registers each, given out in
// steps of 24 (as LLVM's target description has them).
API hipError_t hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int *count, hipFunction_t handle, int lanes, size_t shared) {
    const auto &function = *reinterpret_cast<Function *>(handle);
    const uint64_t lds = function.lds + shared, waves = (uint64_t(lanes) + 31) / 32, registers = std::max(24u, (function.vgprs + 23) / 24 * 24);
    if (!waves) return said(hipErrorInvalidValue);
    const uint64_t by_registers = 4 * std::min<uint64_t>(16, 1536 / registers) / waves;
    *count = int(std::min(by_registers, lds ? (1 << 17) / lds : by_registers));
    return hipSuccess;
}
// Asked for by Triton and never called for this card: it has no clusters, and a cooperative grid is not simulated.
API hipError_t hipModuleLaunchCooperativeKernel(hipFunction_t, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                                hipStream_t, void **) {
    return said(hipErrorNotSupported);
}
API hipError_t hipDrvLaunchKernelEx(const HIP_LAUNCH_CONFIG *, hipFunction_t, void **, void **) { return said(hipErrorNotSupported); }

// ---- device, memory, errors --------------------------------------------------------------------------------------------
API hipError_t hipDriverGetVersion(int *version) {
    *version = 70253210;
    return hipSuccess;
}
API hipError_t hipGetProcAddress(const char *name, void **function, int, uint64_t, hipDriverProcAddressQueryResult *) {
    if (std::string(name) == "hipGetDeviceProperties") name = "hipGetDevicePropertiesR0600";
    Dl_info here;
    dladdr(reinterpret_cast<void *>(&hipDriverGetVersion), &here);
    void *self = dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    *function = dlsym(self, name);
    return *function ? hipSuccess : said(hipErrorNotFound);
}
API hipError_t hipGetDevicePropertiesR0600(hipDeviceProp_tR0600 *properties, int device) {
    if (device < 0 || device >= sim_device_count()) return said(hipErrorInvalidDevice);
    *properties = {};
    properties->warpSize = 32;
    properties->sharedMemPerBlock = 1 << 16;
    properties->regsPerBlock = 1 << 16;
    properties->multiProcessorCount = 42; // work-group processors of two compute units
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->maxThreadsPerBlock = 1024;
    properties->clockRate = 2400000;
    properties->memoryClockRate = 1250000;
    properties->memoryBusWidth = 320;
    properties->major = 11;
    properties->cooperativeLaunch = 0;
    std::strcpy(properties->gcnArchName, "gfx1100");
    return hipSuccess;
}
API hipError_t hipDeviceGetAttribute(int *value, hipDeviceAttribute_t attribute, int) {
    switch (attribute) {
    case hipDeviceAttributeWarpSize: *value = 32; return hipSuccess;
    case hipDeviceAttributeMultiprocessorCount: *value = 42; return hipSuccess;
    case hipDeviceAttributePageableMemoryAccess:
    case hipDeviceAttributeConcurrentManagedAccess: *value = 0; return hipSuccess;
    case hipDeviceAttributePhysicalMultiProcessorCount: *value = 84; return hipSuccess; // compute units
    case hipDeviceAttributeMaxSharedMemoryPerBlock: *value = 1 << 16; return hipSuccess;
    case hipDeviceAttributeMemoryPoolsSupported: *value = 1; return hipSuccess;
    case hipDeviceAttributeClockRate: *value = 2400000; return hipSuccess;
    default: return said(hipErrorInvalidValue);
    }
}
API hipError_t hipGetDevice(int *device) { return *device = sim_current_device(), hipSuccess; }
API hipError_t hipSetDevice(int device) {
    if (device < 0 || device >= sim_device_count()) return said(hipErrorInvalidDevice);
    return sim_use_device(device), hipSuccess;
}
API hipError_t hipGetDeviceCount(int *count) { return *count = sim_device_count(), hipSuccess; }
API hipError_t hipRuntimeGetVersion(int *version) { return hipDriverGetVersion(version); }
API hipError_t hipDeviceSynchronize() { return sim_wait(nullptr, sim_current_device()), hipSuccess; }
API hipError_t hipStreamSynchronize(hipStream_t stream) { return sim_wait(stream, -1), hipSuccess; }
API hipError_t hipStreamQuery(hipStream_t stream) { return hipStreamSynchronize(stream); }
API hipError_t hipStreamIsCapturing(hipStream_t, hipStreamCaptureStatus *status) { return *status = hipStreamCaptureStatusNone, hipSuccess; }
API hipError_t hipEventRecord(hipEvent_t, hipStream_t) { return said(hipErrorNotSupported); } // nobody creates one here
API hipError_t hipPointerGetAttributes(hipPointerAttribute_t *attributes, const void *address) {
    for (int device = 0; device < sim_device_count(); ++device)
        if (holder(live(device), uint64_t(address))) {
            *attributes = {};
            attributes->type = hipMemoryTypeDevice;
            attributes->device = device;
            attributes->devicePointer = const_cast<void *>(address);
            return hipSuccess;
        }
    return said(hipErrorInvalidValue);
}
API hipError_t hipPointerGetAttribute(void *value, hipPointer_attribute attribute, hipDeviceptr_t address) {
    if (attribute != HIP_POINTER_ATTRIBUTE_DEVICE_POINTER) return said(hipErrorNotSupported);
    for (int device = 0; device < sim_device_count(); ++device)
        if (holder(live(device), uint64_t(address))) {
            *static_cast<hipDeviceptr_t *>(value) = address;
            return hipSuccess;
        }
    return said(hipErrorInvalidValue);
}
API hipError_t hipMallocManaged(void **out, size_t bytes, unsigned) { return allocate(out, bytes, -1); }
API hipError_t hipMalloc(void **out, size_t bytes) { return allocate(out, bytes, sim_current_device()); }
API hipError_t hipMallocAsync(void **out, size_t bytes, hipStream_t) { return hipMalloc(out, bytes); }
API hipError_t hipHostMalloc(void **out, size_t bytes, unsigned) { return allocate(out, bytes, -1); }
API hipError_t hipFree(void *memory) {
    for (int device = 0; device < sim_device_count(); ++device) sim_wait(nullptr, device);
    return release(memory);
}
API hipError_t hipFreeAsync(void *memory, hipStream_t) { return hipFree(memory); }
API hipError_t hipDeviceGetDefaultMemPool(hipMemPool_t *pool, int) {
    static int the_one;
    return *pool = reinterpret_cast<hipMemPool_t>(&the_one), hipSuccess;
}
API hipError_t hipMemPoolTrimTo(hipMemPool_t, size_t) { return hipSuccess; } // it keeps nothing
struct Copy {
    char *to;
    const char *from;
    size_t to_pitch, from_pitch, width, height;
    std::vector<char> staged; // of memory that the caller may change once it is back
    void operator()() const {
        for (size_t row = 0; row < height; ++row) std::memcpy(to + row * to_pitch, (staged.empty() ? from : staged.data()) + row * from_pitch, width);
    }
};
// As a card does: memory that is not page-locked is read before the call returns, and written before it does.
API hipError_t hipMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, hipMemcpyKind,
                                hipStream_t stream) {
    auto copy = std::make_unique<Copy>(Copy{static_cast<char *>(to), static_cast<const char *>(from), to_pitch, from_pitch, width, height, {}});
    const auto spans = live(sim_stream_device(stream));
    if (!holder(spans, uint64_t(from)) && width && height) copy->staged.assign(copy->from, copy->from + from_pitch * (height - 1) + width);
    sim_push(stream, [](void *context) { (*std::unique_ptr<Copy>(static_cast<Copy *>(context)))(); }, copy.release());
    if (!holder(spans, uint64_t(to))) sim_wait(stream, -1);
    return hipSuccess;
}
API hipError_t hipMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, hipMemcpyKind kind) {
    const auto error = hipMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kind, nullptr);
    sim_wait(nullptr, -1);
    return error;
}
API hipError_t hipMemcpyAsync(void *to, const void *from, size_t bytes, hipMemcpyKind kind, hipStream_t stream) {
    return hipMemcpy2DAsync(to, bytes, from, bytes, bytes, 1, kind, stream);
}
API hipError_t hipMemcpy(void *to, const void *from, size_t bytes, hipMemcpyKind kind) { return hipMemcpy2D(to, bytes, from, bytes, bytes, 1, kind); }
API hipError_t hipMemPrefetchAsync(const void *, size_t, int, hipStream_t) { return hipSuccess; }
API hipError_t hipMemsetAsync(void *address, int value, size_t bytes, hipStream_t stream) {
    struct Fill {
        void *address;
        int value;
        size_t bytes;
    };
    sim_push(stream, [](void *context) {
        std::unique_ptr<Fill> fill(static_cast<Fill *>(context));
        std::memset(fill->address, fill->value, fill->bytes);
    }, new Fill{address, value, bytes});
    return hipSuccess;
}
API hipError_t hipMemset(void *address, int value, size_t bytes) { return hipMemsetAsync(address, value, bytes, nullptr); }
API hipError_t hipGetLastError() {
    const auto error = last_error;
    last_error = hipSuccess;
    return error;
}
API hipError_t hipPeekAtLastError() { return last_error; }
struct Said {
    hipError_t error;
    const char *name, *text;
};
const Said &words(hipError_t error) {
    static const Said all[] = {
        {hipSuccess, "hipSuccess", "no error"},
        {hipErrorInvalidValue, "hipErrorInvalidValue", "invalid argument"},
        {hipErrorOutOfMemory, "hipErrorOutOfMemory", "out of memory"},
        {hipErrorInvalidConfiguration, "hipErrorInvalidConfiguration", "invalid configuration argument"},
        {hipErrorNoBinaryForGpu, "hipErrorNoBinaryForGpu", "no kernel image is available for execution on the device"},
        {hipErrorInvalidDeviceFunction, "hipErrorInvalidDeviceFunction", "invalid device function"},
        {hipErrorInvalidDevice, "hipErrorInvalidDevice", "invalid device ordinal"},
        {hipErrorFileNotFound, "hipErrorFileNotFound", "file not found"},
        {hipErrorNotSupported, "hipErrorNotSupported", "operation not supported"},
        {hipErrorNotFound, "hipErrorNotFound", "named symbol not found"},
    };
    static const Said other{hipErrorUnknown, "hipErrorUnknown", "error of the simulated HIP runtime"};
    for (const Said &each : all)
        if (each.error == error) return each;
    return other;
}
API const char *hipGetErrorString(hipError_t error) { return words(error).text; }
API const char *hipGetErrorName(hipError_t error) { return words(error).name; }

// ---- hipBLAS and hipBLASLt, as far as bitsandbytes' int8 products go: by AMD's libraries, else on the CPU --------------------
static int integers(Product &&p, int library, void *stream) {
    if (!gfx_blas_loaded()) return sim_push(stream, &multiply, new Product(p)), 0;
    gfx_product q{};
    q.a = p.a, q.b = p.b, q.c = q.d = p.c, q.stream = stream;
    q.m = p.m, q.n = p.n, q.k = p.k, q.batches = p.batches, q.lda = p.lda, q.ldb = p.ldb, q.ldc = q.ldd = p.ldc;
    q.stride_a = p.stride_a, q.stride_b = p.stride_b, q.stride_c = q.stride_d = p.stride_c, q.alpha = 1;
    q.across_a = p.across_a, q.across_b = p.across_b, q.type_in = GFX_I8, q.type_out = GFX_I32, q.library = library;
    char error[1000];
    const int failed = gfx_blas_multiply(&q, error, sizeof error);
    if (failed) fprintf(stderr, "%s\n", error);
    return failed ? BLAS_NOT_SUPPORTED : 0;
}
API int rocblas_create_handle(void **handle) {
    static int one;
    *handle = &one;
    return 0;
}
API int hipblasGemmStridedBatchedEx(void *, int op_a, int op_b, int m, int n, int k, const void *, const void *a, int type_a, int lda,
                                    long long stride_a, const void *b, int type_b, int ldb, long long stride_b, const void *, void *c,
                                    int type_c, int ldc, long long stride_c, int batches, int, int) {
    if (type_a != HIP_R_8I || type_b != HIP_R_8I || type_c != HIP_R_32I) return BLAS_NOT_SUPPORTED;
    return integers({op_a == TRANSPOSED, op_b == TRANSPOSED, m, n, k, lda, ldb, ldc, stride_a, stride_b, stride_c, batches,
                     static_cast<const int8_t *>(a), static_cast<const int8_t *>(b), static_cast<int32_t *>(c)}, GFX_ROCBLAS, nullptr);
}
API int hipblasGemmEx(void *handle, int op_a, int op_b, int m, int n, int k, const void *alpha, const void *a, int type_a, int lda,
                      const void *b, int type_b, int ldb, const void *beta, void *c, int type_c, int ldc, int compute, int algorithm) {
    return hipblasGemmStridedBatchedEx(handle, op_a, op_b, m, n, k, alpha, a, type_a, lda, 0, b, type_b, ldb, 0, beta, c, type_c, ldc, 0, 1,
                                       compute, algorithm);
}
API int hipblasLtMatrixLayoutCreate(Layout **out, int type, uint64_t rows, uint64_t columns, int64_t leading) {
    *out = new Layout{type, rows, columns, leading};
    return 0;
}
API int hipblasLtMatrixLayoutDestroy(Layout *layout) { return delete layout, 0; }
API int hipblasLtMatmulDescCreate(Operations **out, int, int) { return *out = new Operations, 0; }
API int hipblasLtMatmulDescDestroy(Operations *operations) { return delete operations, 0; }
API int hipblasLtMatmulDescSetAttribute(Operations *operations, int attribute, const void *value, size_t) {
    if (attribute > 1) return BLAS_NOT_SUPPORTED;
    std::memcpy(attribute ? &operations->b : &operations->a, value, sizeof(int));
    return 0;
}
API int hipblasLtMatmulPreferenceCreate(void **out) { return *out = nullptr, 0; }
API int hipblasLtMatmulPreferenceSetAttribute(void *, int, const void *, size_t) { return 0; }
API int hipblasLtMatmulAlgoGetHeuristic(void *, void *, void *, void *, void *, void *, void *, int, void *, int *found) { return *found = 1, 0; }
API int hipblasLtMatmul(void *, const Operations *operations, const void *, const void *a, const Layout *at, const void *b, const Layout *bt,
                        const void *, const void *, const Layout *, void *d, const Layout *dt, const void *, void *, size_t, void *stream) {
    if (at->type != HIP_R_8I || bt->type != HIP_R_8I || dt->type != HIP_R_32I) return BLAS_NOT_SUPPORTED;
    const bool across = operations->a == TRANSPOSED;
    return integers({across, operations->b == TRANSPOSED, int64_t(dt->rows), int64_t(dt->columns), int64_t(across ? at->rows : at->columns),
                     at->leading, bt->leading, dt->leading, 0, 0, 0, 1, static_cast<const int8_t *>(a), static_cast<const int8_t *>(b),
                     static_cast<int32_t *>(d)}, GFX_HIPBLASLT, stream);
}
