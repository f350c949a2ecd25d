// Matrix products by AMD's own rocBLAS and hipBLASLt, unmodified: their host code chooses kernels and launches them on the
// HIP runtime's stand-in, whose card executes them.
#include "blas.h"

#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

extern "C" int sim_current_device();
extern "C" int hipMalloc(void **, size_t);

namespace {
// Numbers of the libraries' interfaces.
enum { NO_TRANSPOSE = 111, TRANSPOSE = 112 };                                   // rocblas_operation, hipblasOperation_t
enum { ROC_F16 = 150, ROC_F32 = 151, ROC_I8 = 160, ROC_I32 = 162, ROC_BF16 = 168 }; // rocblas_datatype
enum { ROC_STANDARD = 0, ROC_BY_INDEX = 1 };                                    // rocblas_gemm_algo
enum { LT_F32 = 0, LT_F16 = 2, LT_I8 = 3, LT_I32 = 10, LT_BF16 = 14 };          // hipDataType
enum { LT_COMPUTE_F32 = 2, LT_COMPUTE_I32 = 9 };                                // hipblasComputeType_t
enum { LT_TRANSPOSE_A, LT_TRANSPOSE_B, LT_EPILOGUE, LT_BIAS, LT_BIAS_TYPE };    // hipblasLtMatmulDescAttributes_t
enum { LT_EPILOGUE_BIAS = 4, LT_BATCHES = 0, LT_STRIDE = 1, LT_MOST_WORKSPACE = 1 };
constexpr uint64_t WORKSPACE = 76ull << 20; // bytes that torch's ROCm build gives hipBLASLt

struct Algorithm {
    uint8_t data[16];
    size_t most_workspace;
};
struct Heuristic {
    Algorithm algorithm;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};

void *rocblas = nullptr, *hipblaslt = nullptr;

template <class RESULT, class... ARGUMENTS> RESULT call(void *library, const char *name, ARGUMENTS... arguments) {
    static std::map<std::pair<void *, std::string>, void *> known;
    static std::mutex lock;
    void *function;
    {
        std::lock_guard<std::mutex> guard(lock);
        void *&slot = known[{library, name}];
        if (!slot) slot = dlsym(library, name);
        function = slot;
    }
    if (!function) throw std::runtime_error(std::string("the library has no ") + name);
    return reinterpret_cast<RESULT (*)(ARGUMENTS...)>(function)(arguments...);
}
template <class... ARGUMENTS> void ask(void *library, const char *name, ARGUMENTS... arguments) {
    if (const int status = call<int>(library, name, arguments...)) throw std::runtime_error(std::string(name) + ": status " + std::to_string(status));
}

// One for each thread and card, as torch has them.
struct Handles {
    void *roc = nullptr, *lt = nullptr, *workspace = nullptr;
};
Handles &handles() {
    static thread_local std::map<int, Handles> all;
    return all[sim_current_device()];
}
void *roc_handle(void *stream) {
    Handles &mine = handles();
    if (!mine.roc) ask(rocblas, "rocblas_create_handle", &mine.roc);
    ask(rocblas, "rocblas_set_stream", mine.roc, stream);
    return mine.roc;
}

constexpr int ROC_TYPES[] = {ROC_F32, ROC_F16, ROC_BF16, ROC_I8, ROC_I32}, LT_TYPES[] = {LT_F32, LT_F16, LT_BF16, LT_I8, LT_I32};
int roc_type(int type) { return ROC_TYPES[type]; }
int lt_type(int type) { return LT_TYPES[type]; }
bool of_integers(const gfx_product &p) { return p.type_in == GFX_I8; }
int sums_of(const gfx_product &p) { return of_integers(p) ? GFX_I32 : GFX_F32; }
// Alpha and beta in the type of the sums.
struct Factors {
    float floats[2];
    int32_t integers[2];
    bool whole;
    explicit Factors(const gfx_product &p) : floats{p.alpha, p.beta}, integers{int32_t(p.alpha), int32_t(p.beta)}, whole(of_integers(p)) {}
    const void *alpha() const { return whole ? static_cast<const void *>(&integers[0]) : &floats[0]; }
    const void *beta() const { return whole ? static_cast<const void *>(&integers[1]) : &floats[1]; }
};

template <class AFTER> int with_arguments(const gfx_product &p, AFTER after) {
    void *handle = roc_handle(p.stream);
    const int in = roc_type(p.type_in), out = roc_type(p.type_out);
    const Factors factors(p);
    return after(handle, p.across_a ? TRANSPOSE : NO_TRANSPOSE, p.across_b ? TRANSPOSE : NO_TRANSPOSE, int(p.m), int(p.n), int(p.k), factors.alpha(), p.a,
                 in, int(p.lda), p.b, in, int(p.ldb), factors.beta(), p.c, out, int(p.ldc), p.d, out, int(p.ldd));
}
void by_rocblas(const gfx_product &p) {
    const int algorithm = p.solution ? ROC_BY_INDEX : ROC_STANDARD, sums = roc_type(sums_of(p));
    const char *name = p.batches == 1 ? "rocblas_gemm_ex" : "rocblas_gemm_strided_batched_ex";
    const int status = with_arguments(p, [&](void *handle, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int in, int lda, const void *b,
                                             int, int ldb, const void *beta, const void *c, int out, int ldc, void *d, int, int ldd) {
        if (p.batches == 1)
            return call<int>(rocblas, name, handle, ta, tb, m, n, k, alpha, a, in, lda, b, in, ldb, beta, c, out,
                             ldc, d, out, ldd, sums, algorithm, int32_t(p.solution), uint32_t(0));
        return call<int>(rocblas, name, handle, ta, tb, m, n, k, alpha, a, in, lda, p.stride_a, b, in, ldb, p.stride_b,
                         beta, c, out, ldc, p.stride_c, d, out, ldd, p.stride_d, int(p.batches), sums, algorithm,
                         int32_t(p.solution), uint32_t(0));
    });
    if (status) throw std::runtime_error(std::string(name) + ": status " + std::to_string(status));
}

// What hipBLASLt wants to know of a product, freed with it.
struct Described {
    void *operation = nullptr, *layouts[4] = {}, *preference = nullptr;
    explicit Described(const gfx_product &p) {
        ask(hipblaslt, "hipblasLtMatmulDescCreate", &operation, int(of_integers(p) ? LT_COMPUTE_I32 : LT_COMPUTE_F32), lt_type(sums_of(p)));
        set(LT_TRANSPOSE_A, int32_t(p.across_a ? TRANSPOSE : NO_TRANSPOSE));
        set(LT_TRANSPOSE_B, int32_t(p.across_b ? TRANSPOSE : NO_TRANSPOSE));
        if (p.bias) {
            set(LT_EPILOGUE, int32_t(LT_EPILOGUE_BIAS));
            set(LT_BIAS, p.bias);
            set(LT_BIAS_TYPE, int32_t(lt_type(p.type_in)));
        }
        const int in = lt_type(p.type_in), out = lt_type(p.type_out);
        layout(0, in, p.across_a ? p.k : p.m, p.across_a ? p.m : p.k, p.lda, p.stride_a, p.batches);
        layout(1, in, p.across_b ? p.n : p.k, p.across_b ? p.k : p.n, p.ldb, p.stride_b, p.batches);
        layout(2, out, p.m, p.n, p.ldc, p.stride_c, p.batches);
        layout(3, out, p.m, p.n, p.ldd, p.stride_d, p.batches);
        ask(hipblaslt, "hipblasLtMatmulPreferenceCreate", &preference);
        ask(hipblaslt, "hipblasLtMatmulPreferenceSetAttribute", preference, int(LT_MOST_WORKSPACE), static_cast<const void *>(&WORKSPACE), sizeof WORKSPACE);
    }
    ~Described() {
        call<int>(hipblaslt, "hipblasLtMatmulPreferenceDestroy", preference);
        for (void *each : layouts) call<int>(hipblaslt, "hipblasLtMatrixLayoutDestroy", each);
        call<int>(hipblaslt, "hipblasLtMatmulDescDestroy", operation);
    }
    template <class VALUE> void set(int attribute, VALUE value) {
        ask(hipblaslt, "hipblasLtMatmulDescSetAttribute", operation, attribute, static_cast<const void *>(&value), sizeof value);
    }
    void layout(int which, int type, int64_t rows, int64_t columns, int64_t leading, int64_t stride, int64_t batches) {
        void *&each = layouts[which];
        ask(hipblaslt, "hipblasLtMatrixLayoutCreate", &each, type, uint64_t(rows), uint64_t(columns), leading);
        if (batches == 1) return;
        const int32_t count = int32_t(batches);
        ask(hipblaslt, "hipblasLtMatrixLayoutSetAttribute", each, int(LT_BATCHES), static_cast<const void *>(&count), sizeof count);
        ask(hipblaslt, "hipblasLtMatrixLayoutSetAttribute", each, int(LT_STRIDE), static_cast<const void *>(&stride), sizeof stride);
    }
};
Handles &lt_handles() {
    Handles &mine = handles();
    if (!mine.lt) ask(hipblaslt, "hipblasLtCreate", &mine.lt);
    if (!mine.workspace && hipMalloc(&mine.workspace, WORKSPACE)) throw std::runtime_error("no memory for hipBLASLt's workspace");
    return mine;
}
std::vector<Heuristic> algorithms(const Handles &mine, const Described &d, int most) {
    std::vector<Heuristic> found(static_cast<size_t>(most));
    int count = 0;
    call<int>(hipblaslt, "hipblasLtMatmulAlgoGetHeuristic", mine.lt, d.operation, d.layouts[0], d.layouts[1], d.layouts[2], d.layouts[3], d.preference, most,
              found.data(), &count);
    found.resize(size_t(count));
    return found;
}
void by_hipblaslt(const gfx_product &p) {
    const Handles &mine = lt_handles();
    const Described d(p);
    const auto found = algorithms(mine, d, p.solution ? MOST_ALGORITHMS : 1);
    if (int(found.size()) <= p.solution) throw std::runtime_error("hipBLASLt has no such algorithm for this product");
    const Factors factors(p);
    ask(hipblaslt, "hipblasLtMatmul", mine.lt, d.operation, factors.alpha(), p.a, d.layouts[0], p.b, d.layouts[1], factors.beta(), p.c, d.layouts[2],
        p.d, d.layouts[3], static_cast<const void *>(&found[size_t(p.solution)].algorithm), mine.workspace, size_t(WORKSPACE), p.stream);
}

template <class WORK> int guarded(char *error, size_t room, WORK work) {
    try {
        work();
        return 0;
    } catch (const std::exception &failed) {
        snprintf(error, room, "%s", failed.what());
        return 1;
    }
}
} // namespace

#define API extern "C" __attribute__((visibility("default")))

API int gfx_blas_load(const char *roc, const char *lt, char *error, size_t room) {
    return guarded(error, room, [&] {
        // Their own functions come before those of the same names that stand in for them here.
        for (auto [path, library] : {std::pair{roc, &rocblas}, {lt, &hipblaslt}})
            if (!*library && !(*library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND))) throw std::runtime_error(dlerror());
    });
}
API int gfx_blas_loaded() { return rocblas && hipblaslt; }
API int gfx_blas_multiply(const gfx_product *p, char *error, size_t room) {
    return guarded(error, room, [&] { p->library == GFX_ROCBLAS ? by_rocblas(*p) : by_hipblaslt(*p); });
}
API int gfx_blas_solutions(const gfx_product *p, int32_t *numbers, int32_t *count, char *error, size_t room) {
    return guarded(error, room, [&] {
        if (p->library == GFX_HIPBLASLT) {
            *count = int(algorithms(lt_handles(), Described(*p), MOST_ALGORITHMS).size());
            for (int n = 0; numbers && n < *count; ++n) numbers[n] = n;
            return;
        }
        const int status = with_arguments(*p, [&](void *handle, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int in, int lda, const void *b,
                                                  int, int ldb, const void *beta, const void *c, int out, int ldc, void *d, int, int ldd) {
            return call<int>(rocblas, "rocblas_gemm_ex_get_solutions", handle, ta, tb, m, n, k, alpha, a, in, lda, b, in, ldb,
                             beta, c, out, ldc, d, out, ldd, roc_type(sums_of(*p)), int(ROC_BY_INDEX), uint32_t(0), numbers, count);
        });
        if (status) throw std::runtime_error("rocblas_gemm_ex_get_solutions: status " + std::to_string(status));
    });
}
