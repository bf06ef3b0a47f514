// One tile of the matrix product, for one set of instructions. gemm.cpp includes this file once for each set, with
// TILE_NAMESPACE and TILE_ATTRIBUTES defined. A clone of one function would not do: the compiler lowers vector types
// before it clones or inlines, to those of the function's own instructions.
namespace TILE_NAMESPACE {

// tile[j * ROWS + i] = sum over p of a[p * ROWS + i] * b[p * COLUMNS + j]
template<class T> TILE_ATTRIBUTES void compute_tile(long k, const T *a, const T *b, T *tile) {
  typedef typename Tile<T>::Vector Vector;
  enum { ROWS = Tile<T>::ROWS, COLUMNS = Tile<T>::COLUMNS, LANES = Tile<T>::ROWS / 2 };
  Vector low[COLUMNS], high[COLUMNS];
  for (int j = 0; j < COLUMNS; j++) low[j] = high[j] = Vector{};
  for (long p = 0; p < k; p++) {
    Vector a_low = *(const Vector *)a, a_high = *(const Vector *)(a + LANES);
#pragma GCC unroll 6
    for (int j = 0; j < COLUMNS; j++) {
      low[j] += a_low * b[j];
      high[j] += a_high * b[j];
    }
    a += ROWS;
    b += COLUMNS;
  }
  for (int j = 0; j < COLUMNS; j++) {
    *(Vector *)(tile + j * ROWS) = low[j];
    *(Vector *)(tile + j * ROWS + LANES) = high[j];
  }
}

}  // namespace TILE_NAMESPACE
