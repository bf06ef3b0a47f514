"""`theano-mgpu doctor`: each check, its remedy, and the exit code."""
import contextlib
import ctypes
import json
import sys

import theano_mgpu as mgpu
from theano_mgpu.cli import main
from theano_mgpu.cli.doctor import device_checks, host_checks
from theano_mgpu.compat import cuda_libraries
from theano_mgpu.devices import discovery
from theano_mgpu.devices.context_map import parse_context_map

import numpy as np
import pytest
import theano
from cli_fixtures import *  # noqa: F403  the fixtures
from support.processes import python
from support.search_path import search_path

STATUSES = {'ok', 'warn', 'FAIL', 'skip'}


def command(*args, environment=None):
    """Run ``python -m theano_mgpu`` afresh, with only the given flags."""
    return python('-m', 'theano_mgpu', *args, expected=None, **{'THEANO_FLAGS': '', **(environment or {})})


def run_doctor(capsys):
    """Run the doctor in this process; return (exit code, {name: check})."""
    code = main(['doctor', '--json'])
    report = json.loads(capsys.readouterr().out)
    assert report['healthy'] == (code == 0)
    return code, {check['name']: check for check in report['checks']}


def lines_of(text):
    """Return the doctor's text as {name: (status, rest, remedy lines)}."""
    found = {}
    for line in text.splitlines():
        name, status = line[:14].strip(), line[16:20].strip()
        if name and status in STATUSES:
            last = found[name] = (status, line[22:], [])
        elif line.startswith(' ' * 22):
            last[2].append(line.strip())
    return found


@pytest.mark.slow
def test_a_machine_without_gpu_is_healthy(capsys, cpu_only):
    code, found = run_doctor(capsys)
    assert code == 0
    statuses = {name: check['status'] for name, check in found.items()}
    assert {name: statuses[name] for name in ('Python', 'NumPy', 'Theano', 'contexts', 'context cli_a',
                                              'context cli_b')} == dict.fromkeys(
        ['Python', 'NumPy', 'Theano', 'contexts', 'context cli_a', 'context cli_b'], 'ok')
    assert {statuses[name] for name in ('OpenCL devices', 'libclblast.so', 'CUDA devices')} == {'skip'}
    assert not set(device_checks.CUDA_LIBRARIES) & set(found)
    assert found['NumPy']['text'] == np.__version__
    assert found['contexts']['text'] == 'cli_a->cpu;cli_b->cpu, from THEANO_FLAGS'
    assert all(check['remedy'] for check in found.values() if check['status'] in ('fail', 'warn'))


@pytest.mark.slow
def test_doctor_on_real_devices_and_one_that_is_not_there(opencl):
    platform = opencl[0].partition(':')[0]
    done = command('doctor', environment={
        'THEANO_FLAGS': 'contexts=dev0->%s:77;dev1->%s;host->cpu' % (platform, opencl[0])})
    assert done.returncode == 1 and 'Traceback' not in done.stderr and 'Mapped name' not in done.stderr
    found = lines_of(done.stdout)
    assert found['compiler'][0] == 'ok' and 'a small module builds, loads and runs' in found['compiler'][1]
    assert found['pygpu'][0] == 'ok' and found['pygpu'][1].endswith(', API 2')
    assert all('%s (%s)' % (device, discovery.type_of(device)) in found['OpenCL devices'][1] for device in opencl)
    status, text, remedy = found['context dev0']
    assert status == 'FAIL'
    assert text.startswith('context dev0->%s:77 could not be opened: Device ID out of range. There is:' % platform)
    assert remedy and remedy[0].startswith('remedy: ') and 'contexts=dev0->%s' % opencl[0] in remedy[0]
    assert found['context dev1'][:2] == (
        'ok', "%s: gemm, elementwise and sum agree with NumPy's" % opencl[0])
    assert found['context host'][0] == 'ok'
    assert done.stdout.splitlines()[-2:] == [
        'Broken: context dev0.', 'Advice: apply the remedy of context dev0 first, then run theano-mgpu doctor again.']


def test_opencl_without_its_blas(tmp_path, opencl):
    (tmp_path / 'libclblast.so').write_text('no library')  # found before the real one
    done = command('doctor', environment={'THEANO_FLAGS': 'contexts=dev0->' + opencl[0],
                                          'LD_LIBRARY_PATH': str(tmp_path)})
    assert done.returncode == 1
    found = lines_of(done.stdout)
    assert found['libclblast.so'][0] == 'FAIL' and 'Missing Blas library' in found['libclblast.so'][1]
    assert found['libclblast.so'][2] == ['remedy: Debian: apt-get install libclblast-dev (libclblast1 alone lacks '
                                         'this name)']
    # The real computation finds it out too.
    assert found['context dev0'][0] == 'FAIL' and 'Missing Blas library' in found['context dev0'][1]


def test_no_compiler_is_slow_on_a_cpu_and_fatal_on_a_gpu(opencl):
    done = command('doctor', environment={'THEANO_FLAGS': 'cxx=,contexts=host->cpu;dev0->' + opencl[0]})
    found = lines_of(done.stdout)
    assert done.returncode == 1
    assert found['compiler'][:2] == ('FAIL', 'none: Theano needs one to use a GPU')
    assert 'apt-get install g++' in found['compiler'][2][0]
    assert found['BLAS'][0] == 'skip' and found['context host'][0] == 'ok' and found['context dev0'][0] == 'FAIL'


@pytest.mark.slow
def test_doctor_reports_a_malformed_map_and_goes_on(capsys, monkeypatch):
    monkeypatch.setenv('THEANO_FLAGS', 'contexts=dev0->cpu;dev0->cpu')
    assert main(['doctor']) == 1
    text = capsys.readouterr().out
    found = lines_of(text)
    status, message, remedy = found['contexts']
    assert status == 'FAIL' and message.startswith("context 'dev0' is mapped twice in 'dev0->cpu;dev0->cpu'")
    assert remedy == ['remedy: Fix the flag `contexts` in THEANO_FLAGS or .theanorc']
    assert found['BLAS'][0] in ('ok', 'warn', 'skip') and 'CUDA devices' in found
    assert 'Broken: contexts.\nAdvice: apply the remedy of contexts first' in text


def test_a_check_that_raises_does_not_end_the_diagnosis(capsys, cpu_only, monkeypatch):
    def check_mpi(setup):
        raise KeyError('surprise')
    monkeypatch.setattr(host_checks, 'check_mpi', check_mpi)
    code, found = run_doctor(capsys)
    assert code == 1 and found['mpi4py']['status'] == 'fail' and found['mpi4py']['text'] == 'KeyError: surprise'
    assert found['context cli_b']['status'] == 'ok'


def test_theano_that_cannot_be_imported(capsys, cpu_only, monkeypatch):
    monkeypatch.setattr(mgpu, 'theano_error', AttributeError("module 'numpy' has no attribute 'x'"), raising=False)
    code, found = run_doctor(capsys)
    assert code == 1
    assert found['Theano']['text'] == "cannot be imported: module 'numpy' has no attribute 'x'"
    assert 'NumPy' in found['Theano']['remedy']
    assert found['context cli_a'] == dict(name='context cli_a', status='skip', text='needs Theano', remedy='')
    assert main(['devices']) == 1
    assert "Theano cannot be imported: module 'numpy' has no attribute 'x'" in capsys.readouterr().err
    assert main(['config', '-n', '1', '--kind', 'cpu']) == 0


def test_cuda_is_checked_where_there_is_an_nvidia_gpu(capsys, cpu_only, monkeypatch):
    with contextlib.suppress(OSError):
        ctypes.CDLL('libcuda.so')
        pytest.skip("NVIDIA's driver is here")
    monkeypatch.setattr(device_checks, 'nvidia_gpu_present', lambda: True)
    monkeypatch.setattr(cuda_libraries, 'candidates', lambda name: [])
    code, found = run_doctor(capsys)
    assert code == 0  # no context is mapped to the GPU
    assert [found[name]['status'] for name in ('CUDA devices', 'libcuda.so', 'libnvrtc.so', 'libcublas.so',
                                               'libnccl.so')] == ['warn'] * 4 + ['skip']
    monkeypatch.setenv('THEANO_FLAGS', 'contexts=cli_c->cuda0')
    code, found = run_doctor(capsys)
    assert code == 1
    assert [found[name]['status'] for name in ('CUDA devices', 'libcuda.so', 'libnvrtc.so', 'libcublas.so',
                                               'libnccl.so', 'context cli_c')] == ['fail'] * 4 + ['skip', 'fail']
    assert "NVIDIA's driver" in found['libcuda.so']['remedy']
    assert found['libcublas.so']['remedy'] == "python -m pip install 'theano_mgpu[cuda12]'"
    assert 'theano-mgpu doctor' not in found['context cli_c']['text']  # it is running already
    if found['pygpu']['status'] == 'ok':
        assert found['context cli_c']['text'].count(found['CUDA devices']['text']) == 1


@pytest.mark.parametrize('python,version,requirement', [
    ((3, 8), '1.16.6', 'numpy>=1.17,<1.25'), ((3, 8), '1.17.0', ''), ((3, 11), '1.24.4', ''),
    ((3, 11), '1.25.0', 'numpy>=1.17,<1.25'), ((3, 11), '2.0.1', 'numpy>=1.17,<1.25'),
    ((3, 12), '1.25.0', 'numpy>=1.26,<2'), ((3, 12), '1.26.4', ''), ((3, 12), '2.0.1', 'numpy>=1.26,<2'),
    ((3, 13), '1.26.4', 'numpy>=2.1,<2.3'), ((3, 13), '2.2.6', ''), ((3, 13), '2.3.0', 'numpy>=2.1,<2.3')])
def test_numpy_versions(monkeypatch, python, version, requirement):
    monkeypatch.setattr(np, '__version__', version)
    monkeypatch.setattr(sys, 'version_info', python)
    finding = host_checks.check_numpy(None)
    assert finding.status == ('fail' if requirement else 'ok') and version in finding.text
    assert finding.remedy == ("python -m pip install '%s'" % requirement if requirement else '')


def test_other_versions_of_theano_and_keras(monkeypatch):
    setup = host_checks.Setup()
    setup.theano_error = None
    monkeypatch.setattr(theano, '__version__', '1.0.4')
    monkeypatch.setattr(sys, 'version_info', (3, 11, 2))
    finding = host_checks.check_theano(setup)
    assert finding.status == 'fail' and finding.remedy == 'python -m pip install theano==1.0.5'
    monkeypatch.setattr(sys, 'version_info', (3, 12, 1))
    assert "pip install --force-reinstall '.[keras]' in a checkout" in host_checks.check_theano(setup).remedy


def test_other_versions_of_pygpu(monkeypatch):
    pygpu = pytest.importorskip('pygpu')
    setup = host_checks.Setup()
    monkeypatch.setattr(setup, 'contexts', parse_context_map('dev0->opencl0:0'))
    monkeypatch.setattr(pygpu, '__version__', '0.6.9')
    finding = device_checks.check_pygpu(setup)
    assert finding.status == 'fail' and '0.6.9' in finding.text and finding.remedy == discovery.INSTALL_PYGPU
    monkeypatch.setitem(sys.modules, 'pygpu', None)
    assert device_checks.check_pygpu(setup).status == 'fail'
    monkeypatch.setattr(setup, 'contexts', parse_context_map('dev0->cpu'))
    assert device_checks.check_pygpu(setup).status == 'skip'


def test_keras_on_another_backend(monkeypatch):
    keras = pytest.importorskip('keras')
    assert host_checks.check_keras(None).text.startswith('2.3.1, on Theano; tested are 0.3.3, ')
    monkeypatch.setattr(keras, '__version__', '0.3.3')
    finding = host_checks.check_keras(None)
    assert finding.status == 'ok' and 'run" and mgpu.enable() divide its models' in finding.text
    monkeypatch.setattr(keras.backend, 'backend', lambda: 'tensorflow')
    finding = host_checks.check_keras(None)
    assert finding.status == 'warn' and 'KERAS_BACKEND=theano' in finding.remedy


def test_a_compiler_that_does_not_work(monkeypatch):
    def compile_str(*args, **kwargs):
        raise Exception('Compilation failed (return status=1): Python.h: No such file')
    if not theano.config.cxx:
        pytest.skip('no compiler')
    assert host_checks.check_compiler(host_checks.Setup()).status == 'ok'
    monkeypatch.setattr('theano.gof.cmodule.GCC_compiler.compile_str', compile_str)
    finding = host_checks.check_compiler(host_checks.Setup())
    assert finding.status == 'fail' and 'Python.h: No such file' in finding.text and 'python3-dev' in finding.remedy


def test_a_blas_that_computes_nonsense(monkeypatch):
    if not (theano.config.cxx and theano.config.blas.ldflags):
        pytest.skip('no BLAS')
    assert host_checks.check_blas(None).status == 'ok'
    monkeypatch.setattr(theano, 'function', lambda *args, **kwargs: lambda a, b: np.dot(a, b) + 0.5)
    finding = host_checks.check_blas(None)
    assert finding.status == 'fail' and 'gemm is wrong by up to 0.5' in finding.text
    assert 'libopenblas-dev' in finding.remedy


def test_a_context_that_computes_nonsense_or_on_the_host(monkeypatch, opencl):
    good = mgpu.function

    def shifted(*args, **kwargs):
        f = good(*args, **kwargs)
        return lambda *batch: [result + 0.25 for result in f(*batch)]
    context, = parse_context_map('cli_wrong->' + opencl[0])
    monkeypatch.setattr(mgpu, 'function', shifted)
    finding = device_checks.check_context(None, context)
    assert finding.status == 'fail' and finding.text.startswith('tanh(dot(x, w)) is wrong by up to 0.25')

    def on_the_host(*args, **kwargs):
        return good(*args, **dict(kwargs, mode=theano.compile.get_default_mode().excluding('gpuarray')))
    monkeypatch.setattr(mgpu, 'function', on_the_host)
    finding = device_checks.check_context(None, context)
    assert finding.status == 'fail'
    assert finding.text.startswith('the numbers are right, but computed on the host: ')
    assert all(op in finding.text for op in ('Dot22', 'Elemwise', 'Sum'))


def test_mpi4py_that_does_not_load(monkeypatch):
    monkeypatch.setattr(host_checks, 'installed', lambda name: '4.0.0')
    monkeypatch.setattr(host_checks.mpi_library, 'PROBE', 'raise RuntimeError("cannot load MPI library")')
    setup = host_checks.Setup()
    finding = host_checks.check_mpi(setup)
    assert finding.status == 'warn' and finding.text == 'cannot be imported: RuntimeError: cannot load MPI library'
    assert 'openmpi-bin' in finding.remedy
    setup.theano_error = RuntimeError('cannot load MPI library')  # Theano 1.0.5 imports mpi4py if it is installed
    assert host_checks.check_mpi(setup).status == 'fail'
    monkeypatch.setattr(host_checks.mpi_library, 'PROBE', 'print("4.0.0\\nOpen MPI v4")')
    assert host_checks.check_mpi(setup) == ('ok', '4.0.0, Open MPI v4', '')


def test_a_theanorc_that_cannot_be_read(monkeypatch, tmp_path):
    path = tmp_path / 'theanorc'
    path.write_text('contexts = dev0->cpu\n')  # no [global] above it
    monkeypatch.setenv('THEANORC', str(path))
    monkeypatch.setenv('THEANO_FLAGS', '')
    finding = host_checks.check_map(host_checks.Setup())
    assert finding.status == 'fail' and 'no section headers' in finding.text and str(path) in finding.text
    assert 'theano-mgpu config' in finding.remedy


@pytest.mark.slow
def test_a_theano_that_cannot_be_imported_is_a_finding(tmp_path):
    """The command ended with a traceback, since it imports the other commands, and one of these imported Theano."""
    (tmp_path / 'theano').mkdir()
    (tmp_path / 'theano' / '__init__.py').write_text("raise AttributeError('not today')")
    done = command('doctor', environment={'PYTHONPATH': search_path(tmp_path)})
    assert done.returncode == 1 and 'Theano          FAIL  cannot be imported: not today' in done.stdout, done.stderr


@pytest.mark.slow_but_with('flags')
@pytest.mark.parametrize('command', ['doctor', 'flags'])
def test_a_misspelled_flag_of_the_package(command):
    """The doctor advised another Theano, and `flags` listed the flags without a word."""
    done = python('-m', 'theano_mgpu', command, THEANO_FLAGS='mgpu.verfy=True', expected=None)
    text = done.stdout + done.stderr
    assert 'there is no flag mgpu.verfy, which THEANO_FLAGS sets to True; the nearest is mgpu.verify' in text
    assert ('remedy: Fix this flag' in text) == (command == 'doctor') and 'mgpu.verify' in done.stdout
    assert done.returncode == {'doctor': 1, 'flags': 2}[command]
