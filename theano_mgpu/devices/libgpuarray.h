// Structs of libgpuarray 0.7 (src/private.h). `native.build` puts this text before a source that needs them.
#include <cstddef>

namespace {

// The beginnings of libgpuarray's own structs, from private.h.
struct BufferTable;
struct BlasTable;
struct CommTable;
struct Context { const BufferTable *buffer; const BlasTable *blas; const CommTable *comm; };
struct Array { void *address; Context *context; };
struct Kernel { Context *context; };
struct Comm { Context *context; };

struct BufferTable {
    int (*get_platform_count)(unsigned *);
    int (*get_device_count)(unsigned, unsigned *);
    Context *(*init)(void *);
    void (*deinit)(Context *);
    Array *(*alloc)(Context *, size_t, void *, int);
    void (*retain)(Array *);
    void (*release)(Array *);
    int (*share)(Array *, Array *);
    int (*move)(Array *, size_t, Array *, size_t, size_t);
    int (*read)(void *, Array *, size_t, size_t);
    int (*write)(Array *, size_t, const void *, size_t);
    int (*memset)(Array *, size_t, int);
    int (*kernel_alloc)(Kernel **, Context *, unsigned, const char **, const size_t *, const char *, unsigned,
                        const int *, int, char **);
    void (*kernel_retain)(Kernel *);
    void (*kernel_release)(Kernel *);
    int (*kernel_setarg)(Kernel *, unsigned, void *);
    int (*kernel_call)(Kernel *, unsigned, const size_t *, const size_t *, size_t, void **);
    int (*sync)(Array *);
    int (*transfer)(Array *, size_t, Array *, size_t, size_t);
    int (*property)(Context *, Array *, Kernel *, int, void *);
    const char *(*error)(Context *);
};

}
