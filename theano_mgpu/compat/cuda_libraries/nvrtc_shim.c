/* Passes calls on to NVRTC, and compiles for the device that is really there. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COMPUTE_CAPABILITY_MAJOR 75
#define COMPUTE_CAPABILITY_MINOR 76
#define INTERNAL_ERROR 11
#define MAX_ARCHITECTURES 256

typedef struct program *program;
typedef const char **texts;
static struct {
    int (*create)(program *, const char *, const char *, int, texts, texts);
    int (*compile)(program, int, texts);
    int (*destroy)(program *);
    int (*log)(program, char *);
    int (*log_size)(program, size_t *);
    int (*ptx)(program, char *);
    int (*ptx_size)(program, size_t *);
    const char *(*error_string)(int);
} real;                                           /* all NULL until theano_mgpu_connect */
static int (*get_device)(int *);                  /* cuCtxGetDevice */
static int (*get_attribute)(int *, int, int);     /* cuDeviceGetAttribute */
static int supported[MAX_ARCHITECTURES], n_supported;

void theano_mgpu_connect(void **functions, void *device, void *attribute, const int *architectures, int count) {
    memcpy(&real, functions, sizeof real);
    memcpy(&get_device, &device, sizeof device);
    memcpy(&get_attribute, &attribute, sizeof attribute);
    n_supported = count < MAX_ARCHITECTURES ? count : MAX_ARCHITECTURES;
    memcpy(supported, architectures, n_supported * sizeof *supported);
}

/* The newest architecture that both NVRTC and the current context's device support; 0 without a current context.
   A newer device runs the PTX of an older architecture. */
static int architecture(void) {
    int device, major, minor, i, best = 0;
    if (get_device(&device) || get_attribute(&major, COMPUTE_CAPABILITY_MAJOR, device) ||
        get_attribute(&minor, COMPUTE_CAPABILITY_MINOR, device))
        return 0;
    for (i = 0; i < n_supported; i++)
        if (supported[i] <= 10 * major + minor && supported[i] > best) best = supported[i];
    return best ? best : 10 * major + minor;
}

static int starts_with(const char *text, const char *start) { return !strncmp(text, start, strlen(start)); }

/* libgpuarray passes "-arch", "compute_XX" with two digits, cut off where the capability is 10.0 or more. */
int nvrtcCompileProgram(program p, int count, texts options) {
    char option[64];
    texts corrected = NULL;
    int i, result, right = real.compile ? architecture() : 0;
    if (!real.compile) return INTERNAL_ERROR;
    if (right) corrected = malloc((count + 1) * sizeof *corrected);
    if (!corrected) return real.compile(p, count, options);
    snprintf(option, sizeof option, "--gpu-architecture=compute_%d", right);
    for (i = 0; i < count; i++) {
        corrected[i] = options[i];
        if (starts_with(options[i], "-arch=compute_") || starts_with(options[i], "--gpu-architecture=compute_"))
            corrected[i] = option;
        else if (i && (!strcmp(options[i - 1], "-arch") || !strcmp(options[i - 1], "--gpu-architecture")) &&
                 starts_with(options[i], "compute_"))
            corrected[i] = strchr(option, '=') + 1;
    }
    result = real.compile(p, count, corrected);
    free(corrected);
    return result;
}

int nvrtcCreateProgram(program *p, const char *source, const char *name, int count, texts headers, texts names) {
    return real.create ? real.create(p, source, name, count, headers, names) : INTERNAL_ERROR;
}
int nvrtcDestroyProgram(program *p) { return real.destroy ? real.destroy(p) : INTERNAL_ERROR; }
int nvrtcGetProgramLog(program p, char *log) { return real.log ? real.log(p, log) : INTERNAL_ERROR; }
int nvrtcGetProgramLogSize(program p, size_t *size) { return real.log_size ? real.log_size(p, size) : INTERNAL_ERROR; }
int nvrtcGetPTX(program p, char *ptx) { return real.ptx ? real.ptx(p, ptx) : INTERNAL_ERROR; }
int nvrtcGetPTXSize(program p, size_t *size) { return real.ptx_size ? real.ptx_size(p, size) : INTERNAL_ERROR; }
const char *nvrtcGetErrorString(int error) {
    return real.error_string ? real.error_string(error) : "theano_mgpu found no NVRTC that it can use";
}
