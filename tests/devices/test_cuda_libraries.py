"""NVIDIA's libraries under the names that drivers and wheels give them, on the stand-in of `cuda_on_cpu`.

Each test runs in a process of its own, as a library stays loaded for good. The wheel of NVRTC is one that reports any
version, refuses the architectures that it does not list, writes down each option, and leaves the rest to the stand-in.
"""
import json
import re
import subprocess
import sys
from pathlib import Path

from theano_mgpu.compat.cuda_libraries import candidates, search, versions

import pytest
from cuda_on_cpu import build, unavailable
from support.cuda_machine import ADD, HEAD, NVRTC, Machine

ROOT = Path(__file__).resolve().parents[2]
NVRTC_11_8 = (11, 8, [35, 50, 70, 86, 90])
NVRTC_12_9 = (12, 9, [50, 61, 70, 86, 90, 100, 120])
NVRTC_13_5 = (13, 5, [75, 86, 90, 100, 120])
pytest.importorskip('pygpu', reason='CUDA contexts need pygpu')
pytestmark = pytest.mark.skipif(bool(unavailable()), reason=str(unavailable()))


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_a_driver_and_wheels_are_enough_for_two_devices(machine):
    machine.install_nvrtc(*NVRTC_12_9)
    code = HEAD + """
mgpu.init('dev0->cuda0;dev1->cuda1')
import numpy as np, theano, theano.tensor as T
x, w = T.fmatrix(), np.random.RandomState(0).rand(4, 3).astype('float32')
f = mgpu.function([x], T.tanh(T.dot(x, theano.shared(w))))
batch = np.random.RandomState(1).rand(7, 4).astype('float32')
print(np.abs(f(batch) - np.tanh(batch.dot(w))).max() < 1e-6)
for library in cuda_libraries.survey().libraries.values():
    print(library.path)
"""
    assert machine.run(code).splitlines()[-5:] == [
        'True', str(machine.driver / 'libcuda.so.1'), str(machine.site / 'nvidia/cuda_nvrtc/lib/libnvrtc.so.12'),
        str(machine.cublas), 'None']
    assert machine.architectures() == {'compute_86'}
    assert sorted(path.name for path in machine.shims.glob('*/*')) == ['libcublas.so', 'libcuda.so', 'libnvrtc.so']


@pytest.mark.slow
@pytest.mark.parametrize('cc,nvrtc,architecture', [
    ('7.0', NVRTC_12_9, 70),
    ('10.0', NVRTC_12_9, 100),  # libgpuarray asks for compute_10
    ('12.0', NVRTC_12_9, 120),  # and for compute_12
    ('12.1', NVRTC_13_5, 120),  # 121 is not in its list
    ('12.0', NVRTC_11_8, 90),       # a newer device runs the PTX of an older architecture
])
def test_kernels_are_compiled_for_the_device(machine, cc, nvrtc, architecture):
    machine.install_nvrtc(*nvrtc)
    assert machine.run(ADD, cc, driver=(13, 5)).endswith('[0.0, 2.0, 4.0, 6.0, 8.0]')
    assert machine.architectures() == {'compute_%d' % architecture}


@pytest.mark.slow
def test_without_the_correction_no_kernel_compiles_for_compute_capability_12(machine):
    env = dict(machine.environment('12.0'), LD_LIBRARY_PATH=build())
    uncorrected = ADD.replace('mgpu.init', 'cuda_libraries.require = cuda_libraries.provide = lambda *device: None\n'
                              'mgpu.init', 1)
    done = [subprocess.run([sys.executable, '-c', code], env=env, text=True, stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE) for code in (uncorrected, ADD)]
    assert [process.returncode for process in done] == [1, 0], done
    assert 'nvrtcCompileProgram: NVRTC_ERROR_INVALID_OPTION' in done[0].stderr


@pytest.mark.slow
def test_nvrtc_that_lists_no_architectures(machine):
    """NVRTC 11.0 knows 8.0 at most."""
    machine.install_nvrtc(11, 0, [35, 70, 80], lists=False)
    assert machine.run(ADD, '8.6', driver=(12, 0)).endswith('[0.0, 2.0, 4.0, 6.0, 8.0]')
    assert machine.architectures() == {'compute_80'}


@pytest.mark.slow
@pytest.mark.parametrize('cc,driver,chosen', [
    ('8.6', (12, 9), '12'),
    ('8.6', (13, 5), '13'),
    ('6.1', (13, 5), '12'),     # NVRTC 13 has left 6.1 behind
    ('8.6', (12, 4), '11.2'),   # NVRTC 12.9 is newer than the driver
])
def test_the_newest_nvrtc_that_suits_is_used(machine, cc, driver, chosen):
    for nvrtc in (NVRTC_11_8, NVRTC_12_9, NVRTC_13_5):
        machine.install_nvrtc(*nvrtc)
    assert machine.run(NVRTC, cc, driver).endswith('libnvrtc.so.' + chosen)


@pytest.mark.slow
def test_what_is_on_the_library_path_goes_first(machine):
    own = machine.install_nvrtc(*NVRTC_11_8, folder=machine.driver)
    machine.install_nvrtc(*NVRTC_12_9)
    assert machine.run(NVRTC) == str(own)


@pytest.mark.slow
def test_several_processes_build_at_once(machine):
    machine.install_nvrtc(*NVRTC_12_9)
    processes = [subprocess.Popen([sys.executable, '-c', NVRTC], env=machine.environment(), text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    outputs = [process.communicate() for process in processes]
    assert [output for output, _ in outputs] == [str(machine.site / 'nvidia/cuda_nvrtc/lib/libnvrtc.so.12\n')] * 2
    assert sorted(path.name for path in machine.shims.glob('*/*')) == ['libcublas.so', 'libcuda.so', 'libnvrtc.so']


@pytest.mark.slow
def test_a_library_that_is_loaded_before(machine):
    """A library that libgpuarray, too, may have opened is left alone, unless kernels cannot be compiled so."""
    early = 'import ctypes; ctypes.CDLL("libnvrtc.so")\n'
    env = dict(LD_LIBRARY_PATH=build())
    assert machine.run(early + ADD, '7.0', **env).endswith('[0.0, 2.0, 4.0, 6.0, 8.0]')
    text = machine.run(early + ADD, '12.0', **env)
    assert 'was loaded as libnvrtc.so before' in text and 'compute capability 12.0' in text


@pytest.mark.slow
def test_nothing_happens_without_a_driver(machine):
    code = HEAD + """
import time
start = time.perf_counter()
cuda_libraries.provide()
cuda_libraries.require('cuda0')
print(time.perf_counter() - start, cuda_libraries.survey().libraries, discovery.discover('cuda'))
"""
    (machine.driver / 'libcuda.so.1').unlink()
    machine.install_nvrtc(*NVRTC_12_9)
    seconds, found = machine.run(code).split(' ', 1)
    if not found.startswith('{} '):
        pytest.skip("this machine has NVIDIA's driver")
    assert found.startswith("{} ([], 'Could not load \"libcuda.so\"") and float(seconds) < .2
    assert not machine.shims.exists()


@pytest.mark.slow
def test_a_driver_without_a_device(machine):
    text = machine.run(HEAD + "print(discovery.discover('cuda'))", CUDA_ON_CPU_DEVICES='0')
    assert 'the driver' in text and str(machine.driver / 'libcuda.so.1') in text and 'nvidia-smi' in text


@pytest.mark.slow_but_with('8.6-driver3-None-words3')
@pytest.mark.parametrize('cc,driver,nvrtc,words', [
    ('8.6', (12, 4), NVRTC_12_9, ['NVRTC 12.9 (', 'libnvrtc.so.12) is newer than the driver',
                                  'supports CUDA 12.4', 'devices: 8.6', "'nvidia-cuda-nvrtc-cu12<12.5'"]),
    ('8.6', (12, 9), NVRTC_13_5, ['NVRTC 13.5', 'supports CUDA 12.9', "pip install 'theano_mgpu[cuda12]'"]),
    ('6.1', (13, 5), NVRTC_13_5, ['NVRTC 13.5', 'for compute capability 7.5 and above', 'not for 6.1',
                                  'supports CUDA 13.5', "pip install 'theano_mgpu[cuda12]'"]),
    ('8.6', (13, 0), None, ['NVRTC, which compiles the kernels for CUDA devices, is not installed',
                            "pip install 'theano_mgpu[cuda12]'"]),
])
def test_nvrtc_that_does_not_suit(machine, cc, driver, nvrtc, words):
    if nvrtc:
        machine.install_nvrtc(*nvrtc)
    code = HEAD + """
import warnings
try:
    mgpu.init('dev0->cuda0')
except mgpu.ContextError as error:
    print(error)
print(discovery.discover('cuda'))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    print(discovery.discover_best())
print(caught[-1].category.__name__, caught[-1].message)
"""
    error, found, best, warning = machine.run(code, cc, driver).splitlines()
    assert all(word in error for word in words), error
    assert found.startswith('([], ') and words[0] in found  # a list of devices is no error, and has the reason
    # Where no contexts are configured others are used, and a warning says why.
    assert 'cuda' not in best and warning.startswith("MgpuWarning this machine's CUDA devices are not used: ")
    assert words[0] in warning


@pytest.mark.slow
def test_one_old_card_beside_a_new_one(machine):
    """All cards were refused, for the sake of one that cuBLAS 13 does not support. A library for all goes first."""
    machine.install_nvrtc(*NVRTC_13_5)
    machine.cublas.rename(machine.cublas.with_name('libcublas.so.13'))
    code = HEAD + """
from theano_mgpu.devices.contexts import configured, describe
print(describe(configured()))
try:
    mgpu.init('dev0->cuda1')
except mgpu.ContextError as error:
    print(error)
"""
    cards = dict(cc='8.6;6.1', driver=(13, 5))
    one, error = machine.run(code, **cards).splitlines()
    assert one == 'dev0->cuda0'
    assert error.startswith('cuda1: NVRTC 13.5') and 'not for 6.1' in error and 'python -m pip install' in error
    assert machine.run(ADD, **cards).endswith('[0.0, 2.0, 4.0, 6.0, 8.0]')
    found = json.loads(machine.run(DOCTOR, **cards))['architecture']
    assert found[:2] == ['warn', error.partition('. python')[0].replace(': ', ' is left out: ', 1)]
    machine.install_nvrtc(*NVRTC_12_9)
    assert '/lib/libcublas.so.13 supports compute capability 7.5 and above, not 6.1' in machine.run(code, **cards)
    machine.cublas.with_name('libcublas.so.13').rename(machine.cublas)
    assert machine.run(code, **cards) == 'dev0->cuda0;dev1->cuda1'


PRODUCT = HEAD + """
mgpu.init('dev0->cuda0')
import hashlib
import numpy as np, theano, theano.tensor as T
a, b = np.random.RandomState(0).rand(2, 16, 16).astype('float32')
x = T.fmatrix('x')
f = mgpu.function([x], T.dot(x, theano.shared(b)))
print('TF32 in products' in str(f.plan))
print(hashlib.sha1(f(a).tobytes()).hexdigest(), np.abs(f(a) / a.astype('float64').dot(b) - 1).max())
print(cuda_libraries.survey().libraries['libcublas.so'].detail)
"""
TF32 = 'floatX=float32,mgpu.tf32=True'


@pytest.mark.slow
def test_products_are_tf32_if_the_flag_says_so(machine):
    """Only convolutions were. A device below 8.0 computes as ever, bit for bit."""
    machine.install_nvrtc(*NVRTC_12_9)
    explained, numbers, detail = machine.run(PRODUCT, '8.6', THEANO_FLAGS=TF32).splitlines()
    assert explained == 'True' and 1e-5 < float(numbers.split()[1]) < 1e-2 and 'products of float32 as TF32' in detail
    off, old = (machine.run(PRODUCT, cc, THEANO_FLAGS=flags).splitlines()
                for cc, flags in (('8.6', 'floatX=float32'), ('7.5', TF32)))
    assert off[0] == 'False' and off[2:] == [] and float(off[1].split()[1]) < 1e-6 and off[1] == old[1]
    library = json.loads(machine.run(DOCTOR, '8.6', THEANO_FLAGS=TF32))['libcublas.so']
    assert library[0] == 'ok' and library[1].endswith('; products of float32 as TF32, by mgpu.tf32')


@pytest.mark.slow_with('-libcublas.so.10*')
@pytest.mark.parametrize('early, note', [('', 'libcublas.so.10 is cuBLAS 10.2, and 11.0 or later has TF32'),
                                         ('import ctypes; ctypes.CDLL("libcublas.so")\n', 'another libcublas.so was ')])
def test_products_that_cannot_be_tf32(early, note, machine):
    """The libraries are a toolkit's, which has the name that libgpuarray opens, or older than TF32."""
    machine.install_nvrtc(10, 2, [50, 70, 75], lists=False)
    machine.cublas.rename(machine.cublas.with_name('libcublas.so.10'))
    path = {'LD_LIBRARY_PATH': build()} if early else {}
    done = subprocess.run([sys.executable, '-c', early + PRODUCT], capture_output=True, text=True, env={
        **machine.environment('7.5', (12, 9) if early else (10, 2), THEANO_FLAGS=TF32), **path})
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[2]) < 1e-6
    assert 'mgpu.tf32=True: products of matrices stay in float32, since ' in done.stderr and note in done.stderr


def test_products_are_tf32_with_a_toolkit(machine):
    """The toolkit's libcublas.so is a link to a library of another SONAME: the one with code goes first."""
    done = machine.run(PRODUCT, '8.0', THEANO_FLAGS=TF32, LD_LIBRARY_PATH=build()).splitlines()
    assert done[0] == 'True' and 'products of float32 as TF32' in done[2]


def test_missing_cublas(machine):
    """Theano opens no context without cuBLAS: "Missing Blas library"."""
    machine.install_nvrtc(*NVRTC_11_8)
    assert 'libcublas.so.12 needs a driver that supports CUDA 12; this one supports CUDA 11.8. python -m pip' \
        in machine.run(ADD, driver=(11, 8))
    machine.cublas.unlink()
    assert 'ContextError: cuBLAS, which multiplies matrices on CUDA devices, is not installed. python -m pip' \
        in machine.run(ADD)


def test_no_compiler(machine, tmp_path):
    machine.install_nvrtc(*NVRTC_12_9)
    text = machine.run(HEAD + "mgpu.init('dev0->cuda0')", PATH=str(tmp_path / 'empty'), THEANO_FLAGS='cxx=')
    assert 'ContextError: CUDA devices need a C compiler, and there is none: the flag cxx of Theano is empty' in text
    assert 'THEANO_FLAGS=cxx=' in text


@pytest.mark.slow
def test_a_compiler_that_fails(machine):
    machine.install_nvrtc(*NVRTC_12_9)
    text = machine.run(HEAD + "shims.compiler = lambda: 'false'\nmgpu.init('dev0->cuda0')")
    assert 'false could not build libcuda.so, which CUDA devices need' in text
    assert not list(machine.shims.glob('*/*'))


DOCTOR = HEAD + """
from theano_mgpu.cli import doctor
from theano_mgpu.cli.doctor import host_checks
plan = dict(doctor.plan(host_checks.Setup()))
names = ['CUDA devices', 'libcuda.so', 'libnvrtc.so', 'libcublas.so', 'libnccl.so', 'architecture', 'context dev0']
import json
print(json.dumps({name: plan[name](host_checks.Setup()) for name in names}))
"""


@pytest.mark.slow
def test_the_doctor_names_each_file(machine):
    nvrtc = machine.install_nvrtc(*NVRTC_12_9)
    found = json.loads(machine.run(DOCTOR, '12.0', THEANO_FLAGS='contexts=dev0->cuda0'))
    assert found['CUDA devices'][:2] == ['ok', 'cuda0, cuda1']
    status, text, _ = found['libcuda.so']
    assert status == 'ok' and text.startswith('the driver, for CUDA 12.9: %s/libcuda.so.1, through %s/'
                                              % (machine.driver, machine.shims))
    status, text, _ = found['libnvrtc.so']
    assert status == 'ok' and text.startswith('12.9: %s, through %s/' % (nvrtc, machine.shims))
    assert found['libcublas.so'][0] == 'ok' and found['libnccl.so'][0] == 'skip'
    assert found['architecture'] == ['ok', 'NVRTC 12.9 compiles compute_120 for compute capability 12.0; the driver is '
                                     'for CUDA 12.9', '']
    assert found['context dev0'][0] == 'ok', found['context dev0']


@pytest.mark.slow
def test_the_doctor_says_what_to_install(machine):
    machine.cublas.unlink()
    flags = 'contexts=dev0->cuda0'
    found = json.loads(machine.run(DOCTOR, driver=(12, 4), THEANO_FLAGS=flags))
    assert found['CUDA devices'][0] == 'fail'
    for name in ('libnvrtc.so', 'libcublas.so'):
        assert found[name][0] == 'fail' and 'is not installed' in found[name][1]
        assert found[name][2].startswith("python -m pip install 'theano_mgpu[cuda12]' 'nvidia-cuda-nvrtc-cu12<12.5'")
    assert found['libcuda.so'][0] == 'ok' and found['architecture'][0] == 'skip'
    machine.install_nvrtc(*NVRTC_12_9)
    found = json.loads(machine.run(DOCTOR, driver=(12, 4), THEANO_FLAGS=flags))
    assert found['libnvrtc.so'][0] == 'fail' and 'is newer than the driver' in found['libnvrtc.so'][1]


def test_which_files_are_candidates(tmp_path, monkeypatch):
    folder = tmp_path / 'nvidia' / 'cuda_nvrtc' / 'lib'
    folder.mkdir(parents=True)
    for name in ('libnvrtc.so.12', 'libnvrtc.alt.so.12', 'libnvrtc-builtins.so.12.9', 'libnvrtc.so.12.bak'):
        (folder / name).write_text('')
    (tmp_path / 'own').mkdir()
    (tmp_path / 'own' / 'libnvrtc.so').symlink_to(folder / 'libnvrtc.so.12')
    monkeypatch.setattr(sys, 'path', [str(tmp_path)])
    monkeypatch.setattr(search, '_linker_cache', lambda name: [])  # libraries of this machine are none of these files
    found = [candidate for candidate in candidates('libnvrtc.so') if candidate.path.startswith(str(tmp_path))]
    assert found == [(str(folder / 'libnvrtc.so.12'), False)]
    monkeypatch.setenv('LD_LIBRARY_PATH', '/nowhere::%s' % (tmp_path / 'own'))
    found = [candidate for candidate in candidates('libnvrtc.so') if candidate.path.startswith(str(tmp_path))]
    assert found == [(str(tmp_path / 'own' / 'libnvrtc.so'), True)]  # once, though there are two names
    assert search.file_version(found[0].path) == (12,)


DRIVER = """
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 99000; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGetAttribute(int *value, int which, int device) { *value = which == 75 ? MAJOR : MINOR; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuGetExportTable(void **table, void *id) { return 801; }
"""


@pytest.mark.slow
@pytest.mark.parametrize('cc', ['9.0', '10.0', '12.0'])
def test_the_real_nvrtc_compiles_for_new_devices(machine, cc):
    """NVIDIA's compiler is called through the shim, with the options as libgpuarray passes them.

    NVRTC looks for a cache of programs through ``cuGetExportTable``, which the stand-in does not have; so the driver is
    one that has nothing but a device.
    """
    real = [path for path in search.installed('libnvrtc.so') if 'nvidia' in path]
    if not real:
        pytest.skip("NVIDIA's NVRTC is not installed: pip install '.[cuda12]'")
    driver = machine.driver / 'libcuda.so.1'
    driver.unlink()
    major, minor = cc.split('.')
    subprocess.run(['gcc', '-shared', '-fPIC', '-x', 'c', '-', '-o', str(driver), '-Wl,-soname,libcuda.so.1',
                    '-DMAJOR=' + major, '-DMINOR=' + minor], input=DRIVER, text=True, check=True)
    machine.cublas.unlink()
    code = HEAD + """
import ctypes
nvrtc_file = cuda_libraries.survey().libraries['libnvrtc.so']
assert not nvrtc_file.problem, nvrtc_file
nvrtc, program, size = ctypes.CDLL('libnvrtc.so'), ctypes.c_void_p(), ctypes.c_size_t()
source = b'extern "C" __global__ void twice(float *x) { x[threadIdx.x] *= 2; }'
assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, None, 0, None, None) == 0
options = (ctypes.c_char_p * 2)(b'-arch', os.environ['ARCHITECTURE'].encode())
error = nvrtc.nvrtcCompileProgram(program, 2, options)
assert error == 0, error
assert nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size)) == 0
ptx = ctypes.create_string_buffer(size.value)
assert nvrtc.nvrtcGetPTX(program, ptx) == 0
print(nvrtc_file.path, ptx.value.decode())
"""
    folders = {str(Path(path).parents[3]) for path in real}
    text = machine.run(code, ARCHITECTURE='compute_' + cc.replace('.', '')[:2],
                       PYTHONPATH=':'.join([str(ROOT)] + sorted(folders)))
    assert text.split()[0] in real and '.target sm_%s%s' % (major, minor) in text and 'twice' in text


@pytest.mark.parametrize('driver', [(9, 0), (10, 2), (11, 4), (11, 8), (12, 4), (12, 9), (13, 0)])
def test_each_package_that_is_advised_is_for_the_driver(driver):
    """cuDNN's was nvidia-cudnn-cu11 for each driver before CUDA 12: CUDA 10.2 cannot load it, and no extra has it."""
    for advice in (versions.remedy(driver), versions.cudnn_remedy(driver)):
        extras, wheels = re.findall(r'theano_mgpu\[(\w+)\]', advice), re.findall(r'nvidia-[\w-]+', advice)
        assert all("        '%s': [" % extra in (ROOT / 'setup.py').read_text() for extra in extras)
        numbers = [int(name[-2:]) for name in extras + wheels]
        assert numbers and (max(numbers) <= driver[0] or advice.startswith('Update the driver, then: '))
        assert {wheel[:-5] for wheel in wheels} <= {'nvidia-cuda-nvrtc', 'nvidia-cublas'}
