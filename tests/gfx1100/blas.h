// Matrix products of the simulated card by AMD's libraries. By columns, as BLAS has matrices: D = alpha A B + beta C.
#ifndef GFX1100_BLAS_H
#define GFX1100_BLAS_H
#include <stddef.h>
#include <stdint.h>

enum { GFX_F32, GFX_F16, GFX_BF16, GFX_I8, GFX_I32 }; // int8 has results in int32 only
enum { GFX_ROCBLAS, GFX_HIPBLASLT };
enum { MOST_ALGORITHMS = 1000 }; // that hipBLASLt is asked for

typedef struct {
    const void *a, *b, *c; // device memory
    void *d;
    const void *bias; // added to each column of D, hipBLASLt only; or NULL
    void *stream;
    int64_t m, n, k, batches;
    int64_t lda, ldb, ldc, ldd, stride_a, stride_b, stride_c, stride_d; // elements
    float alpha, beta;
    int32_t type_in, type_out, across_a, across_b; // across: transposed
    int32_t library, solution;                     // 0: what the library chooses; a number of gfx_blas_solutions
} gfx_product;

#ifdef __cplusplus
extern "C" {
#endif
// 0, or 1 with a message in `error`. Products are queued on the stream.
int gfx_blas_load(const char *rocblas, const char *hipblaslt, char *error, size_t room);
int gfx_blas_loaded();
int gfx_blas_multiply(const gfx_product *, char *error, size_t room);
int gfx_blas_solutions(const gfx_product *, int32_t *numbers /* may be NULL */, int32_t *count, char *error, size_t room);
#ifdef __cplusplus
}
#endif
#endif
