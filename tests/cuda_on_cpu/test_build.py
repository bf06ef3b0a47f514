"""The build, the versioned names, and the command line."""
import ctypes
import os
import shutil
import subprocess
import sys

import pytest

from cuda_on_cpu import FOLDER, Unavailable, build, environment, unavailable
from cuda_on_cpu.child import clean_environment, python


def times(folder):
    return {name: os.stat(os.path.join(folder, name)).st_mtime_ns for name in os.listdir(folder)}


@pytest.mark.slow
def test_a_second_build_changes_nothing():
    folder = build()
    before = times(folder)
    assert sorted(before) == ['libcublas.so', 'libcuda.so', 'libnccl.so.2', 'libnvrtc.so', 'nvml', 'prelude']
    assert build() == folder and times(folder) == before


@pytest.mark.slow
def test_the_versioned_build_has_the_names_of_a_driver_and_of_wheels():
    folder = build(versioned=True)
    assert sorted(os.listdir(folder)) == ['libcublas.so.12', 'libcuda.so.1', 'libnccl.so.2', 'libnvrtc.so.12',
                                          'nvml', 'prelude']
    # A library that is loaded is found by its soname, whatever its path.
    code = '''
import ctypes, sys
folder = sys.argv[1]
for name in ('libcuda.so.1', 'libnvrtc.so.12', 'libcublas.so.12'):
    ctypes.CDLL(folder + '/' + name)
    ctypes.CDLL(name)
cuda, version = ctypes.CDLL('libcuda.so.1'), ctypes.c_int()
assert cuda.cuInit(0) == 0
assert all(folder in line for line in open('/proc/self/maps') if 'libcu' in line or 'libnvrtc' in line)
'''
    env = clean_environment()
    env.pop('LD_LIBRARY_PATH', None)
    subprocess.run([sys.executable, '-c', code, folder], env=env, check=True)


@pytest.mark.slow
def test_nvrtc_finds_its_headers_through_a_link(tmp_path):
    for name, target in (('libcuda.so', 'libcuda.so.1'), ('libnvrtc.so', 'libnvrtc.so.12')):
        (tmp_path / name).symlink_to(os.path.join(build(versioned=True), target))
    code = 'from cuda_on_cpu.driver import *; Device(0).kernel("poke")'
    env = environment(1, clean_environment(), cache=tmp_path / 'cache')
    env.update(LD_LIBRARY_PATH=str(tmp_path), PYTHONPATH=os.path.dirname(FOLDER))
    subprocess.run([sys.executable, '-c', code], env=env, check=True)


def test_environment(tmp_path):
    base = {'LD_LIBRARY_PATH': '/elsewhere', 'CUDA_ON_CPU_SEED': '3', 'THEANORC': '/mine'}
    env = environment(4, base, memory='64M', poison=False)
    assert env['LD_LIBRARY_PATH'] == build() + ':/elsewhere'
    assert {name: env['CUDA_ON_CPU_' + name] for name in ('DEVICES', 'MEMORY', 'POISON', 'SEED')} == {
        'DEVICES': '4', 'MEMORY': '64M', 'POISON': '0', 'SEED': '3'}
    assert env['THEANORC'].startswith('/mine:' + env['CUDA_ON_CPU_CACHE'])
    assert base == {'LD_LIBRARY_PATH': '/elsewhere', 'CUDA_ON_CPU_SEED': '3', 'THEANORC': '/mine'}


def test_without_a_compiler_there_is_a_reason(monkeypatch, tmp_path):
    monkeypatch.setenv('PATH', str(tmp_path))
    assert 'g++' in unavailable()
    with pytest.raises(Unavailable, match='g\\+\\+'):
        build()


def test_the_command_line_runs_a_command():
    code = 'from cuda_on_cpu.driver import *; print(out(ctypes.c_int, "cuDeviceGetCount").value)'
    done = python(FOLDER, 'run', '--devices', '3', '--set', 'quiet=1', sys.executable, '-c', code)
    assert (done.returncode, done.stdout) == (0, '3\n'), done.stderr
    done = python(FOLDER, 'build', '--versioned')
    assert done.stdout == build(versioned=True) + '\n'


@pytest.mark.parametrize('arguments, message', [
    (['run'], 'a COMMAND is missing'),
    (['run', '--set', 'MEMORY', 'true'], "'MEMORY' is not NAME=VALUE"),
    (['run', 'no-such-command'], 'cannot run no-such-command: No such file'),
])
def test_the_command_line_explains_what_is_wrong(arguments, message):
    done = python(FOLDER, *arguments)
    assert done.returncode and message in done.stderr and 'Traceback' not in done.stderr


def test_a_build_tells_what_it_does(monkeypatch, tmp_path):
    shutil.copy(os.path.join(FOLDER, 'Makefile'), str(tmp_path))
    for name in ('driver', 'nvrtc', 'cublas', 'nccl', 'nvml'):
        (tmp_path / 'src' / name).mkdir(parents=True)
        (tmp_path / 'src' / name / 'empty.cpp').touch()
    monkeypatch.setattr('cuda_on_cpu.FOLDER', str(tmp_path))
    lines = []
    build(tell=lines.append)
    assert len(lines) == 10 and {'compile build/driver.o', 'link lib/libcuda.so'} < set(lines)
    build(tell=lines.append)
    assert len(lines) == 10
    (tmp_path / 'src' / 'nccl' / 'empty.cpp').write_text('no C++')
    with pytest.raises(Unavailable, match='empty.cpp:1:1: error'):
        build()


@pytest.mark.slow
def test_two_builds_at_once(tmp_path):
    copy = tmp_path / 'cuda_on_cpu'
    copy.mkdir()
    shutil.copy(os.path.join(FOLDER, 'Makefile'), str(copy))
    shutil.copytree(os.path.join(FOLDER, 'src'), str(copy / 'src'))
    env = {name: value for name, value in os.environ.items() if name not in ('MAKEFLAGS', 'MAKELEVEL', 'MFLAGS')}
    processes = [subprocess.Popen(['make', '-C', str(copy)], env=env, stdout=subprocess.PIPE) for _ in range(2)]
    outputs = [process.communicate()[0].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted('link lib/libcuda.so' in output for output in outputs) == [False, True]
    ctypes.CDLL(str(copy / 'lib' / 'libcuda.so'))
