/* cuBLAS whose handles compute products of float32 as TF32, with 10 bits of mantissa, on compute capability 8.0 and
   later. All other functions are those of the library that this one is linked with. */
#include <string.h>

#define CUBLAS_TF32_TENSOR_OP_MATH 3

typedef struct cublasContext *handle;
static int (*create)(handle *);            /* the real cublasCreate_v2 */
static int (*set_math_mode)(handle, int);  /* cublasSetMathMode */

void theano_mgpu_connect(void *real_create, void *real_set_math_mode) {
    memcpy(&create, &real_create, sizeof create);
    memcpy(&set_math_mode, &real_set_math_mode, sizeof set_math_mode);
}

int cublasCreate_v2(handle *result) {
    int status = create(result);
    return status ? status : set_math_mode(*result, CUBLAS_TF32_TENSOR_OP_MATH);
}
