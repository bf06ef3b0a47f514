/* Sums over all axes but one, or over the first axes, for Theano's CAReduce: T is the type of the sums, X of the elements. */
#ifndef MGPU_SUMS
#define MGPU_SUMS
namespace mgpu_sums {
/* Sums over the first axes of contiguous arrays, row after row; whether there are enough to be worth it. */
template <class T, class X> static inline bool of_rows(PyArrayObject* x, PyArrayObject* total) {
    if (PyArray_SIZE(total) < 8 || !PyArray_IS_C_CONTIGUOUS(x) || !PyArray_IS_C_CONTIGUOUS(total))
        return false;
    const npy_intp columns = PyArray_SIZE(total), size = PyArray_SIZE(x);
    const X* row = (const X*)PyArray_DATA(x);
    T* totals = (T*)PyArray_DATA(total);
    for (npy_intp j = 0; j < columns; j++)
        totals[j] = 0;
    for (npy_intp i = 0; i < size; i += columns, row += columns)
        #pragma GCC ivdep
        for (npy_intp j = 0; j < columns; j++)
            totals[j] = totals[j] + row[j];
    return true;
}

/* The elements of `count` sums, `step` bytes apart, over the axes `axis`, `axis + 1`, ... of a list. */
template <int axes, int count, class T, class X> struct Add {
    static inline void to(T* sums, PyArrayObject* x, const char* from, const int* axis, npy_intp step) {
        const npy_intp n = PyArray_DIMS(x)[*axis], stride = PyArray_STRIDES(x)[*axis];
        for (npy_intp i = 0; i < n; i++, from += stride)
            Add<axes - 1, count, T, X>::to(sums, x, from, axis + 1, step);
    }
};
template <int count, class T, class X> struct Add<0, count, T, X> {
    static inline void to(T* sums, PyArrayObject*, const char* from, const int*, npy_intp step) {
        for (int k = 0; k < count; k++)
            sums[k] = sums[k] + *(const X*)(from + k * step);
    }
};

template <int axes, int count, class T, class X>
static inline npy_intp some(PyArrayObject* x, PyArrayObject* total, int kept, const int* axis, npy_intp first) {
    const npy_intp n = PyArray_DIMS(x)[kept], step = PyArray_STRIDES(x)[kept];
    for (; first + count <= n; first += count) {
        T sums[count] = {0};
        Add<axes, count, T, X>::to(sums, x, PyArray_BYTES(x) + first * step, axis, step);
        for (int k = 0; k < count; k++)
            *(T*)(PyArray_BYTES(total) + (first + k) * PyArray_STRIDES(total)[0]) = sums[k];
    }
    return first;
}
/* Sums over all axes but the one that is kept, eight at a time. */
template <int axes, class T, class X>
static inline void of_each(PyArrayObject* x, PyArrayObject* total, int kept, const int* axis) {
    some<axes, 1, T, X>(x, total, kept, axis, some<axes, 8, T, X>(x, total, kept, axis, 0));
}
}
#endif
