// Products with few columns. OpenBLAS copies a whole matrix into another order before it multiplies it. For 16 columns
// this takes as long as the product, or twice. From 0.3.18 on it also has kernels for small matrices, which read them
// as they lie, for processors with AVX-512: a large matrix is multiplied by them in blocks. Another BLAS gets it whole.
#include <algorithm>
#include <cstring>

extern "C" {
char* openblas_get_corename(void) __attribute__((weak));
int openblas_get_num_threads(void) __attribute__((weak));
int sgemm_small_matrix_permit_SKYLAKEX(int, int, long, long, long, float, float) __attribute__((weak));
}

// As sgemm_, in columns: C = alpha * A B + beta * C, where A has m rows, B has n columns.
static void sgemm_in_blocks(char* ta, char* tb, const int* m, const int* n, const int* k, const float* alpha,
                            const float* a, const int* lda, const float* b, const int* ldb, const float* beta,
                            float* c, const int* ldc) {
    static const bool has_kernels = sgemm_small_matrix_permit_SKYLAKEX && openblas_get_corename
        && strstr("SkylakeX Cooperlake SapphireRapids", openblas_get_corename());
    const bool transposed = *ta != 'N';
    // What the kernels take: m * n * k <= 1e6; of a transposed matrix also m * n <= 1200 and k >= 32.
    const int rows = transposed ? 32 : 64, most = 1000000 / (rows * std::max(*n, 1)) / 16 * 16;
    if (!has_kernels || *tb != 'N' || *n < 4 || *n > 32 || *m < 2 * rows || *k < 64
        || openblas_get_num_threads() > 1) {
        sgemm_(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
        return;
    }
    const int parts = (*k + most - 1) / most, depth = (*k + parts - 1) / parts;
    const float one = 1;
    for (int i = 0; i < *m; i += rows)
        for (int j = 0; j < *k; j += depth) {
            const int height = std::min(rows, *m - i), width = std::min(depth, *k - j);
            sgemm_(ta, tb, &height, n, &width, alpha, a + (transposed ? j + (size_t)i * *lda : i + (size_t)j * *lda),
                   lda, b + j, ldb, j ? &one : beta, c + i, ldc);
        }
}
#define sgemm_ sgemm_in_blocks
