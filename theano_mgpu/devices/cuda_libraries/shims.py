"""Small shared libraries, compiled on this machine, that stand in front of NVIDIA's under the names libgpuarray opens.

``dlopen('libcublas.so')`` returns a library that is already loaded if that is its SONAME, and ``dlsym`` also searches
what it is linked with. So a library without any code, with the SONAME ``libcublas.so`` and linked with
``libcublas.so.12``, is all that libgpuarray needs. NVRTC's has code: it corrects the architecture option.
"""
import ctypes
import hashlib
import os
import shutil
import subprocess

from ...utils.files import whole_file
from . import search

# What libgpuarray 0.7.6 takes from NVRTC, in the order of `functions` below.
NVRTC_FUNCTIONS = ('nvrtcCreateProgram', 'nvrtcCompileProgram', 'nvrtcDestroyProgram', 'nvrtcGetProgramLog',
                   'nvrtcGetProgramLogSize', 'nvrtcGetPTX', 'nvrtcGetPTXSize', 'nvrtcGetErrorString')

EMPTY = '/* No code: only a name, and the library that it is linked with. */\n'

NVRTC = r"""/* Passes calls on to NVRTC, and compiles for the device that is really there. */
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
"""


class Unbuildable(Exception):
    """A shim cannot be compiled; the arguments are why, and what to do about it."""


def compiler():
    """The compiler that Theano uses, else one on the PATH.

    Returns
    -------
    str

    Raises
    ------
    Unbuildable
        If there is none.
    """
    for name in (_theano_flag('cxx', ''), 'c++', 'g++', 'gcc', 'cc'):
        if name and shutil.which(name):
            return name
    raise Unbuildable('CUDA devices need a C compiler, and there is none: the flag cxx of Theano is empty, and none of '
                      'c++, g++, gcc and cc is on the PATH',
                      'Debian: apt-get install g++ python3-dev. Another compiler: THEANO_FLAGS=cxx=/path/to/g++')


def folder():
    """Where the shims are kept, in Theano's folder of compiled code; it may be deleted at any time."""
    return os.path.join(_theano_flag('base_compiledir', os.path.expanduser('~/.theano')), 'cuda_libraries')


def build(name, text, linked_with=None):
    """Compile a library, or find it compiled.

    Parameters
    ----------
    name : str
        File name and SONAME: ``libcublas.so``.
    text : str
        C.
    linked_with : str or None
        Path of a library that it needs.

    Returns
    -------
    str
        Its path, in `folder`. Several processes may build it at once.

    Raises
    ------
    Unbuildable
        If there is no compiler, it fails, or the folder cannot be written.
    """
    stamp = os.stat(linked_with).st_mtime_ns if linked_with else 0
    key = hashlib.sha256(repr((name, text, linked_with, stamp)).encode()).hexdigest()[:24]
    path = os.path.join(folder(), key, name)
    if os.path.exists(path):
        return path
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with whole_file(path) as unfinished:
            _compile(unfinished, name, text, linked_with)
    except OSError as error:
        raise Unbuildable('%s, which CUDA devices need, could not be written: %s' % (name, error),
                          'Choose another folder: THEANO_FLAGS=base_compiledir=/path/to/folder') from error
    return path


def _compile(path, name, text, linked_with):
    command = [compiler(), '-x', 'c', '-shared', '-fPIC', '-O1', '-Wl,-soname,' + name, '-o', path, '-']
    if linked_with:
        # Distributions link only what is used by default, and nothing is used here.
        command += ['-x', 'none', '-Wl,--no-as-needed', linked_with]
    done = subprocess.run(command, input=text, universal_newlines=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    if done.returncode:
        raise Unbuildable('%s could not build %s, which CUDA devices need: %s'
                          % (command[0], name, ' '.join(done.stdout.split())[:400]),
                          'Debian: apt-get install g++ python3-dev. Another compiler: THEANO_FLAGS=cxx=/path/to/g++')


def connect_nvrtc(shim, nvrtc, driver, architectures):
    """Have the loaded shim of NVRTC pass calls on to the real one.

    Parameters
    ----------
    shim, nvrtc, driver : ctypes.CDLL
        The shim, the real NVRTC, and the driver. They stay loaded as long as the process lives.
    architectures : sequence of int
        What NVRTC supports: 75, 80, ..., 120.
    """
    functions = (ctypes.c_void_p * len(NVRTC_FUNCTIONS))(*[search.address(nvrtc, name) for name in NVRTC_FUNCTIONS])
    shim.theano_mgpu_connect.restype = None
    shim.theano_mgpu_connect(functions, ctypes.c_void_p(search.address(driver, 'cuCtxGetDevice')),
                             ctypes.c_void_p(search.address(driver, 'cuDeviceGetAttribute')),
                             (ctypes.c_int * len(architectures))(*architectures), len(architectures))


def _theano_flag(name, default):
    """A flag of Theano; `default` where Theano cannot be imported, as the doctor has to work there too."""
    try:
        import theano
        return getattr(theano.config, name)
    except Exception:
        return default
