"""Checks of `theano-mgpu doctor`: devices, the libraries that they need, and the contexts on them."""
import re

from ...devices import cuda_libraries, discovery
from ...devices.context_map import describe
from ...devices.contexts import init
from ..output import quietly
from . import libraries
from .host_checks import FAIL, OK, SKIP, Finding, broken, first_line, random_matrices, version_tuple


def check_pygpu(setup):
    gpu = setup.needs('cuda', 'opencl')
    remedy = ("Debian: apt-get install python3-pygpu, and a virtual environment that sees it: "
              '/usr/bin/python3 -m venv --system-site-packages .venv')
    try:
        import pygpu
        from pygpu.gpuarray import api_version
    except Exception as error:  # ImportError; ValueError where it was built for another NumPy
        if gpu:
            return Finding(FAIL, 'cannot be imported: ' + first_line(error), remedy)
        return Finding(SKIP, 'not available; needed for GPUs only (%s)' % first_line(error))
    if version_tuple(pygpu.__version__) != (0, 7) or api_version()[0] != 2:
        return broken(gpu, '%s, API %d; Theano 1.0.5 works with 0.7, API 2'
                      % (pygpu.__version__, api_version()[0]), remedy)
    return Finding(OK, '%s, API %d' % (pygpu.__version__, api_version()[0]))


def with_type(device):
    """An OpenCL device and its type, as text."""
    return '%s (%s)' % (device, discovery.type_of(device) or 'of unknown type')


def check_opencl(setup):
    found, why_none = discovery.discover('opencl')
    if found:
        listed = ', '.join(map(with_type, found))
        if discovery.opencl_cpus():
            listed += '; a CPU is used through OpenCL only if a context is mapped to it'
        return Finding(OK, listed)
    if setup.needs('opencl'):
        return Finding(FAIL, why_none, "Install the device's OpenCL driver (Debian: apt-get install "
                       'pocl-opencl-icd makes the CPU an OpenCL device), and see pygpu above')
    return Finding(SKIP, 'none: ' + why_none)


def check_clblast(setup):
    if not (setup.needs('opencl') or discovery.discover('opencl')[0]):
        return Finding(SKIP, 'no OpenCL device here')
    error = libraries.load_error('libclblast.so')
    if error:
        return broken(setup.needs('opencl'), 'gemm on OpenCL ends with "Missing Blas library": ' + error,
                      'Debian: apt-get install libclblast-dev (libclblast1 alone lacks this name)')
    return Finding(OK, 'gemm on OpenCL has its library')


def cuda_is_wanted(setup):
    """Whether to check CUDA: there is an NVIDIA GPU or its driver, or a context is mapped to one."""
    return setup.needs('cuda') or libraries.nvidia_gpu_present() or bool(cuda_libraries.survey().libraries)


def check_cuda(setup):
    found, why_none = discovery.discover('cuda')
    if found:
        return Finding(OK, ', '.join(found))
    if cuda_is_wanted(setup):
        return broken(setup.needs('cuda'), why_none, 'See the libraries below; does nvidia-smi list a GPU?')
    return Finding(SKIP, 'none: no NVIDIA GPU here')


def check_library(setup, name):
    """The file used for a CUDA library, its version, and the name by which libgpuarray loads it."""
    survey, purpose = cuda_libraries.survey(), libraries.CUDA_LIBRARIES[name]
    library = survey.libraries.get(name)
    if library is None:
        return check_unused_library(setup, name)
    if library.problem:
        if name in libraries.OPTIONAL:
            return Finding(SKIP, 'optional; ' + library.problem)
        return broken(setup.needs('cuda'), '%s needs it: %s' % (purpose, library.problem), library.remedy)
    version = cuda_libraries.dotted(library.version) or 'unknown version'
    if name == 'libcuda.so':
        version = 'the driver, for CUDA ' + version
    return Finding(OK, '%s: %s%s' % (version, library.path, ', through ' + library.shim if library.shim else ''))


def check_unused_library(setup, name):
    """`check_library` if the driver is missing or has no device: then no other library is opened."""
    purpose = libraries.CUDA_LIBRARIES[name]
    if name == 'libcuda.so':
        return broken(setup.needs('cuda'), "%s needs it: NVIDIA's driver is not installed" % purpose,
                      "Install NVIDIA's driver, which it comes with")
    found = cuda_libraries.candidates(name)
    if found:
        return Finding(SKIP, '%s; not tried: no CUDA device can be used' % found[0].path)
    if name in libraries.OPTIONAL:
        return Finding(SKIP, 'optional; not found')
    return broken(setup.needs('cuda'), '%s needs it: it is not installed' % purpose,
                  "python -m pip install 'theano_mgpu[cuda12]'")


def check_nvrtc(setup):
    """Whether the driver loads code that NVRTC compiles, and NVRTC supports the architecture of every device."""
    survey = cuda_libraries.survey()
    nvrtc, driver = survey.libraries.get('libnvrtc.so'), survey.libraries.get('libcuda.so')
    if nvrtc is None or nvrtc.problem or not survey.architectures:
        return Finding(SKIP, 'needs libcuda.so and libnvrtc.so')
    problem = cuda_libraries.nvrtc_problem(nvrtc.path, nvrtc.version, survey.architectures, driver.version,
                                           survey.capabilities)
    if problem:
        return broken(setup.needs('cuda'), problem, cuda_libraries.remedy(driver.version))
    compiled = ['compute_%d for compute capability %s' % (
        cuda_libraries.architecture_for(capability, survey.architectures), cuda_libraries.dotted(capability))
        for capability in sorted(set(survey.capabilities))]
    return Finding(OK, 'NVRTC %s compiles %s; the driver is for CUDA %s' % (
        cuda_libraries.dotted(nvrtc.version), ', '.join(compiled), cuda_libraries.dotted(driver.version)))


def check_context(setup, context):
    """Compare a gemm, an elementwise op and a sum on one context with NumPy."""
    import numpy as np
    import theano
    import theano.tensor as T

    from ... import function
    remedy = remedy_of(context)
    a, b = random_matrices()
    x = T.fmatrix('x')
    try:
        with quietly():
            init(describe([context]))
            hidden = T.tanh(T.dot(x, theano.shared(b)))
            f = function([x], [hidden, T.sum(hidden)], contexts=[context.name],
                         executor='serial')  # on this rank alone, if it is one
            results = f(a)
    except Exception as error:
        return Finding(FAIL, first_line(error), remedy)
    expected = np.tanh(np.dot(a, b))
    for what, result, right in zip(('tanh(dot(x, w))', 'its sum'), results, (expected, expected.sum())):
        if not np.allclose(result, right, rtol=1e-3, atol=1e-3):
            return Finding(FAIL, '%s is wrong by up to %.2g' % (what, np.abs(result - right).max()), remedy)
    on_host = [] if context.kind == 'cpu' else missing_gpu_ops(f.functions[0])
    if on_host:
        return Finding(FAIL, 'the numbers are right, but computed on the host: no %s' % ', '.join(on_host), remedy)
    return Finding(OK, "%s: gemm, elementwise and sum agree with NumPy's" % context.device)


def missing_gpu_ops(compiled):
    """The GPU ops that the graph of `check_context` should have, but has not."""
    ops = ' '.join(type(node.op).__name__ for node in compiled.maker.fgraph.toposort())
    return [name for name in ('GpuDot22|GpuGemm', 'GpuElemwise', 'GpuCAReduce') if not re.search(name, ops)]


def remedy_of(context):
    """The remedy for a context that does not compute."""
    if context.kind == 'cpu':
        return 'See Theano, compiler and BLAS above'
    others = [device for device in discovery.discover(context.kind)[0] if device != context.device] or ['cpu']
    return ('See pygpu, the devices and the libraries above; or map it to another device, e.g. contexts=%s->%s'
            % (context.name, others[0]))
