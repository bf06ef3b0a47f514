"""Bugs that were found and fixed, each under its symptom: changes of later versions of libraries."""
import ast
import importlib
import os

import theano_mgpu as mgpu
from theano_mgpu.compat import old_flags, theano_imports
from theano_mgpu.compat.removed_names import CUDA
from theano_mgpu.utils import flag_text, mpi_environment

import numpy as np
import pytest
import theano
import theano.gpuarray
import theano.tensor as T
from support.processes import python
from theano.tensor.signal import pool

pytestmark = pytest.mark.verified


@pytest.mark.parametrize('name', ['imdb', 'reuters'])
def test_keras_data_sets_of_texts_are_loaded(name, tmp_path, monkeypatch):
    """NumPy 1.24 refused them: "setting an array element with a sequence ... inhomogeneous shape"."""
    texts = np.empty(5, object)
    texts[:] = [[4, 5], [6], [4, 4, 5], [7], [5, 6]]
    names = ['x_train', 'y_train', 'x_test', 'y_test'] if name == 'imdb' else ['x', 'y']
    np.savez(str(tmp_path / 'texts.npz'), **dict(zip(names, [texts, np.arange(5)] * 2)))
    dataset = importlib.import_module('keras.datasets.' + name)
    monkeypatch.setattr(dataset, 'get_file', lambda path, **where: path)  # as if it was downloaded before
    options = {'num_words': 99} if name == 'imdb' else {'num_words': 99, 'test_split': 0.4}
    (x, labels), (x_test, labels_test) = dataset.load_data(str(tmp_path / 'texts.npz'), **options)
    assert x.dtype == object and len(x) == len(labels) == (5 if name == 'imdb' else 3)
    assert all(list(x[i])[1:] == [word + 3 for word in texts[labels[i]]] and x[i][0] == 1 for i in range(len(x)))
    assert len(x_test) == len(labels_test) > 0
    same = dataset.load_data(str(tmp_path / 'texts.npz'), maxlen=3, **options)[0][0]
    assert same.dtype != object and same.ndim == 2  # as in older NumPy, where all have one length


def test_pooling_by_its_old_name(cpu2):
    """Lasagne 0.1 could not be imported: "cannot import name 'downsample' from 'theano.tensor.signal'"."""
    import theano.tensor.signal.downsample
    from theano.tensor.signal import downsample
    assert theano.tensor.signal.downsample is downsample
    x = T.tensor4()
    pooled = downsample.max_pool_2d(x, ds=(2, 2), st=(1, 2), ignore_border=True, padding=(0, 0))
    values = np.arange(16, dtype=x.dtype).reshape(1, 1, 4, 4)
    np.testing.assert_array_equal(pooled.eval({x: values})[0, 0], [[5, 7], [9, 11], [13, 15]])


# Names of Theano before 1.0 that 1.0.5 has not: repositories and files that read them, of 82 public repositories with
# 1,703 files, most of 2013 to 2017. Of all pairs of a file and a name of Theano that it reads, Theano 1.0.5 has 94 %.
COUNTED = """
    gpu_contiguous 20 33, theano.sandbox.cuda 17 49, dnn_conv 14 25, theano.tensor.signal.downsample 13 42,
    dnn_pool 13 17, as_cuda_ndarray_variable 10 17, host_from_gpu 9 20, dnn_available 7 12, GpuDnnConvDesc 7 10,
    GpuDnnConv 7 10, CudaNdarrayType 6 15, use 6 14, gpu_alloc_empty 6 9, HostFromGpu 6 9, GpuDnnConvGradI 5 8,
    GpuCorrMM 5 6, cuda_available 4 14, cuda_enabled 3 9, theano.compat.six 2 155, gpu_from_host 2 12,
    CURAND_RandomStreams 2 7, theano.compat.python2x 1 11, float32_shared_constructor 1 4, unuse 1 3,
    shared_constructor 1 2, dnn_present 1 2, theano.sandbox.gpuarray 3 6, CudaNdarraySharedVariable 2 2,
    CudaNdarrayVariable 1 1
"""
# Those that are not restored, but told to scripts with what replaced them, as is theano.ProfileMode (1 18). Of 14 more
# names, in 30 pairs, nothing is told.
REPLACED = """
    theano.misc.pycuda_init 6 10, GpuOp 5 9, CudaNdarray 4 5, theano.misc.pycuda_utils 3 7,
    cuda_ndarray 3 3, opt 2 2, nvcc_compiler 2 2, synchronize 1 1, mem_info 1 1,
    ftensor4 1 1, dnn_conv3d 1 1, dnn_batch_normalization_train 1 1, blocksparse 1 1
"""


def test_modules_of_theano_0_x_are_restored():
    """`import theano.sandbox.cuda` ended with "No module named 'nose'"."""
    import theano.sandbox.cuda.dnn
    from theano.compat.python2x import OrderedDict
    from theano.compat.six.moves import cPickle, xrange
    from theano.sandbox import cuda
    from theano.sandbox.cuda.basic_ops import gpu_contiguous
    from theano.sandbox.cuda.rng_curand import CURAND_RandomStreams
    assert not cuda.cuda_enabled and not theano.sandbox.cuda.dnn.dnn_available() and theano.compat.six.PY3
    assert OrderedDict(xrange=xrange(2)) and cPickle.loads(cPickle.dumps(1)) == 1
    assert gpu_contiguous(T.matrix()).ndim == 2 and CURAND_RandomStreams(1).normal((2, 3)).eval().shape == (2, 3)
    assert isinstance(cuda.float32_shared_constructor(np.zeros(2, 'float32')), theano.compile.SharedVariable)
    assert not isinstance(T.matrix().type, cuda.CudaNdarrayType)
    for name in COUNTED.split()[::3]:
        assert importlib.import_module(name) if name.startswith('theano.') else hasattr(cuda, name)
    exec('from theano.sandbox.cuda.dnn import *\ndnn_pool', {})


def test_convolutions_by_cudnn_of_theano_0_x(cpu2):
    """A generator has transposed convolutions as layers; all are divided."""
    from theano.sandbox.cuda.basic_ops import gpu_alloc_empty, gpu_contiguous
    from theano.sandbox.cuda.blas import GpuCorrMM
    from theano.sandbox.cuda.dnn import GpuDnnConv, GpuDnnConvDesc, GpuDnnConvGradI, dnn_conv, dnn_pool
    x, w, narrow = T.tensor4('x'), T.tensor4('w'), np.random.RandomState(0).rand
    images, kernels = narrow(5, 3, 4, 6).astype(x.dtype), narrow(3, 2, 5, 5).astype(x.dtype)
    wide = gpu_alloc_empty(x.shape[0], w.shape[1], x.shape[2] * 2, x.shape[3] * 2)
    options = GpuDnnConvDesc(border_mode=(2, 2), subsample=(2, 2), conv_mode='conv')(wide.shape, w.shape)
    y = GpuDnnConvGradI()(gpu_contiguous(w), gpu_contiguous(x), wide, options)
    again = dnn_conv(y, w, border_mode=(2, 2), subsample=(2, 2))
    outputs = [y, again, dnn_pool(y, (3, 3), stride=(2, 2), mode='average', pad=(1, 1))]
    whole = theano.function([x, w], outputs + [
        GpuDnnConv()(y, w, None, options), GpuCorrMM(subsample=(2, 2), pad=(2, 2))(y, w[:, :, ::-1, ::-1])])
    results = whole(images, kernels)
    expected = T.nnet.conv2d_transpose(x, w, (5, 2, 8, 12), border_mode=(2, 2), input_dilation=(2, 2))
    np.testing.assert_allclose(results[0], expected.eval({x: images, w: kernels}), rtol=1e-5)
    for result in results[3:]:
        np.testing.assert_allclose(result, results[1], rtol=1e-5)
    assert results[2].shape == (5, 2, 4, 6)
    divided = mgpu.function([x, w], outputs, broadcast=[w])
    for ours, its in zip(divided(images, kernels), results):
        np.testing.assert_allclose(ours, its, rtol=1e-5)


def test_a_device_of_theano_0_x_is_used_where_it_can(monkeypatch, capsys):
    from theano.sandbox.cuda import use
    used = []
    monkeypatch.setattr(theano.gpuarray, 'use', used.append)
    use('gpu1')
    use('cpu')
    monkeypatch.setenv(mpi_environment.RUN, '{}')  # there, contexts choose devices
    use('gpu0', force=True)
    assert used == ['cuda1'] and 'CPU' not in capsys.readouterr().err
    monkeypatch.delenv(mpi_environment.RUN)
    monkeypatch.setattr(theano.gpuarray, 'use', lambda device: {}[device])
    use('gpu')
    assert "note: Theano computes on the CPU, since it cannot use cuda: 'cuda'" in capsys.readouterr().err


@pytest.mark.parametrize('code, new', [
    ('theano.gpuarray.shared_constructor(1)', "theano.shared(value, target='dev0') replaced it"),
    ('from theano.gpuarray import float32_shared_constructor', "theano.shared(value, target='dev0') replaced it"),
    ("theano.gpuarray.change_flags(device='cuda1')", "with theano_mgpu.device('dev1'):` replaced it"),
    *[('import ' + name, name + ' is not part of Theano 1.0') if '.' in name else
      ('from theano.sandbox.cuda import ' + name, CUDA + '.%s is not part of Theano 1.0: theano.gpuarray repl' % name)
      for name in REPLACED.split()[::3]],
    ('theano.ProfileMode()', 'theano.ProfileMode is not part of Theano 1.0: the flag profile=True replaced it'),
    ('from theano import ProfileMode', 'theano.ProfileMode is not part of Theano 1.0: the flag profile=True repl'),
    ('import theano.sandbox.cuda.nvcc_compiler', CUDA + '.nvcc_compiler is not part of Theano 1.0'),
    ('theano.sandbox.cuda.mem_info()', CUDA + '.mem_info is not part of Theano 1.0'),
])
def test_old_names_of_gpu_code_are_named_with_what_replaced_them(code, new):
    """Old tutorials ended with "module 'theano.gpuarray' has no attribute 'shared_constructor'"."""
    with pytest.raises((AttributeError, ImportError)) as raised:
        exec(code, {'theano': theano})
    assert new in str(raised.value) and 'contexts=dev0->cuda0' in str(raised.value)


def test_other_missing_names_are_missing_as_in_plain_theano():
    assert not hasattr(theano.gpuarray, 'shared_constructor') and not hasattr(theano.gpuarray, 'nothing')
    with pytest.raises(ImportError, match="cannot import name 'nothing' from 'theano.gpuarray'"):
        from theano.gpuarray import nothing  # noqa: F401


@pytest.mark.parametrize('old, new, said', [
    ('device=gpu0,floatX=float32', 'device=cuda0,floatX=float32', 'device=gpu0 as device=cuda0'),
    ('device=gpu,force_device=True', 'device=cuda,force_device=True', 'device=gpu as device=cuda'),
    ('init_gpu_device=gpu1', 'init_gpu_device=cuda1', 'init_gpu_device=gpu1 as init_gpu_device=cuda1'),
    ('lib.cnmem=.8,nvcc.fastmath=True', 'gpuarray.preallocate=.8', 'lib.cnmem=.8 as gpuarray.preallocate=.8; '
     'nvcc.fastmath=True not at all (no code is compiled by nvcc)'),
    ('lib.cnmem=1,gpuarray.preallocate=0', 'gpuarray.preallocate=0', 'lib.cnmem=1 as gpuarray.preallocate=1'),
    ('dnn.conv.workmem=small', 'dnn.conv.algo_fwd=small,dnn.conv.workmem=', 'as dnn.conv.algo_fwd=small'),
    ('dnn.conv.workmem_bwd=none', 'dnn.conv.algo_bwd_data=none,dnn.conv.algo_bwd_filter=none,dnn.conv.workmem_bwd=',
     'as dnn.conv.algo_bwd_data=none,dnn.conv.algo_bwd_filter=none'),
    ("""device=gpu0,base_compiledir="/tmp/it's, #1",gcc.cxxflags='-DX="a b" -DY=\\"c\\"'""",
     """device=cuda0,base_compiledir="/tmp/it's, #1",gcc.cxxflags='-DX="a b" -DY=\\"c\\"'""",
     'device=gpu0 as device=cuda0'),
    ('lib.cnmem="it\'s,x=1"', 'gpuarray.preallocate="it\'s,x=1"', 'as gpuarray.preallocate='),
    ('mode=PROFILE_MODE', 'mode=Mode,profile=True', 'mode=PROFILE_MODE as mode=Mode,profile=True'),
    ('enable_initial_driver_test=True', '', 'not at all (Theano has no such setting any more)'),
    ('mgpu.exchange=float16,floatX=float32', 'floatX=float32', 'mgpu.exchange=float16 as mgpu.exchange=float32 ('),
    ('mgpu.batch_statistics=local', '', 'mgpu.batch_statistics=local as mgpu.batch_statistics=exact ('),
    ('mgpu.exchange=float32,mgpu.batch_statistics=exact', None, None),
    ('device=cuda0,mode=FAST_RUN,optimizer_including=cudnn,cuda.root=/usr', None, None),
])
def test_flags_of_theano_0_x_are_read_as_flags_of_today(old, new, said, monkeypatch, capsys):
    """`device=gpu0` and `dnn.conv.workmem` ended in an error of Theano, and `lib.cnmem` was ignored."""
    monkeypatch.setenv('THEANORC', os.devnull)
    monkeypatch.delenv(theano_imports.IMPORTED, raising=False)
    monkeypatch.setenv('THEANO_FLAGS', old)
    old_flags.read_old_flags()
    read = flag_text.environment_flags()
    assert read == flag_text.parse_flags(old if new is None else new)
    err = capsys.readouterr().err
    assert said in err and err.count('note: old flags are read') == 1 if said else not err
    old_flags.read_old_flags()
    assert read == flag_text.environment_flags() and not capsys.readouterr().err


def test_a_theanorc_of_theano_0_x_is_read(monkeypatch, capsys, tmp_path):
    path = tmp_path / 'theanorc'
    path.write_text('[global]\ndevice = gpu1\nfloatX = float32\n[lib]\ncnmem = 0.5\n[nvcc]\nfastmath = True\n'
                    '[dnn]\nconv.workmem = none\n[mgpu]\nbatch_statistics = local\n')
    monkeypatch.setenv('THEANORC', str(path))
    monkeypatch.setenv('THEANO_FLAGS', 'optimizer=fast_compile,mgpu.exchange=float16')
    monkeypatch.setenv(theano_imports.IMPORTED, theano_imports.BY_PARENT)  # the parent has said what the file has
    old_flags.read_old_flags()
    assert flag_text.environment_flags() == {
        'optimizer': 'fast_compile', 'device': 'cuda1', 'gpuarray.preallocate': '0.5', 'dnn.conv.algo_fwd': 'none',
        'dnn.conv.workmem': ''}
    err = capsys.readouterr().err
    assert 'mean today: mgpu.exchange=float16 as mgpu.exchange=float32 (' in err and err.count(' as ') == 2
    flag_text.check_own_names()


@pytest.mark.parametrize('variable, value', [(mpi_environment.RUN, '{}'), ('OMPI_COMM_WORLD_SIZE', '2')])
def test_a_device_of_theano_0_x_is_left_to_the_contexts_that_are_chosen(variable, value, monkeypatch):
    """Contexts are chosen for processes that a script of `theano-mgpu run` starts, and for those in a job."""
    monkeypatch.setenv('OMPI_COMM_WORLD_RANK', '0')
    monkeypatch.setenv('OMPI_COMM_WORLD_LOCAL_RANK', '0')
    monkeypatch.setenv(variable, value)
    new, said = old_flags.today({'device': 'gpu1'})
    assert new == {'device': 'cpu'} and 'device=gpu1 not at all (contexts choose devices; contexts=dev0->cuda1' in said


@pytest.mark.slow_but_with('run --gpus*', 'run train.py-flags2-expected2')
@pytest.mark.parametrize('words, flags, expected', [
    ('run train.py', {'device': 'gpu2'}, {'device': 'cpu', 'contexts': 'dev0->cuda2'}),
    ('run train.py', {'device': 'gpu'}, {'device': 'cpu'}),
    ('run train.py', {'device': 'cuda2'}, {'device': 'cuda2', 'contexts': 'dev0->cuda2'}),
    ('run train.py', {'device': 'cuda0'}, {'device': 'cuda0'}),
    ('run --contexts a->cuda0 train.py', {'device': 'cuda2'}, {'device': 'cuda2'}),
    ('run --gpus 4 train.py', {'device': 'gpu2'}, {'device': 'cpu'}),
    ('run train.py', {'device': 'gpu2', 'contexts': 'a->cuda0'}, {'device': 'cpu', 'contexts': 'a->cuda0'}),
    ('launch -n 2 train.py', {'device': 'gpu2'}, {'device': 'cpu'})])
def test_an_old_device_under_run_is_this_device_alone(words, flags, expected):
    """The flag was dropped, and the script took all cards; `device=cuda2` was kept, and all were taken beside it."""
    code = 'import sys; sys.argv = ["theano-mgpu", *%r]; from theano_mgpu.devices import patches; ' \
        'from theano_mgpu.compat import old_flags; print(old_flags.today(%r))' % (words.split(), flags)
    read, said = ast.literal_eval(python('-c', code).stdout)
    assert read == expected and ('this card alone (--gpus 2 takes two, and device=cuda all)' in said) == (
        'dev0->cuda2' in read.values())


CASES = {  # the shape of an argument, and expressions of it
    'pool': ((2, 1, 5, 5), lambda x: [pool.pool_2d(x, (2, 3), True, (2, 2), pad, mode) for pad in ((0, 0), (1, 2))
                                      for mode in ('max', 'sum', 'average_inc_pad')]),
    'pool of parts': ((1, 5, 5), lambda x: [pool.pool_2d(x, (2, 2), False, mode='average_exc_pad')]),
    'gradient': ((1, 1, 5, 5), lambda x: [T.grad(T.sqr(pool.pool_2d(x, (2, 2), True, mode=mode)).sum(), x)
                                          for mode in ('max', 'sum', 'average_exc_pad')]),
    'R operator': ((1, 1, 5, 5), lambda x: [T.Rop(pool.pool_2d(x, (2, 2), True, pad=(1, 1)), x, T.cos(x))]),
    'convolution': ((2, 1, 5, 5), lambda x: [T.nnet.conv2d(x, x[:, :, 1:3, :2], border_mode=mode, subsample=(2, 1))
                                             for mode in ('valid', 'full')]),
    'convolution in space': ((1, 1, 4, 4, 4), lambda x: [T.nnet.conv3d(x, x[..., :2, :2, :2])]),
}


@pytest.mark.slow_but_with('pool of parts', 'gradient')
@pytest.mark.parametrize('name', [*CASES])
def test_python_code_indexes_by_slices(name):
    """NumPy 1.23 takes a list of slices for positions, and SciPy 1.8 has its convolution elsewhere."""
    shape, build = CASES[name]
    array = np.random.RandomState(0).permutation(np.prod(shape)).reshape(shape) / 8
    x = T.TensorType('float64', [False] * len(shape))('x')
    in_python, by_default = [theano.function([x], build(x), mode=mode)(array) for mode in (
        theano.Mode('py', None), theano.Mode(optimizer='fast_compile'))]
    for value, expected in zip(in_python, by_default):
        np.testing.assert_allclose(value, expected)
    with theano.change_flags(compute_test_value='raise', cxx=''):
        x.tag.test_value = array
        np.testing.assert_allclose(build(x)[0].tag.test_value, in_python[0])


@pytest.mark.parametrize('old', [False, True])
def test_convolutions_without_a_compiler(old):
    """They ended with "Need the python package for scipy.signal to be installed", which SciPy 1.8 has elsewhere."""
    from theano.tensor.nnet import conv
    x, w = T.tensor4(), T.tensor4()
    values = np.random.RandomState(0).rand(2, 1, 4, 4).astype(x.dtype), np.ones((3, 1, 2, 2), x.dtype)
    with theano.change_flags(cxx='', linker='py'):
        function = theano.function([x, w], conv.conv2d(x, w, image_shape=(2, 1, 4, 4), filter_shape=(3, 1, 2, 2)),
                                   mode='FAST_COMPILE') if old else \
            theano.function([x, w], T.nnet.conv2d(x, w), mode=theano.Mode('py', None))
        result = function(*values)
    np.testing.assert_allclose(result[:, 0, 0, 0], values[0][:, 0, :2, :2].sum((1, 2)), rtol=1e-5)


@pytest.mark.parametrize('k', [2, -3])
def test_the_largest_numbers(k):
    """Theano computes them in Python, by a list of slices, which NumPy 1.23 takes for positions."""
    x, array = T.dmatrix(), np.random.RandomState(0).rand(4, 5)
    outputs = [*T.topk_and_argtopk(x, k, 0, sorted=False), T.topk(x, k, 0, sorted=False),
               T.argtopk(x, k, 0, sorted=False)]
    values, places, *others = theano.function([x], outputs)(array)
    np.testing.assert_array_equal(np.sort(values, 0), np.sort(array, 0)[-k:] if k > 0 else np.sort(array, 0)[:-k])
    for each, expected in zip(others + [np.take_along_axis(array, places, 0)], [values, places, values]):
        np.testing.assert_array_equal(np.sort(each, 0), np.sort(expected, 0))


@pytest.mark.slow
def test_pooling_in_debug_mode():
    x = T.dtensor4()
    outputs = [pool.pool_2d(x, (2, 2), True), T.grad(pool.pool_2d(x, (2, 2), True, mode='sum').sum(), x)]
    array = np.random.RandomState(0).rand(1, 1, 4, 4)
    values, gradient = theano.function([x], outputs, mode='DebugMode')(array)
    np.testing.assert_array_equal(values[0, 0, 0, 0], array[0, 0, :2, :2].max())
    assert (gradient == 1).all()


def test_names_that_numpy_had():
    """Programs of Theano's time ended with "module 'numpy' has no attribute 'typeDict'"."""
    assert (np.rank([[1]]), np.alen([1, 2]), np.alen(3), np.asscalar(np.ones(1))) == (2, 2, 1, 1)
    assert np.typeDict['float32'] is np.float32 and np.unicode is str and np.unicode0 is np.str_
    assert isinstance(3, np.int) and np.long(2.5) == 2 and isinstance(True, (bool, np.bool))
    assert np.float_ is np.float64 and np.complex_ is np.complex128 and np.string_ is np.string0 is np.bytes_
    assert np.isnan(np.NaN) and np.Inf == np.infty == np.PINF == -np.NINF == np.inf and np.math.floor(2.5) == 2
    assert np.product([2, 3]) == 6 and np.sometrue([0, 1]) and not np.alltrue([0, 1]) and np.round_(2.7) == 3
    assert np.asfarray([1]).dtype == np.asfarray([1], 'int32').dtype == 'float64' and np.mat('1 2').shape == (1, 2)
    assert np.cast['int32'](2.5) == 2 and np.obj2sctype('f') is np.float32 and np.msort([2, 1]).tolist() == [1, 2]
    with np.warnings.catch_warnings():
        np.warnings.simplefilter('ignore', np.VisibleDeprecationWarning)
