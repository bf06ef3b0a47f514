"""Bugs that were found and fixed, each under its symptom: devices, contexts and their kernels."""
import os

import theano_mgpu as mgpu
from theano_mgpu.cli import main
from theano_mgpu.cli.doctor import device_checks
from theano_mgpu.devices import discovery
from theano_mgpu.devices.context_map import parse_context_map
from theano_mgpu.devices.contexts import gpu_context
from theano_mgpu.devices.theano_contexts import compiling_for

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.processes import python

pytestmark = pytest.mark.verified


@pytest.mark.slow
def test_a_child_process_can_open_a_gpu_too(gpu2):
    """Theano marks the environment; children then refused: "You can't initialize the GPU in a subprocess"."""
    code = 'import theano_mgpu as mgpu; print(mgpu.init("dev0->%s")[0].name)' % gpu2[0].device
    assert python('-c', code).stdout.strip() == 'dev0'


def test_a_python_integer_shape_of_a_transposed_convolution_is_not_read_as_garbage(gpu2):
    """Theano read int8 constants as int64: "Failed to allocate output of 4 x 2 x 442372112 x 404381200"."""
    from theano.tensor.nnet.abstract_conv import conv2d_grad_wrt_inputs
    x, w = theano.tensor.ftensor4('x'), theano.shared(np.ones((3, 2, 3, 3), 'float32'), name='w')
    up = conv2d_grad_wrt_inputs(x, w, input_shape=(None, 2, 16, 16), border_mode='half', subsample=(2, 2))
    up_by_op = theano.tensor.nnet.abstract_conv.AbstractConv2d_gradInputs(border_mode='half', subsample=(2, 2))(
        w, x, theano.tensor.stack([16, 16]))
    images = np.random.RandomState(0).randn(4, 3, 8, 8).astype('float32')
    one, other = mgpu.function([x], [up, up_by_op])(images)
    np.testing.assert_allclose(one, other, rtol=1e-5)


def elementwise(x):
    return [T.maximum(x, 0.5), T.minimum(x, 0.5), T.round(x), x // 2, T.cast(T.cast(x, 'bool'), 'float32'),
            T.switch(x, x, 2)]


@pytest.mark.slow
def test_kernels_that_ended_the_process_on_opencl_build(gpu2):
    """Segmentation fault for maximum, minimum, round, //, a cast to bool, and a float as a condition."""
    if gpu2[0].kind != 'opencl':
        pytest.skip('these are spelled for CUDA already')
    from pygpu import _elemwise as pygpu_elemwise
    from theano.gpuarray.basic_ops import as_gpuarray_variable
    from theano.gpuarray.elemwise import GpuElemwise
    for expression in elementwise(T.fvector()):
        op = GpuElemwise(expression.owner.op.scalar_op)
        with compiling_for(gpu2[0]):
            node = op.make_node(*[as_gpuarray_variable(v, gpu2[0].name) for v in expression.owner.inputs])
        arguments = [pygpu_elemwise.arg(name, v.type.typecode, read='i' in name, write='o' in name)
                     for name, v in zip(['i%d' % i for i in range(len(node.inputs))] + ['o0'],
                                        node.inputs + node.outputs)]
        pygpu_elemwise.GpuElemwise(gpu_context(gpu2[0]), op._generate_op_string(node)[1], arguments, 1)


@pytest.mark.slow
def test_elementwise_ops_on_a_gpu_are_those_of_the_cpu(gpu2):
    x = T.fvector('x')
    total = sum(elementwise(x))
    values = np.array([-2.5, -1, -0.5, 0, 0.25, 0.5, 1.5, 3], 'float32')
    np.testing.assert_allclose(mgpu.function([x], total)(values), theano.function([x], total)(values), rtol=1e-6)


def gpu_blas():
    """Return products whose output is given and multiplied by 0: a name, the op and its other inputs."""
    from theano.gpuarray import blas
    matrix, vector, stack = np.ones((8, 8), 'float32'), np.ones(8, 'float32'), np.ones((2, 8, 8), 'float32')
    return {'gemv': (blas.gpugemv_no_inplace, vector, matrix, vector),
            'gemm': (blas.gpugemm_no_inplace, matrix, matrix, matrix),
            'gemm of transposed': (blas.gpugemm_no_inplace, matrix, matrix.T, matrix),
            'batched gemm': (blas.gpugemmbatch_no_inplace, stack, stack, stack)}


@pytest.mark.slow_with('gemv-c')
@pytest.mark.parametrize('name,linker', [('gemv', 'c'), ('gemv', 'py'), ('gemm', 'c'), ('gemm of transposed', 'c'),
                                         ('batched gemm', 'c')])
def test_a_product_into_memory_that_holds_nan_is_not_nan(gpu2, name, linker):
    """Theano has matrix * vector computed into uninitialised memory, times 0: on OpenCL NaN in 9 of 10 runs."""
    op, like, a, b = gpu_blas()[name]
    with compiling_for(gpu2[0]):
        out, a, b = (theano.shared(value, target=gpu2[0].name) for value in (like * np.float32(np.nan), a, b))
        f = theano.function([], op(out, np.float32(1), a, b, np.float32(0)), mode=theano.Mode(linker, None))
    np.testing.assert_array_equal(f(), like * 8)


def test_the_last_row_of_an_id_remains(gpu2):
    """A batch that sets a word vector twice left any of the two: one run of ten had other costs."""
    rng = np.random.RandomState(0)
    ids = rng.randint(-4, 4, 900).astype('int32')
    x, rows = rng.uniform(size=(4, 64)).astype('float32'), rng.uniform(size=(900, 64)).astype('float32')
    expected = x.copy()
    for i, row in zip(ids, rows):
        expected[i] = row
    with compiling_for(gpu2[0]):
        table = theano.shared(x, target=gpu2[0].name)
        set_rows = theano.function([], T.set_subtensor(table[ids], rows))
    for _ in range(12):
        np.testing.assert_array_equal(set_rows(), expected)


@pytest.fixture
def opencl_cpus(monkeypatch, contexts):
    """Return the OpenCL devices of a CPU, on a machine where nothing is mapped and CUDA has no device."""
    discover = discovery.discover
    monkeypatch.setattr(discovery, 'discover', lambda kind: ([], 'none') if kind == 'cuda' else discover(kind))
    monkeypatch.setenv('THEANO_FLAGS', '')
    monkeypatch.setenv('THEANORC', os.devnull)
    if not discovery.opencl_cpus():
        pytest.skip('no OpenCL device is a CPU')
    return discovery.opencl_cpus()


def test_a_cpu_seen_through_opencl_is_no_default_device(opencl_cpus, monkeypatch, capsys):
    """`init(2)` took PoCL's devices where there was no GPU: six times as slow as `cpu` contexts."""
    assert discovery.discover_best() == ['cpu'] and set(map(discovery.type_of, opencl_cpus)) == {'CPU'}
    for _ in range(2):
        assert [context.device for context in mgpu.init(2)] == ['cpu', 'cpu']
    assert capsys.readouterr().err.count('no usable GPU here: the 2 contexts are on the CPU') == 1
    assert [context.device for context in mgpu.init()] == ['cpu'] and not capsys.readouterr().err
    monkeypatch.setenv('THEANO_FLAGS', 'contexts=mapped->' + opencl_cpus[0])
    assert [context.device for context in mgpu.init()] == opencl_cpus[:1]
    with pytest.raises(mgpu.ContextError, match='2 contexts were asked for; there are 1'):
        mgpu.init(2)
    monkeypatch.setenv('THEANO_FLAGS', '')
    monkeypatch.setattr(discovery, 'type_of', lambda device: 'GPU')
    assert discovery.discover_best() == discovery.discover('opencl')[0]


def test_a_machine_whose_opencl_device_is_its_cpu_takes_no_memory_for_that(opencl_cpus):
    """`theano-mgpu run` took 61 MiB more than plain Theano, as the first function loaded PoCL, and so LLVM and Clang.
    """
    if not discovery._cpus_of_pocl():
        pytest.skip('PoCL is not the only driver of OpenCL')
    code = ("from theano_mgpu.devices import discovery\nprint(discovery.discover_best(), *map(discovery.type_of, %r))\n"
            "print(*[name for name in ('LLVM', 'libpocl') if name in open('/proc/self/maps').read()])" % (opencl_cpus,))
    expected, hidden = "['cpu'] " + ' '.join(['CPU'] * len(opencl_cpus)), {'CUDA_VISIBLE_DEVICES': ''}
    assert python('-c', code, **hidden).stdout.splitlines() == [expected, '']
    # Others than PoCL's own CPUs may be there: it is asked.
    for name, value in (('POCL_DEVICES', 'pthread pthread cuda'), ('OCL_ICD_VENDORS', '/etc/OpenCL/vendors')):
        assert python('-c', code, **hidden, **{name: value}).stdout.splitlines() == [expected, 'LLVM libpocl']


def test_a_cpu_seen_through_opencl_is_listed_as_such(opencl_cpus, capsys):
    assert main(['devices']) == 0
    rows = [line.split()[:4] for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows == [['dev0', 'cpu', 'cpu', 'CPU']] + [['-', device, 'opencl', 'CPU'] for device in opencl_cpus]
    found = device_checks.check_opencl(None).text
    assert found.startswith(opencl_cpus[0] + ' (CPU)') and 'only if a context is mapped to it' in found


def test_the_demo_takes_two_opencl_contexts_unless_others_are_mapped(opencl_cpus, monkeypatch):
    from theano_cnn import open_contexts
    monkeypatch.setenv('THEANO_FLAGS', 'contexts=a->cpu;b->cpu')
    assert [context.name for context in open_contexts(None, opencl_cpus=True)] == ['a', 'b']
    monkeypatch.setenv('THEANO_FLAGS', '')
    monkeypatch.setattr(mgpu, 'init', parse_context_map)  # dev0 may be open on another device
    assert [context.device for context in open_contexts(None, opencl_cpus=True)] == (opencl_cpus * 2)[:2]


def test_one_cpu_context_is_told_once_and_nothing_is_timed_on_it():
    """`theano-mgpu run` said for each function that none is divided, and then timed each one divided among one."""
    mgpu.init('host0->cpu')
    told = []
    report = mgpu.enable(tell=told.append)
    try:
        x = T.matrix('x')
        functions = [theano.function([x], x * factor, mode='FAST_COMPILE') for factor in (2, 3)]
    finally:
        mgpu.disable()
    text, = told
    assert text.startswith('there is one context, on the CPU: nothing is divided. Without a map, each core')
    assert [usage.why for usage in report.usages] == ['there is one context, on the CPU'] * 2
    assert [function.mgpu_divided for function in functions] == [None, None]


NAMED = """
import pickle, sys
import theano_mgpu, theano, theano.gpuarray, numpy as np, theano.tensor as T
what, name, path = sys.argv[1:]
if what == 'shared':
    w = theano.shared(np.arange(3, dtype='float32'), target=name, name='w', broadcastable=(False,))
    y = (w * 2).transfer('cpu')
elif what == 'transfer':
    y = T.constant(np.arange(3, dtype='float32')).transfer(name).sum().transfer('cpu') * np.ones(3, 'float32')
elif what == 'constructor':
    w = theano.gpuarray.gpuarray_shared_constructor(np.arange(3, dtype='float32'), target=name)
    y = (w * 2).transfer('cpu')
if what == 'unpickle':
    with open(path, 'rb') as file:
        f = pickle.load(file)
else:
    f = theano.function([], y)
    with open(path, 'wb') as file:
        pickle.dump(f, file)
print(f(), *theano.gpuarray.type.list_contexts())
"""


def run_named(flags, *arguments):
    """Run NAMED in a process of its own, with these contexts; return the last line of its output, or of its error."""
    done = python('-c', NAMED, *arguments, flags='floatX=float32,contexts=' + flags, expected=None)
    return (done.stdout or done.stderr).strip().splitlines()[-1]


@pytest.mark.slow
def test_flags_alone_open_the_contexts_that_a_script_names(gpu2, tmp_path):
    """Only `mgpu.init()` opened them: "No suitable SharedVariable constructor", "Can't transfer to target dev0"."""
    flags = ';'.join('dev%d->%s' % pair for pair in enumerate(context.device for context in gpu2)) + ';host->cpu'
    path = tmp_path / 'function'
    assert run_named(flags, 'shared', 'dev1', path) == '[0. 2. 4.] dev1'
    assert run_named(flags, 'unpickle', '', path) == '[0. 2. 4.] dev1'
    assert run_named(flags, 'shared', 'other', path) == (
        'theano.gpuarray.type.ContextNotDefined: context name other not defined; known contexts: %s. Map it in '
        'THEANO_FLAGS, e.g. contexts=other->cuda0' % flags)


@pytest.mark.slow
@pytest.mark.parametrize('what, line', [('transfer', '[3. 3. 3.] dev0'), ('constructor', '[0. 2. 4.] dev0')])
def test_each_way_to_name_a_context_opens_it(what, line, gpu2, tmp_path):
    flags = ';'.join('dev%d->%s' % pair for pair in enumerate(context.device for context in gpu2))
    assert run_named(flags, what, 'dev0', tmp_path / 'function') == line


def test_what_is_named_for_a_context_on_the_cpu_is_on_the_host(contexts):
    contexts('cpu', 2)
    w = theano.shared(np.ones(3, 'float32'), target='host1', broadcastable=(False,), borrow=True)
    x = T.fvector()
    assert w.type == x.type and x.transfer('host0') is x
    for name in (lambda: theano.shared(np.ones(3), target='other'), lambda: x.transfer('other')):
        with pytest.raises(ValueError, match='context name other not defined; known contexts: host0->cpu;host1->cpu'):
            name()


def test_targets_that_a_script_registers_are_asked(cpu2, monkeypatch):
    monkeypatch.setattr(T.basic.transfer, '_others', list(T.basic.transfer._others))
    T.basic.register_transfer(lambda x, target: x + 1 if target == 'mine' else None)
    x = T.fvector()
    assert x.transfer('mine').owner.inputs[0] is x
    with pytest.raises(ValueError, match="Can't transfer to target other"):
        x.transfer('other')
