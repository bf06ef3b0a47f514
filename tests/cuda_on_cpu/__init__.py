"""CUDA programs on the processor, by stand-ins for libcuda, libnvrtc, libcublas and others of NVIDIA's (README.md).

`build` makes the libraries, `environment` gives a child process the variables that select them, and
``python tests/cuda_on_cpu run COMMAND`` does both for a command.
"""
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import zlib

FOLDER = os.path.dirname(os.path.abspath(__file__))


class Unavailable(RuntimeError):
    """An error: the stand-in cannot be built or run on this machine; the message says why."""


def unavailable():
    """Return why the stand-in cannot run on this machine.

    Returns
    -------
    str or None
        The reason, for `pytest.skip`, or None where it can run.
    """
    if not sys.platform.startswith('linux') or platform.machine() != 'x86_64':
        return 'the CUDA stand-in needs x86-64 Linux, and this is %s on %s' % (platform.machine(), sys.platform)
    missing = [tool for tool in ('g++', 'make', 'flock') if not shutil.which(tool)]
    if missing:
        return 'the CUDA stand-in needs %s, which is not on the PATH' % ' and '.join(missing)
    if importlib.util.find_spec('pygpu') is None:
        return 'the CUDA stand-in needs pygpu, which is not installed for this Python'
    return None


def build(versioned=False, cudnn=None, tell=lambda line: None):
    """Compile the libraries where they are missing or older than their sources.

    Several processes may call this at once: one builds and the others wait. Without work to do it takes about 10 ms.

    Parameters
    ----------
    versioned : bool
        Name the libraries as an installed driver and pip's wheels do (``libcuda.so.1``, ``libnvrtc.so.12``,
        ``libcublas.so.12``), without the unversioned names that libgpuarray opens.
    cudnn : {7, 8, 9}, optional
        Build this version of cuDNN, too: `cudnn_folder`.
    tell : callable
        It gets a line for each file when its compilation begins, and when it is linked.

    Returns
    -------
    str
        The folder of the libraries but cuDNN, for LD_LIBRARY_PATH.

    Raises
    ------
    Unavailable
        Where the stand-in cannot be built; the message has the reason, or the compiler's output.
    """
    reason = unavailable()
    if reason:
        raise Unavailable(reason)
    # A make that called pytest passes on its options in MAKEFLAGS, such as -n or a jobserver that is closed by now.
    env = {name: value for name, value in os.environ.items() if name not in ('MAKEFLAGS', 'MAKELEVEL', 'MFLAGS')}
    variant = 'versioned' if versioned else 'plain'
    lines = []
    with subprocess.Popen(['make', '-C', FOLDER, '-j2', 'VARIANT=' + variant, 'CUDNN=%s' % (cudnn or '')], env=env,
                          text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as make:
        for line in make.stdout:
            lines.append(line)
            if line.startswith(('compile ', 'link ')):
                tell(line.rstrip())
    if make.returncode:
        raise Unavailable('make -C %s VARIANT=%s failed:\n%s' % (FOLDER, variant, ''.join(lines)[-3000:]))
    return os.path.join(FOLDER, 'lib-versioned' if versioned else 'lib')


def cudnn_folder(cudnn):
    """Return the folder of a version of cuDNN, which has its library in ``lib`` and its headers in ``include``."""
    return os.path.join(FOLDER, 'lib-cudnn%s' % cudnn)


def environment(devices=2, base=None, cudnn=None, **settings):
    """Return environment variables that make a child process use the stand-in; build it if need be.

    Parameters
    ----------
    devices : int
        Number of devices. CUDA_VISIBLE_DEVICES, where `base` has it, still chooses among them.
    base : dict, optional
        The variables to start from, `os.environ` by default. Its CUDA_ON_CPU_* settings stay where `settings` has
        none of that name.
    cudnn : {7, 8, 9}, optional
        The version of cuDNN; none by default.
    **settings
        ``name=value`` sets CUDA_ON_CPU_NAME; README.md lists the names. True and False become 1 and 0. With
        `processes`, `display` or `nvml_hang` there is NVML.

    Returns
    -------
    dict
        A new dict for the argument `env` of `subprocess.run`.

    Examples
    --------
    >>> env = environment(4, {}, memory='64M', poison=False)  # doctest: +SKIP
    >>> env['CUDA_ON_CPU_DEVICES'], env['CUDA_ON_CPU_MEMORY'], env['CUDA_ON_CPU_POISON']  # doctest: +SKIP
    ('4', '64M', '0')
    """
    env = dict(os.environ if base is None else base)
    libraries = build(cudnn=cudnn)
    tells_uses = {'processes', 'display', 'nvml_hang'} & {*settings}
    paths = (libraries, tells_uses and os.path.join(libraries, 'nvml'),
             cudnn and os.path.join(cudnn_folder(cudnn), 'lib'), env.get('LD_LIBRARY_PATH'))
    env['LD_LIBRARY_PATH'] = os.pathsep.join(path for path in paths if path)
    home = os.path.expanduser('~')
    cache = os.environ.get('XDG_CACHE_HOME') or os.path.join(home, '.cache')
    cache = env.setdefault('CUDA_ON_CPU_CACHE', os.path.join(cache, 'theano_mgpu', 'cuda_on_cpu'))
    theanorc = env.get('THEANORC', os.path.join(home, '.theanorc'))
    env['THEANORC'] = os.pathsep.join([theanorc, _theanorc(cache, libraries)])
    env['CUDA_ON_CPU_DEVICES'] = str(devices)
    for name, value in settings.items():
        env['CUDA_ON_CPU_' + name.upper()] = str(int(value) if isinstance(value, bool) else value)
    return env


def _theanorc(cache, libraries):
    """Return a file of Theano flags that keeps libgpuarray's binaries of kernels apart from the binaries of real GPUs.

    Binaries of another version of the stand-in are of no use either.
    """
    with open(os.path.join(libraries, 'libnvrtc.so'), 'rb') as library:
        folder = os.path.join(cache, 'gpuarray_%08x' % zlib.crc32(library.read()))
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, 'theanorc')
    with open('%s.%d' % (path, os.getpid()), 'w') as file:
        file.write('[gpuarray]\ncache_path = %s\n' % os.path.join(folder, 'kernels'))
    os.replace(file.name, path)
    return path
