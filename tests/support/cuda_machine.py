"""A machine with NVIDIA's driver and wheels, made of the CUDA stand-in."""
import json
import shutil
import subprocess
import sys
from pathlib import Path

from cuda_on_cpu import build, environment

ROOT = Path(__file__).resolve().parent.parent.parent

# The first lines of each child process, which keep its shims apart.
HEAD = """
import os
import theano_mgpu as mgpu
from theano_mgpu.compat import cuda_libraries
from theano_mgpu.devices import discovery
from theano_mgpu.compat.cuda_libraries import shims
shims.folder = lambda: os.environ['SHIMS']
"""
ADD = HEAD + """
mgpu.init('dev0->cuda0')
import numpy as np
from pygpu import gpuarray
from pygpu.elemwise import elemwise2
from theano.gpuarray.type import get_context
a = gpuarray.array(np.arange(5, dtype='float32'), context=get_context('dev0'))
print(np.asarray(elemwise2(a, '+', a, a)).tolist())
"""
NVRTC = HEAD + "cuda_libraries.provide(); print(cuda_libraries.survey().libraries['libnvrtc.so'].path)"

WHEEL = r"""
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static const int architectures[] = {ARCHITECTURES};
#define COUNT ((int)(sizeof architectures / sizeof *architectures))
static void *real(const char *name) {
    static void *library;
    if (!library) library = dlopen(STANDIN, RTLD_NOW | RTLD_LOCAL);
    if (!library) { fprintf(stderr, "%s\n", dlerror()); abort(); }
    return dlsym(library, name);
}
#define FORWARD(type, name, parameters, arguments) \
    type name parameters { type (*function) parameters = (type (*) parameters)real(#name); return function arguments; }
FORWARD(int, nvrtcCreateProgram, (void *p, const char *s, const char *n, int c, const char **h, const char **m),
        (p, s, n, c, h, m))
FORWARD(int, nvrtcDestroyProgram, (void *p), (p))
FORWARD(int, nvrtcGetProgramLog, (void *p, char *log), (p, log))
FORWARD(int, nvrtcGetProgramLogSize, (void *p, size_t *n), (p, n))
FORWARD(int, nvrtcGetPTX, (void *p, char *ptx), (p, ptx))
FORWARD(int, nvrtcGetPTXSize, (void *p, size_t *n), (p, n))
FORWARD(const char *, nvrtcGetErrorString, (int error), (error))
int nvrtcVersion(int *major, int *minor) { *major = MAJOR; *minor = MINOR; return 0; }
#ifdef LISTS
int nvrtcGetNumSupportedArchs(int *count) { *count = COUNT; return 0; }
int nvrtcGetSupportedArchs(int *list) { memcpy(list, architectures, sizeof architectures); return 0; }
#endif
int nvrtcCompileProgram(void *p, int count, const char **options) {
    int (*function)(void *, int, const char **) = real("nvrtcCompileProgram");
    FILE *log = fopen(getenv("NVRTC_OPTIONS"), "a");
    int i, known = 0;
    for (i = 0; i < count; i++) {
        const char *number = strstr(options[i], "compute_");
        fprintf(log, "%s\n", options[i]);
        if (!number) continue;
        for (int j = 0; j < COUNT; j++) known |= architectures[j] == atoi(number + strlen("compute_"));
    }
    fclose(log);
    return known ? function(p, count, options) : 5;
}
"""


class Machine:
    """An installation in a folder: a driver on LD_LIBRARY_PATH, and wheels on PYTHONPATH, at first cuBLAS's."""

    def __init__(self, folder):
        self.folder = folder
        self.standin = Path(build(versioned=True))
        self.site, self.driver, self.shims = folder / 'site', folder / 'driver', folder / 'shims'
        self.options = folder / 'options'
        self.driver.mkdir()
        self.site.mkdir()
        (self.driver / 'libcuda.so.1').symlink_to(self.standin / 'libcuda.so.1')
        self.cublas = self.site / 'nvidia' / 'cublas' / 'lib' / 'libcublas.so.12'
        self.cublas.parent.mkdir(parents=True)
        shutil.copy(self.standin / self.cublas.name, self.cublas)

    def install_nvrtc(self, major, minor, architectures, folder=None, lists=True):
        """Put NVRTC of a version into its wheel's folder, or into another one; return its path."""
        name = 'libnvrtc.so.%s' % ('11.2' if major == 11 else major)
        path = (folder or self.site / 'nvidia' / ('cu13' if major == 13 else 'cuda_nvrtc') / 'lib') / name
        path.parent.mkdir(parents=True, exist_ok=True)
        defined = {'MAJOR': major, 'MINOR': minor, 'ARCHITECTURES': ','.join(map(str, architectures)),
                   'STANDIN': json.dumps(str(self.standin / 'libnvrtc.so.12'))}
        if lists:
            defined['LISTS'] = 1
        subprocess.run(['gcc', '-shared', '-fPIC', '-x', 'c', '-', '-o', str(path), '-Wl,-soname,' + name, '-ldl']
                       + ['-D%s=%s' % pair for pair in defined.items()], input=WHEEL, text=True, check=True)
        return path

    def environment(self, cc='8.6', driver=(12, 9), **variables):
        env = environment(2, cc=cc, version=1000 * driver[0] + 10 * driver[1])
        path = '%s:%s:%s' % (ROOT, self.site, env.get('PYTHONPATH', ''))
        env.update(LD_LIBRARY_PATH=str(self.driver), PYTHONPATH=path, SHIMS=str(self.shims),
                   NVRTC_OPTIONS=str(self.options))
        flags = variables.pop('THEANO_FLAGS', 'floatX=float32')
        # libgpuarray keeps binaries on disk, by source and by the two digits that are left of the architecture.
        return dict(env, THEANO_FLAGS='gpuarray.cache_path=%s,%s' % (self.folder / 'kernels', flags), **variables)

    def run(self, code, *args, **settings):
        """Run Python in a process of its own; return its output, or the last line of its errors."""
        done = subprocess.run([sys.executable, '-c', code], env=self.environment(*args, **settings), text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        if done.returncode:
            return (done.stderr.strip().splitlines() or ['exit code %d' % done.returncode])[-1]
        return done.stdout.strip()

    def architectures(self):
        """Return the architectures that NVRTC was asked for."""
        return set(self.options.read_text().split()) - {'-arch'}
