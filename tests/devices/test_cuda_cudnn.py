"""cuDNN 7, 8 and 9 on the stand-in: the choice, the line where it is broken, and results against the CPU."""
import os
import re
import shutil
import subprocess
import sys

import cuda_on_cpu
import pytest

pytest.importorskip('pygpu', reason='CUDA contexts need pygpu')
pytestmark = [pytest.mark.needs_compiler, pytest.mark.skipif(cuda_on_cpu.unavailable() is not None,
                                                 reason=cuda_on_cpu.unavailable() or '')]
BLACKWELL = dict(cc='12.0', version=13000)

FIND = '''
import theano_mgpu as mgpu
from theano_mgpu.compat import cuda_libraries
mgpu.init()
cudnn = cuda_libraries.find_cudnn()
print(cudnn.version, cudnn.problem)
'''
KERAS = '''
import numpy as np
import theano_mgpu as mgpu
from keras.layers import Conv2D, Dense, Flatten, MaxPooling2D
from keras.models import Sequential
from keras.optimizers import SGD
np.random.seed(0)
model = Sequential([
    Conv2D(4, 3, activation='tanh', padding='same', input_shape=(3, 8, 8), data_format='channels_first'),
    MaxPooling2D(2, data_format='channels_first'), Conv2D(4, 3, data_format='channels_first'), Flatten(),
    Dense(3, activation='softmax')])
model.compile(SGD(.1), 'categorical_crossentropy')
x, labels = np.random.rand(20, 3, 8, 8).astype('float32'), np.eye(3, dtype='float32')[np.random.randint(0, 3, 20)]
mgpu.enable(always=True)
model.fit(x, labels, batch_size=10, epochs=2, shuffle=False, verbose=0)
np.savez(sys.argv[1], *model.get_weights())
'''
OPS = '''
import gc, theano
ops = {type(node.op).__name__ for f in gc.get_objects() if isinstance(f, theano.compile.function_module.Function)
       for node in f.maker.fgraph.apply_nodes}
print(sorted(name for name in ops if name.startswith(('GpuDnn', 'GpuCorr'))))
'''
CONVOLUTION = '''
import theano_mgpu as mgpu
import numpy as np
import theano, theano.tensor as T
mgpu.init()
rng = np.random.RandomState(0)
x, w = T.ftensor4(), theano.shared(rng.rand(4, 3, 3, 3).astype('float32'))
y = T.nnet.conv2d(x, w, border_mode='half')
outputs = [y.sum(), *T.grad((y ** 2).sum(), [w, x])]
f = mgpu.function([x], outputs[:2], contexts=['dev0'])
values = rng.rand(4, 3, 8, 8).astype('float32')
on_host = theano.function([x], outputs[:2], mode=theano.compile.get_default_mode().excluding('gpuarray'))
worst = max(np.abs(np.asarray(a) / np.asarray(b) - 1).max() for a, b in zip(f(values), on_host(values)))
print('worst %.1e' % worst)
print(sorted({type(node.op).__name__ for node in f.functions[0].maker.fgraph.apply_nodes
              if type(node.op).__name__.startswith(('GpuDnnConv', 'GpuCorr'))}))
'''


def run(code, *arguments, contexts='dev0->cuda0', flags='', cudnn=9, devices=1, **settings):
    """Return the output of a program, and its errors, from a fresh interpreter on stand-in devices."""
    env = cuda_on_cpu.environment(devices, cudnn=cudnn, **{**BLACKWELL, **settings})
    env['THEANO_FLAGS'] = ','.join(filter(None, ['floatX=float32', 'contexts=' + contexts, flags]))
    done = subprocess.run([sys.executable, '-c', 'import sys\n' + code, *map(str, arguments)], env=env,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout, done.stderr


def about_cudnn(text):
    return [line for line in text.splitlines() if 'cuDNN' in line]


@pytest.mark.parametrize('cudnn,version', [(9, '(9, 28, 0)'), pytest.param(8, '(8, 9, 7)', marks=pytest.mark.slow),
                                           pytest.param(7, '(7, 6, 5)', marks=pytest.mark.slow)])
def test_each_version_is_found_with_its_headers(cudnn, version):
    """Theano took two digits of the compute capability: 12.0 was 20, "Device not supported"."""
    out, err = run(FIND, cudnn=cudnn)
    assert out.strip() == version
    assert len(about_cudnn(err)) == 1 and 'Using cuDNN version' in err


def test_a_device_that_theano_opens_while_it_is_imported_uses_cudnn():
    out, err = run('import theano_mgpu; from theano.gpuarray import dnn; print(dnn.version())', contexts='',
                   flags='device=cuda0')
    assert out == '92800\n' and 'Using cuDNN version 92800' in err


@pytest.mark.slow
def test_without_cudnn_one_line_says_how_to_install_it():
    out, err = run(FIND, cudnn=None)
    assert 'cuDNN is not installed' in out
    line, = about_cudnn(err)
    assert line == ("Can not use cuDNN on context dev0: cuDNN is not installed. python -m pip install "
                    "'theano_mgpu[cudnn12]'")


@pytest.mark.parametrize('broken,words', [
    ('headers of another version', 'the headers of cuDNN 9.28.0'),
    pytest.param('a header without convolutions', 'Theano cannot be compiled with cuDNN 9.28.0',
                 marks=pytest.mark.slow)])
def test_headers_that_do_not_fit_are_said_in_one_line(broken, words, tmp_path):
    """The first convolution ended in an error of g++."""
    cuda_on_cpu.build(cudnn=9)
    folder = tmp_path / 'cudnn'
    shutil.copytree(cuda_on_cpu.cudnn_folder(9), folder)
    name, old, new = (('cudnn_version.h', 'MINOR 28', 'MINOR 1') if 'version' in broken else
                      ('cudnn.h', 'cudnnConvolutionBackwardFilter(', 'cudnnConvolutionBackwardOther('))
    header = folder / 'include' / name
    header.write_text(header.read_text().replace(old, new))
    env_path = os.environ.get('LD_LIBRARY_PATH')
    os.environ['LD_LIBRARY_PATH'] = os.pathsep.join(filter(None, [str(folder / 'lib'), env_path]))
    try:
        out, err = run(FIND, cudnn=None)
    finally:
        if env_path is None:
            del os.environ['LD_LIBRARY_PATH']
        else:
            os.environ['LD_LIBRARY_PATH'] = env_path
    assert words in out
    line, = about_cudnn(err)
    assert line.startswith('Can not use cuDNN on context dev0: ' + words)


def test_a_cudnn_that_does_not_start_is_said_in_one_line():
    """Theano ended with an error: the context could not be opened."""
    line, = about_cudnn(run(FIND, cudnn_broken='create')[1])
    assert re.match(r'Can not use cuDNN on context dev0: cuDNN 92800 \(.*libcudnn.so.9\) cannot be started', line)


@pytest.mark.slow
@pytest.mark.cudnn
@pytest.mark.parametrize('cudnn,broken,words', [
    (9, None, ''), (8, None, ''), (7, None, ''), (9, 'create', 'cannot be started'),
    (9, 'convolution', 'a convolution fails: CUDNN_STATUS_NOT_SUPPORTED'), (9, 'values', 'a convolution is wrong')])
def test_convolutions_equal_those_of_the_cpu(cudnn, broken, words):
    settings = dict(cudnn_broken=broken) if broken else {}
    out, err = run(CONVOLUTION, cudnn=cudnn, **settings)
    worst, ops = out.splitlines()[-2:]
    assert float(worst.split()[1]) < 1e-5
    assert ops == ("['GpuCorrMM', 'GpuCorrMM_gradWeights']" if broken else
                   "['GpuDnnConv', 'GpuDnnConvDesc', 'GpuDnnConvGradW']")
    assert [words in line for line in about_cudnn(err) if 'Using cuDNN version' not in line] == [True] * bool(broken)


@pytest.mark.slow
@pytest.mark.cudnn
def test_a_cnn_of_keras_trains_on_cudnn(tmp_path):
    """Two replicas on compute capability 12.0, with cuDNN 9, train as the CPU does."""
    import numpy as np
    out, err = run(KERAS + OPS, tmp_path / 'cudnn.npz', contexts='dev0->cuda0;dev1->cuda1', devices=2)
    ops = out.splitlines()[-1]
    for name in ('GpuDnnConv', 'GpuDnnConvGradW', 'GpuDnnConvGradI', 'GpuDnnPool', 'GpuDnnPoolGrad'):
        assert "'%s'" % name in ops
    assert 'GpuCorr' not in ops
    run(KERAS, tmp_path / 'cpu.npz', contexts='dev0->cpu', cudnn=None)
    one, other = np.load(tmp_path / 'cudnn.npz'), np.load(tmp_path / 'cpu.npz')
    for name in other.files:
        np.testing.assert_allclose(one[name], other[name], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.cudnn
@pytest.mark.parametrize('memory', ['300M', '8G'])
def test_an_algorithm_does_not_depend_on_free_memory(memory, tmp_path):
    """The fastest algorithm takes 1 GiB, and the fastest one for the filters is not deterministic."""
    trace = tmp_path / 'trace'
    run(CONVOLUTION, memory=memory, trace=trace,
        flags='dnn.conv.algo_fwd=guess_once,dnn.conv.algo_bwd_filter=guess_once')
    used = set(re.findall(r'cudnnConvolution\w+, \w+', trace.read_text()))
    assert used == {'cudnnConvolutionForward, IMPLICIT_PRECOMP_GEMM', 'cudnnConvolutionBackwardFilter, ALGO_1',
                    'cudnnConvolutionBackwardData, ALGO_1'}  # the last one is of the trial


@pytest.mark.slow
@pytest.mark.cudnn
def test_tf32_is_used_if_the_flag_says_so():
    """cuDNN 8 and later cut float32 to 11 bits on devices of compute capability 8.0 and later, unless told not to."""
    out, _ = run(CONVOLUTION, flags='mgpu.tf32=True')
    assert 1e-4 < float(out.splitlines()[-2].split()[1]) < 1e-2


def test_recurrent_ops_of_cudnn_9_are_refused():
    code = FIND + '''
from theano.gpuarray import dnn
try:
    dnn.RNNBlock('float32', 8, 1, 'lstm', context_name='dev0')
except RuntimeError as error:
    print(error)
'''
    assert 'cuDNN 9 lacks the functions that the RNN ops of Theano 1.0.5 call' in run(code)[0]


DOCTOR = '''
from theano_mgpu.cli import doctor
from theano_mgpu.cli.doctor.host_checks import Setup
setup = Setup()
plan = dict(doctor.plan(setup))
for name in ('libcudnn.so', 'cuDNN on dev0'):
    finding = plan[name](setup)
    print(finding.status, finding.text)
'''


@pytest.mark.slow
@pytest.mark.cudnn
@pytest.mark.parametrize('cudnn,settings,found,computes', [
    (9, {}, r'ok 9\.28\.0: .*/lib-cudnn9/lib/libcudnn\.so\.9, headers in .*/lib-cudnn9/include',
     r"ok cuda0: a convolution and its gradients agree with NumPy's"),
    (9, dict(cudnn_broken='values'), 'ok 9', 'warn cuDNN 92800 .*: a convolution is wrong by up to 1; without it'),
    (None, {}, "skip optional; cuDNN is not installed; .* slower: python -m pip install 'theano_mgpu",
     'skip needs cuDNN')])
def test_the_doctor_tries_a_convolution(cudnn, settings, found, computes):
    lines = run('import theano_mgpu\n' + DOCTOR, cudnn=cudnn, **settings)[0].splitlines()[-2:]
    assert re.match(found, lines[0]), lines
    assert re.match(computes, lines[1]), lines


@pytest.mark.slow
@pytest.mark.cudnn
def test_doctor_finds_a_context_with_cudnn_healthy():
    """Sums run on cuDNN, too: "the numbers are right, but computed on the host: no GpuCAReduce"."""
    out, err = run('from theano_mgpu.cli import main; sys.exit(main(["doctor"]))')
    line, = [line for line in out.splitlines() if line.startswith('context dev0')]
    assert line.split()[2] == 'ok', line
