"""Checks of `theano-mgpu doctor`: devices, the libraries that they need, and the contexts on them."""
from __future__ import annotations

import ctypes
import glob
import itertools
import json
import sys
import warnings

from ...compat import cuda_libraries
from ...devices import cards, cuda_contexts, discovery, peers
from ...devices.context_map import Context, describe
from ...devices.contexts import gpu_context, init
from ...utils.values import wrong
from .. import limited
from ..output import quietly
from . import sums
from .host_checks import FAIL, OK, SKIP, WARN, Finding, Setup, broken, first_line, random_matrices, version_tuple

# The shared libraries that libgpuarray opens by name, and the purpose of each.
CUDA_LIBRARIES = {'libcuda.so': 'every CUDA call', 'libnvrtc.so': 'every GPU kernel', 'libcublas.so': 'gemm',
                  'libnccl.so': 'sums between devices'}
LONGEST = 150  # seconds of a process that tries NCCL
SLOWER = 'without it, convolutions are several times slower'


def nvidia_gpu_present() -> bool:
    """Return whether this machine has an NVIDIA GPU with its driver (Linux, or WSL)."""
    return any(glob.glob(pattern) for pattern in ('/dev/nvidia[0-9]*', '/proc/driver/nvidia/gpus/*',
                                                  '/usr/lib/wsl/lib/libcuda.so*'))


def check_pygpu(setup: Setup) -> Finding:
    """Check that pygpu can be imported, in a version for Theano 1.0.5."""
    gpu = setup.needs('cuda', 'opencl')
    try:
        import pygpu
        from pygpu.gpuarray import api_version
    except Exception as error:  # ImportError; ValueError where it was built for another NumPy
        return (Finding(FAIL, 'cannot be imported: ' + first_line(error), discovery.INSTALL_PYGPU) if gpu else
                Finding(SKIP, 'not available; needed for GPUs only (%s)' % first_line(error)))
    version = '%s, API %d' % (pygpu.__version__, api_version()[0])
    if version_tuple(pygpu.__version__) != (0, 7) or api_version()[0] != 2:
        return broken(gpu, version + '; Theano 1.0.5 works with 0.7, API 2', discovery.INSTALL_PYGPU)
    return Finding(OK, version)


def with_type(device: str) -> str:
    """Return an OpenCL device and its type, as text."""
    return '%s (%s)' % (device, discovery.type_of(device) or 'of unknown type')


def check_opencl(setup: Setup) -> Finding:
    """Check that there is an OpenCL device."""
    devices, why_none = discovery.discover('opencl')
    if devices:
        listed = ', '.join(map(with_type, devices))
        if discovery.opencl_cpus():
            listed += '; a CPU is used through OpenCL only if a context is mapped to it'
        return Finding(OK, listed)
    if setup.needs('opencl'):
        return Finding(FAIL, why_none, "Install the device's OpenCL driver (Debian: apt-get install "
                       'pocl-opencl-icd makes the CPU an OpenCL device), and see pygpu above')
    return Finding(SKIP, 'none: ' + why_none)


def check_clblast(setup: Setup) -> Finding:
    """Check that gemm on OpenCL has its library."""
    if not (setup.needs('opencl') or discovery.discover('opencl')[0]):
        return Finding(SKIP, 'no OpenCL device here')
    try:
        ctypes.CDLL('libclblast.so')
    except OSError as error:
        return broken(setup.needs('opencl'), 'gemm on OpenCL ends with "Missing Blas library": %s' % error,
                      'Debian: apt-get install libclblast-dev (libclblast1 alone lacks this name)')
    return Finding(OK, 'gemm on OpenCL has its library')


def cuda_is_wanted(setup: Setup) -> bool:
    """Return whether to check CUDA: there is an NVIDIA GPU or its driver, or a context is mapped to one."""
    return setup.needs('cuda') or nvidia_gpu_present() or bool(cuda_libraries.survey().libraries)


def check_cuda(setup: Setup) -> Finding:
    """Check that there is a CUDA device, if that is wanted."""
    devices, why_none = discovery.discover('cuda')
    if devices:
        all_cards, out = cards.cards(), cards.left_out(tuple(devices), for_good=False)
        if not cards.differ(all_cards):
            left_out = map('; %s is left out by default: %s'.__mod__, out.items())
            return Finding(OK, ', '.join(devices) + ''.join(left_out))
        return Finding(OK, cards.order_note(all_cards) or ', '.join(
            '%s is %s' % (card.device, cards.in_smi(card)) for card in all_cards))
    if cuda_is_wanted(setup):
        return broken(setup.needs('cuda'), why_none, 'See the libraries below; does nvidia-smi list a GPU?')
    return Finding(SKIP, 'none: no NVIDIA GPU here')


def check_library(setup: Setup, name: str) -> Finding:
    """Check a CUDA library: its file, its version, and the name by which libgpuarray loads it."""
    library = cuda_libraries.survey().libraries.get(name)
    if library and not library.problem:
        version = cuda_libraries.dotted(library.version) or 'unknown version'
        if name == 'libcuda.so':
            version = 'the driver, for CUDA ' + version
        return Finding(OK, '%s: %s%s%s' % (version, library.path, ', through ' + library.shim if library.shim else '',
                                           library.detail and '; ' + library.detail))
    if library:
        problem, remedy = library.problem, library.remedy
    # The driver is missing or has no device: then no other library is opened.
    elif name == 'libcuda.so':
        problem, remedy = "NVIDIA's driver is not installed", "Install NVIDIA's driver, which it comes with"
    elif cuda_libraries.candidates(name):
        return Finding(SKIP, '%s; not tried: no CUDA device can be used' % cuda_libraries.candidates(name)[0].path)
    else:
        problem = 'it is not installed' if name in cuda_libraries.REQUIRED else 'not found'
        remedy = "python -m pip install 'theano_mgpu[cuda12]'"
    if name not in cuda_libraries.REQUIRED:
        return Finding(SKIP, 'optional; ' + problem)
    return broken(setup.needs('cuda'), '%s needs it: %s' % (CUDA_LIBRARIES[name], problem), remedy)


def check_nvrtc(setup: Setup) -> Finding:
    """Check that the libraries support every device, and tell for which architectures NVRTC compiles."""
    survey = cuda_libraries.survey()
    nvrtc, driver = survey.libraries.get('libnvrtc.so'), survey.libraries.get('libcuda.so')
    if nvrtc is None or driver is None or nvrtc.problem or not survey.architectures:
        return Finding(SKIP, 'needs libcuda.so and libnvrtc.so')
    for device in map('cuda%d'.__mod__, range(len(survey.capabilities))):
        problem = cuda_libraries.why_not(device)
        if problem:
            return Finding(WARN, '%s is left out: %s' % (device, problem), cuda_libraries.remedy(driver.version))
    compiled = ['compute_%d for compute capability %s' % (
        cuda_libraries.architecture_for(capability, survey.architectures), cuda_libraries.dotted(capability))
        for capability in sorted(set(survey.capabilities))]
    return Finding(OK, 'NVRTC %s compiles %s; the driver is for CUDA %s' % (
        cuda_libraries.dotted(nvrtc.version), ', '.join(compiled), cuda_libraries.dotted(driver.version)))


def check_libgpuarray(setup: Setup) -> Finding:
    """Check that libgpuarray leaves no CUDA context current, or that the patch prevents it on two of them."""
    devices = discovery.discover('cuda')[0]
    if not devices:  # or there is no pygpu
        return Finding(SKIP, 'no CUDA device here')
    import pygpu
    out = list(cards.left_out(tuple(devices), for_good=False))
    used = (([device for device in devices if device not in out] or out[:1]) * 2)[:2]
    with quietly():
        contexts = [pygpu.init(device) for device in used]
        leaked = cuda_contexts.entries_left(contexts[0])
        for context in contexts:
            cuda_contexts.protect(context)
        left = sum(cuda_contexts.entries_left(context) for context in contexts)
    version = 'libgpuarray of pygpu ' + pygpu.__version__
    if left:
        return Finding(FAIL, '%s leaves a context current, and the patch does not help: several CUDA contexts in one '
                       'process will fail' % version, 'Use one process for each device: theano-mgpu launch')
    found = 'leaves a context current when it has a kernel already; with the patch of theano_mgpu it does not' \
        if leaked else 'leaves contexts as they were'
    return Finding(OK, '%s %s, on %s and %s' % (version, found, *used))


def check_cudnn(setup: Setup) -> Finding:
    """Check that cuDNN is installed with its headers, and that Theano's convolutions compile with it."""
    if not cuda_libraries.survey().capabilities:
        return Finding(SKIP, 'not tried: no CUDA device can be used')
    cudnn = cuda_libraries.find_cudnn()
    if not cudnn.problem:
        return Finding(OK, '%s: %s, headers in %s' % (cuda_libraries.dotted(cudnn.version), cudnn.path, cudnn.include))
    if cudnn.path is None:
        return Finding(SKIP, 'optional; %s; %s%s' % (cudnn.problem, SLOWER, cudnn.remedy and ': ' + cudnn.remedy))
    return Finding(WARN, '%s; %s' % (cudnn.problem, SLOWER), cudnn.remedy)


def check_convolution(setup: Setup, context: Context) -> Finding:
    """Check that a context takes cuDNN, which has to compute a convolution and its gradients as NumPy does."""
    from theano.gpuarray import dnn
    if cuda_libraries.find_cudnn().problem:
        return Finding(SKIP, 'needs cuDNN')
    try:
        with quietly():
            init(describe([context]))
            dnn.dnn_available(context.name)  # opening the context makes a handle, and this tries the convolution
    except Exception as error:
        return Finding(FAIL, first_line(error), 'Do without cuDNN: THEANO_FLAGS=dnn.enabled=False')
    if not dnn.dnn_available(context.name):
        return Finding(WARN, '%s; %s' % (dnn.dnn_available.msg, SLOWER), 'Install another version of cuDNN (python '
                       '-m pip index versions nvidia-cudnn-cu12, or -cu13, lists them), or do without: '
                       'THEANO_FLAGS=dnn.enabled=False')
    return Finding(OK, "%s: a convolution and its gradients agree with NumPy's" % context.device)


def check_context(setup: Setup, context: Context) -> Finding:
    """Compare a gemm, an elementwise op and a sum on one context with NumPy."""
    import numpy as np
    import theano
    import theano.tensor as T

    from ... import audit, function
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
        fault = wrong(result, right, 1e-3, 1e-3)
        if fault:
            return Finding(FAIL, '%s %s' % (what, fault), remedy)
    on_host = sorted({str(entry.op) for entry in audit(f).host})
    if on_host:
        return Finding(FAIL, 'the numbers are right, but computed on the host: ' + ', '.join(on_host), remedy)
    return Finding(OK, "%s: gemm, elementwise and sum agree with NumPy's" % context.device)


def check_copies(setup: Setup) -> Finding:
    """Copy between each two CUDA devices of the contexts, and say which copy without the host."""
    with warnings.catch_warnings(), quietly():
        warnings.simplefilter('ignore')  # of wrong copies
        init(describe(setup.contexts))
        used = {context.device: gpu_context(context) for context in setup.contexts if context.kind == 'cuda'}
        found = {'%s and %s' % pair: peers.path(*map(used.__getitem__, pair))
                 for pair in itertools.combinations(used, 2)}
    listed = {path: ', '.join(pair for pair in found if found[pair] == path) for path in found.values()}
    text = '; '.join('%s: %s' % each for each in listed.items())
    if peers.WRONG in listed:
        return Finding(WARN, 'directly, %s give each other wrong bytes, so their copies go through the host'
                       % listed[peers.WRONG], 'Turn off the IOMMU, or Access Control Services (ACS) of PCIe bridges; '
                       'NCCL may need NCCL_P2P_DISABLE=1')
    return Finding(OK, text) if found else Finding(SKIP, 'all contexts are on one device')


def check_collectives(setup: Setup) -> Finding:
    """Check a sum that all contexts have parts of, in a process of its own, in which NCCL may hang."""
    ended = limited.run([sys.executable, '-m', sums.__name__, describe(setup.contexts)], LONGEST)
    found = [line for line in ended.text.splitlines() if line.startswith(sums.MARK)]
    if found:
        return Finding(*json.loads(found[-1][len(sums.MARK):]))
    hang = 'has not ended within %g s' % LONGEST if ended.code is None else 'ended with exit code %d' % ended.code
    last = ''.join(ended.text.splitlines()[-1:])
    return Finding(FAIL, 'a process that adds a sum over the contexts %s: %s' % (hang, last), sums.REMEDY)


def remedy_of(context: Context) -> str:
    """Return the remedy for a context that does not compute."""
    if context.kind == 'cpu':
        return 'See Theano, compiler and BLAS above'
    others = [device for device in discovery.discover(context.kind)[0] if device != context.device] or ['cpu']
    return ('See pygpu, the devices and the libraries above; or map it to another device, e.g. contexts=%s->%s'
            % (context.name, others[0]))
