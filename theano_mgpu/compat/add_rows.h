/* The C code of AdvancedIncSubtensor1 for NumPy 2, in place of the functions PyArray_MapIter... of NumPy 1. `row` goes over one
   row of the array, `it` over all values. */
#include <complex>
template <class T> static void mgpu_add_rows(
        PyArrayIterObject* row, PyArrayIterObject* it, const npy_intp* at, npy_intp n, npy_intp stride, int adds) {
    for (npy_intp i = 0; i < n; i++) {
        PyArray_ITER_RESET(row);
        for (npy_intp j = 0; j < row->size; j++) {
            T* const place = (T*)(row->dataptr + at[i] * stride);
            *place = (adds ? *place : T(0)) + *(const T*)it->dataptr;
            PyArray_ITER_NEXT(row);
            PyArray_ITER_NEXT(it);
        }
    }
}

static int inplace_increment(PyArrayObject* a, PyObject* index, PyArrayObject* values, int adds) {
    typedef void (*Add)(PyArrayIterObject*, PyArrayIterObject*, const npy_intp*, npy_intp, npy_intp, int);
    static const struct { int type; Add add; } types[] = {
        {NPY_INT8, mgpu_add_rows<npy_int8>}, {NPY_INT16, mgpu_add_rows<npy_int16>},
        {NPY_INT32, mgpu_add_rows<npy_int32>}, {NPY_INT64, mgpu_add_rows<npy_int64>},
        {NPY_UINT8, mgpu_add_rows<npy_uint8>}, {NPY_UINT16, mgpu_add_rows<npy_uint16>},
        {NPY_UINT32, mgpu_add_rows<npy_uint32>}, {NPY_UINT64, mgpu_add_rows<npy_uint64>},
        {NPY_FLOAT32, mgpu_add_rows<npy_float32>}, {NPY_FLOAT64, mgpu_add_rows<npy_float64>},
        {NPY_COMPLEX64, mgpu_add_rows<std::complex<npy_float32> >},
        {NPY_COMPLEX128, mgpu_add_rows<std::complex<npy_float64> >}};
    PyArrayObject *places = NULL, *given = NULL, *one_row = NULL;
    PyArrayIterObject *it = NULL, *row = NULL;
    npy_intp shape[NPY_MAXDIMS], n;
    Add add = NULL;
    int failed = -1, ndim = PyArray_NDIM(a);

    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (types[i].type == PyArray_TYPE(a))
            add = types[i].add;
    if (add == NULL) {
        PyErr_SetString(PyExc_TypeError, "unsupported type for a");
        return -1;
    }
    if (PyArray_FailUnlessWriteable(a, "input/output array") < 0)
        return -1;
    places = (PyArrayObject*)PyArray_FROMANY(index, NPY_INTP, 1, 1, NPY_ARRAY_CARRAY | NPY_ARRAY_ENSURECOPY |
                                             NPY_ARRAY_FORCECAST);
    if (places == NULL)
        return -1;
    n = PyArray_SIZE(places);
    for (npy_intp i = 0; i < n; i++) {
        npy_intp* const at = (npy_intp*)PyArray_DATA(places) + i;
        const npy_intp length = PyArray_DIM(a, 0);
        if (*at < -length || *at >= length) {
            PyErr_Format(PyExc_IndexError, "index %zd is out of bounds for axis 0 with size %zd", (Py_ssize_t)*at,
                         (Py_ssize_t)length);
            goto end;
        }
        *at += *at < 0 ? length : 0;
    }
    Py_INCREF(PyArray_DESCR(a));
    given = (PyArrayObject*)PyArray_FromAny((PyObject*)values, PyArray_DESCR(a), 0, 0, NPY_ARRAY_ALIGNED |
                                            NPY_ARRAY_FORCECAST, NULL);
    if (given == NULL)
        goto end;
    memcpy(shape, PyArray_DIMS(a), ndim * sizeof *shape);
    shape[0] = n;
    it = (PyArrayIterObject*)PyArray_BroadcastToShape((PyObject*)given, shape, ndim);
    if (it == NULL)
        goto end;
    if (it->size) {
        Py_INCREF(PyArray_DESCR(a));
        one_row = (PyArrayObject*)PyArray_NewFromDescr(&PyArray_Type, PyArray_DESCR(a), ndim - 1, PyArray_DIMS(a) + 1,
                                                       PyArray_STRIDES(a) + 1, PyArray_DATA(a), 0, NULL);
        row = one_row ? (PyArrayIterObject*)PyArray_IterNew((PyObject*)one_row) : NULL;
        if (row == NULL)
            goto end;
        add(row, it, (npy_intp*)PyArray_DATA(places), n, PyArray_STRIDE(a, 0), adds);
    }
    failed = 0;
end:
    Py_XDECREF(row);
    Py_XDECREF(one_row);
    Py_XDECREF(it);
    Py_XDECREF(given);
    Py_DECREF(places);
    return failed;
}
