// A blocked matrix product. OpenBLAS would not do: its threads have no access to the memory of devices, whose
// protection key is open for the workers of streams only.
//
// Blocks of A and of B are packed, so that a tile reads them in order and a transposition costs nothing more.
#include "gemm.h"

#include <algorithm>
#include <vector>

// A tile of C, which is held in 12 vector registers: two vectors of rows by six columns.
template<class T> struct Tile;
template<> struct Tile<float> {
  enum { ROWS = 16, COLUMNS = 6 };
  typedef float Vector __attribute__((vector_size(32), aligned(4)));
};
template<> struct Tile<double> {
  enum { ROWS = 8, COLUMNS = 6 };
  typedef double Vector __attribute__((vector_size(32), aligned(8)));
};

#define TILE_NAMESPACE baseline
#define TILE_ATTRIBUTES
#include "gemm_tile.h"
#undef TILE_NAMESPACE
#undef TILE_ATTRIBUTES

#define TILE_NAMESPACE avx2
#define TILE_ATTRIBUTES __attribute__((target("avx2,fma")))
#include "gemm_tile.h"

// The library may be built on another processor than it runs on, so the choice is made at run time.
template<class T> static auto choose_tile() -> void (*)(long, const T *, const T *, T *) {
  const bool modern = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return modern ? avx2::compute_tile<T> : baseline::compute_tile<T>;
}

// Copies a matrix that is read by strides: strips of `width` rows, padded with zeros, each column by column.
template<class T>
static void pack(T *out, const T *matrix, long rows, long depth, long row_stride, long depth_stride, int width) {
  for (long first = 0; first < rows; first += width)
    for (long p = 0; p < depth; p++)
      for (long row = first; row < first + width; row++)
        *out++ = row < rows ? matrix[row * row_stride + p * depth_stride] : T(0);
}

template<class T> static void scale(T beta, T *c, long m, long n, long ldc) {
  if (beta == T(1)) return;
  for (long j = 0; j < n; j++)
    for (long i = 0; i < m; i++) c[j * ldc + i] = beta == T(0) ? T(0) : c[j * ldc + i] * beta;  // 0 ignores a NaN in C
}

template<class T>
void gemm(bool transpose_a, bool transpose_b, long m, long n, long k, T alpha, const T *a, long lda, const T *b,
          long ldb, T beta, T *c, long ldc) {
  static const auto compute_tile = choose_tile<T>();
  const long ROWS = Tile<T>::ROWS, COLUMNS = Tile<T>::COLUMNS, DEPTH = 256, HEIGHT = 96;  // of a packed block of A
  const long a_row = transpose_a ? lda : 1, a_depth = transpose_a ? 1 : lda;
  const long b_column = transpose_b ? 1 : ldb, b_depth = transpose_b ? ldb : 1;
  scale(beta, c, m, n, ldc);
  if (alpha == T(0) || k == 0) return;
  static thread_local std::vector<T> packed_a, packed_b;
  packed_a.resize(DEPTH * (HEIGHT + ROWS));
  packed_b.resize(DEPTH * (n + COLUMNS));
  T tile[Tile<T>::ROWS * Tile<T>::COLUMNS] __attribute__((aligned(64)));
  for (long p = 0; p < k; p += DEPTH) {
    const long depth = std::min(DEPTH, k - p);
    pack(packed_b.data(), b + p * b_depth, n, depth, b_column, b_depth, COLUMNS);
    for (long i = 0; i < m; i += HEIGHT) {
      const long height = std::min(HEIGHT, m - i);
      pack(packed_a.data(), a + i * a_row + p * a_depth, height, depth, a_row, a_depth, ROWS);
      for (long column = 0; column < n; column += COLUMNS) {
        for (long row = 0; row < height; row += ROWS) {
          compute_tile(depth, packed_a.data() + row * depth, packed_b.data() + column * depth, tile);
          const long rows = std::min(ROWS, height - row), columns = std::min(COLUMNS, n - column);
          for (long y = 0; y < columns; y++) {
            T *to = c + (column + y) * ldc + i + row;
            for (long x = 0; x < rows; x++) to[x] += alpha * tile[y * ROWS + x];
          }
        }
      }
    }
  }
}

template void gemm(bool, bool, long, long, long, float, const float *, long, const float *, long, float, float *, long);
template void gemm(bool, bool, long, long, long, double, const double *, long, const double *, long, double, double *,
                   long);
