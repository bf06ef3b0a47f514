"""nvrtc: sources that compile, the architectures, and the cache on disk."""
import os
import subprocess
import sys

import pytest

from cuda_on_cpu import FOLDER, environment
from cuda_on_cpu.child import clean_environment, on_standin, python
from cuda_on_cpu.driver import KERNELS, CudaError, compile_source, fails_with

INVALID_OPTION, COMPILATION = 5, 6

COMPILE = 'from cuda_on_cpu.driver import *; print(len(compile_source(KERNELS)))'


@on_standin()
def test_architectures():
    for name in ('compute_70', 'compute_75', 'compute_90a', 'compute_100', 'compute_103', 'compute_120', 'sm_121'):
        compile_source('', '-arch', name)
    for name in ('compute_12', 'compute_x', 'sm_'):
        with fails_with(INVALID_OPTION):
            compile_source('', '--gpu-architecture=' + name)


@on_standin()
def test_the_architecture_is_a_macro():
    source = '#if __CUDA_ARCH__ != %d\n#error wrong\n#endif\n'
    compile_source(source % 750, '-arch=compute_75')
    with fails_with(COMPILATION):
        compile_source(source % 750, '-arch=compute_80')


@on_standin(quiet=1)
def test_what_nvrtc_does_not_have():
    try:
        compile_source('extern "C" __global__ void k(int *x) { x[0] = __ballot(1); }', '-arch=compute_70')
    except CudaError as exc:
        assert exc.code == COMPILATION and '__ballot' in exc.log
    else:
        raise AssertionError('__ballot has not been in nvrtc since compute capability 7.0')
    compile_source('extern "C" __global__ void k(int *x) { x[0] = __ballot(1); }', '-arch=compute_60')
    with fails_with(COMPILATION):
        compile_source('#include <stdio.h>\n')


def test_the_cache_is_made_with_its_parents_and_used(tmp_path):
    cache = tmp_path / 'a' / 'b'
    for _ in range(2):
        done = python('-c', COMPILE, cache=cache)
        assert done.returncode == 0 and not done.stderr, done.stderr
    assert [name[-3:] for name in os.listdir(str(cache))] == ['.so']
    done = python('-c', COMPILE, cache=cache, cxx='/nonexistent')  # the compiler is part of the key
    assert done.returncode and 'cannot run /nonexistent' in done.stderr


def test_two_processes_compile_the_same_kernel_at_once(tmp_path):
    env = environment(2, clean_environment(), cache=tmp_path / 'cache')
    env['PYTHONPATH'] = os.path.dirname(FOLDER)
    processes = [subprocess.Popen([sys.executable, '-c', COMPILE], env=env, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, universal_newlines=True) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert outputs[0] == outputs[1] and outputs[0].strip().isdigit(), outputs
    assert len(os.listdir(str(tmp_path / 'cache'))) == 1


@pytest.mark.parametrize('folder', ['file', 'file/below'])
def test_a_cache_that_cannot_be_made_is_an_error(tmp_path, folder):
    (tmp_path / 'file').write_text('')
    done = python('-c', COMPILE, cache=tmp_path / folder)
    assert done.returncode and 'cannot write to the cache' in done.stderr, done.stderr


def test_a_kernel_that_cannot_be_kept_runs_and_is_reported(tmp_path):
    assert python('-c', COMPILE, cache=tmp_path).returncode == 0
    kept, = tmp_path.iterdir()
    kept.unlink()
    kept.mkdir()  # a file cannot be renamed to it
    done = python('-c', COMPILE, cache=tmp_path)
    assert done.returncode == 0 and 'cannot keep a compiled kernel' in done.stderr, done.stderr


def test_sources_are_kept_as_they_were_given(tmp_path):
    done = python('-c', COMPILE, sources=tmp_path / 'sources')
    assert done.returncode == 0, done.stderr
    source, = (tmp_path / 'sources').iterdir()
    assert source.suffix == '.cu' and source.read_text() == KERNELS


def test_the_trace_has_allocations_and_launches(tmp_path):
    code = '''
from cuda_on_cpu.driver import *
device = Device(1)
address = device.allocate(64)
device.launch(device.kernel('poke'), 1, address, ctypes.c_long(0))
device.read(address, 1)
'''
    done = python('-c', code, trace=tmp_path / 'trace')
    assert done.returncode == 0, done.stderr
    lines = [line.split(maxsplit=2)[2] for line in (tmp_path / 'trace').read_text().splitlines()]
    assert [line.split()[:2] for line in lines] == [
        ['retain', 'dev1'], ['alloc', 'dev1'], ['launch', 'dev1'], ['DtoH', 'dev1']]
