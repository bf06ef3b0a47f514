"""Each kind of op, compiled for a CPU and for a GPU context: the results of Theano, and no op on a wrong context."""
import theano_mgpu as mgpu
from theano_mgpu.comm.communicator import Communicator
from theano_mgpu.errors import GraphError
from theano_mgpu.graph import graph
from theano_mgpu.graph.audit import ON_HOST
from theano_mgpu.plan import Part
from theano_mgpu.runtime.executable import CompiledPart, variables_of
from theano_mgpu.runtime.replicas.replicated import replicated

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.devices import gpu_devices
from support.modes import PYTHON
from support.sending import Sender
from support.small_models import shared
from theano.gof.graph import ancestors
from theano.gpuarray import type as gpu_type
from theano.gpuarray.basic_ops import GpuFromHost, host_from_gpu
from theano.ifelse import ifelse
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.nnet import conv
from theano.tensor.nnet.abstract_conv import AbstractConv2d_gradInputs
from theano.tensor.signal.pool import pool_2d

RNG = np.random.RandomState(0)
X = RNG.randn(6, 5).astype('float32')
IMAGES = RNG.randn(4, 3, 8, 8).astype('float32')
LABELS = np.array([0, 1, 2, 0, 1, 2], 'int32')
CASES = {}
HEAVY = ('Dot', 'Gemm', 'Gemv', 'Corr', 'Conv', 'Pool', 'mrg', 'tanh', 'sqr', 'Sum')
MAY_FALL_TO_THE_HOST = ('scan', 'half_precision', 'what_opencl_cannot')


def case(function):
    CASES[function.__name__] = function
    return function


def normal(*shape, dtype='float32'):
    return shared(RNG.randn(*shape), 'w%s' % (shape,), dtype)


def with_gradients(outputs, *variables):
    """Return the outputs of a function and the gradients of the first of them."""
    return list(outputs) + theano.grad((outputs[0] ** 2).mean(), list(variables))


@case
def dense():
    x, w, b = T.fmatrix(), normal(5, 3), normal(3)
    return [x], with_gradients([T.tanh(T.dot(x, w) + b)], w, b), [X]


@case
def softmax_with_sparse_labels():
    x, y, w, b = T.fmatrix(), T.ivector(), normal(5, 3), normal(3)
    p = T.nnet.softmax(T.dot(x, w) + b)
    loss = T.nnet.categorical_crossentropy(p, y).mean()
    accuracy = T.eq(T.argmax(p, axis=1), y).mean()
    return [x, y], [loss, accuracy, p] + theano.grad(loss, [w, b]), [X, LABELS]


def convolution(shape=(4, 3, 3, 3), **kwargs):
    x, w = T.ftensor4(), normal(*shape)
    return [x], with_gradients([T.nnet.conv2d(x, w, **kwargs)], w, x), [IMAGES]


@case
def convolution_default():
    return convolution()


@case
def convolution_half_unflipped():
    return convolution(filter_flip=False, border_mode='half')


@case
def convolution_strided():
    return convolution(subsample=(2, 2), border_mode='full')


@case
def convolution_dilated():
    return convolution(filter_dilation=(2, 2))


@case
def convolution_grouped():
    return convolution(shape=(6, 1, 3, 3), num_groups=3)


@case
def convolution_legacy():
    """Return convolutions whose op has no kernel for GPUs, of known and of unknown shapes, and gradients of both."""
    x, w = T.ftensor4(), normal(4, 3, 3, 2)
    known = conv.conv2d(x, w, image_shape=IMAGES.shape, filter_shape=(4, 3, 3, 2), border_mode='full')
    strided = conv.conv2d(x, w, subsample=(2, 1))
    return [x], with_gradients([conv.conv2d(x, w)], w, x) + with_gradients([known], w, x) + [strided], [IMAGES]


@case
def convolution_transposed():
    x, w = T.ftensor4(), normal(3, 2, 3, 3)
    op = AbstractConv2d_gradInputs(border_mode='half', subsample=(2, 2), filter_flip=True)
    return [x], with_gradients([op(w, x, T.stack([16, 16]))], w, x), [IMAGES]


@case
def pooling():
    x = T.ftensor4()
    highest = pool_2d(x, (2, 2), ignore_border=True)
    average = pool_2d(x, (2, 2), ignore_border=True, mode='average_exc_pad')
    return [x], [highest, average] + theano.grad((highest ** 2 + average).sum(), [x]), [IMAGES]


@case
def batch_normalisation():
    x = T.ftensor4()
    gamma, beta = [theano.shared(RNG.rand(1, 3, 1, 1).astype('float32'), broadcastable=(True, False, True, True))
                   for _ in range(2)]
    normal_train = T.nnet.bn.batch_normalization_train(x, gamma, beta, axes='spatial')
    normal_test = T.nnet.bn.batch_normalization_test(x, gamma, beta, beta, gamma, axes='spatial')
    return [x], list(normal_train) + [normal_test] + theano.grad((normal_train[0] ** 3).mean(), [gamma, beta]), [IMAGES]


@case
def embedding():
    indices, w = T.ivector(), normal(7, 4)
    return [indices], with_gradients([w[indices]], w), [LABELS]


@case
def random_streams():
    x, streams = T.fmatrix(), MRG_RandomStreams(3)
    draws = [streams.uniform(x.shape, dtype='float32'), streams.normal(x.shape, dtype='float32')]
    return [x], draws + [x * streams.binomial(x.shape, p=0.5, dtype='float32')], [X]


@case
def scan():
    x, w = T.fmatrix(), normal(5, 5)
    states, _ = theano.scan(lambda h: T.tanh(T.dot(h, w) + x), outputs_info=[T.zeros_like(x)], n_steps=3)
    return [x], with_gradients([states], w), [X]


@case
def lazy_if():
    x, w = T.fmatrix(), normal(5, 3)
    return [x], with_gradients([ifelse(T.gt(x.sum(), 0), T.dot(x, w), T.dot(-x, w))], w), [X]


@case
def double_precision():
    x, w = T.dmatrix(), normal(5, 3, dtype='float64')
    return [x], with_gradients([T.dot(x, w)], w), [X.astype('float64')]


@case
def half_precision():
    x, w = T.TensorType('float16', (False, False))(), normal(5, 3, dtype='float16')
    return [x], with_gradients([T.tanh(T.dot(x, w))], w), [X.astype('float16')]


@case
def integers():
    x = T.lmatrix()
    return [x], [x * 2 + 1, x.sum(axis=0)], [np.arange(6).reshape(2, 3)]


@case
def shared_data():
    indices, samples, w = T.ivector(), normal(20, 5), normal(5, 3)
    return [indices], with_gradients([T.dot(samples[indices], w)], w), [LABELS]


@case
def what_opencl_cannot():
    """Return graphs of ops that fail, or have no kernel, on OpenCL; each has to be computed on the host."""
    x = T.fmatrix()
    return [x], [T.cumsum(x, axis=0), x.max(axis=1), T.any(x > 0, axis=0), T.sort(x, axis=1), T.nnet.logsoftmax(x),
                 T.erfinv(T.tanh(x)), T.nlinalg.matrix_inverse(T.dot(x.T, x))], [X]


@case
def shapes():
    x = T.fmatrix()
    return [x], [T.concatenate([x, 2 * x], axis=1), x.flatten(), x[::-1], T.set_subtensor(x[0], 0),
                 T.batched_dot(x[:, :, None], x[:, None, :]), T.alloc(np.float32(2), 3, x.shape[0]), x.var(axis=0),
                 T.switch(x > 0, x, 0), T.tile(x, (2, 2))], [X]


def compile_for(context, inputs, outputs, mode=None):
    part = Part(tuple(inputs), tuple(inputs), tuple(outputs), tuple(outputs), {}, (context,))
    replicas = {variable: replicated(variable) for variable in variables_of(part)}
    return CompiledPart(part, replicas, Communicator(), mode).functions[0]


def marks_of(name):
    compiled = name.startswith(('convolution', 'pooling'))
    slow = name in ('batch_normalisation', 'convolution_default', 'convolution_dilated', 'convolution_grouped',
                    'convolution_half_unflipped', 'convolution_legacy', 'convolution_strided', 'dense',
                    'double_precision', 'embedding', 'pooling', 'random_streams', 'scan', 'shapes',
                    'softmax_with_sparse_labels')
    return [pytest.mark.slow] * slow + [pytest.mark.needs_compiler] * compiled


@pytest.mark.slow_but_with('shared_data')
@pytest.mark.parametrize('name', [pytest.param(name, marks=marks_of(name)) for name in sorted(CASES)])
def test_op_on_cpu_and_gpu(contexts, name):
    inputs, outputs, arguments = CASES[name]()
    results = {}
    for kind in ('cpu', 'gpu') if gpu_devices() else ('cpu',):
        function = compile_for(contexts(kind, 1)[0], inputs, outputs)
        results[kind] = [np.asarray(value) for value in function.unwatched_call(*Sender(function).send(arguments))]
        assert not mgpu.audit(function).wrong
        if kind == 'gpu' and name not in MAY_FALL_TO_THE_HOST:
            on_host = [str(entry.op) for entry in mgpu.audit(function) if entry.where == ON_HOST]
            assert not [op for op in on_host if any(word in op for word in HEAVY)], on_host
    tolerance = {'double_precision': 1e-12, 'half_precision': 1e-2}.get(name, 2e-5)
    # Theano as it is, with few optimisations: a third opinion.
    few = theano.compile.Mode('cvm' if theano.config.cxx else 'py', 'fast_compile').excluding('gpuarray_opt')
    plain = theano.function(inputs, outputs, no_default_updates=True, mode=few)
    for kind, values in results.items():
        for i, (value, expected) in enumerate(zip(values, plain(*arguments))):
            assert value.dtype == expected.dtype and value.shape == expected.shape
            np.testing.assert_allclose(value, expected, rtol=tolerance, atol=tolerance,
                                       err_msg='%s, output %d' % (kind, i))


@pytest.mark.slow
def test_scan_stays_on_the_host_on_opencl(gpu2):
    if gpu2[0].kind != 'opencl':
        pytest.skip('no OpenCL here')
    inputs, outputs, _ = scan()
    audit = mgpu.audit(compile_for(gpu2[0], inputs, outputs))
    assert any('forall' in str(entry.op) and entry.where == ON_HOST for entry in audit)


def test_audit_sees_a_wrong_context(gpu2):
    """An op that runs on another context than its function's is found, also where others are right."""
    x, w = T.fmatrix(), theano.shared(X.T, target=gpu2[1].name)
    function = theano.function([x], T.dot(x, w))
    function.mgpu_context = gpu2[0]
    audit = mgpu.audit(function)
    assert [entry.where for entry in audit.wrong] and 'wrong context' in str(audit)


def test_audit_refuses_what_was_not_compiled_here():
    with pytest.raises(GraphError, match='not compiled for a context'):
        mgpu.audit(theano.function([], T.zeros(2)))


def test_mixed_devices_are_an_error(gpu2):
    x = T.fmatrix('x')
    with pytest.raises(GraphError, match='mixed devices: .* bound to context .%s.*remove .transfer' % gpu2[1].name):
        mgpu.function([x], T.tanh(x.transfer(gpu2[1].name)).transfer('cpu'))


class NoSuchFunction(theano.scalar.UnaryScalarOp):
    """A scalar op that no compiler of kernels knows."""

    def impl(self, x):
        return x

    def c_code(self, node, name, inputs, outputs, sub):
        return '%s = no_such_function(%s);' % (outputs[0], inputs[0])


def test_a_kernel_that_cannot_be_made_is_an_error(gpu2, monkeypatch):
    """Theano ended the process by a segmentation fault, when it freed a kernel that had not been made."""
    monkeypatch.delenv('CUDA_ON_CPU_SOURCES', raising=False)  # make test-nvrtc compiles the kernels of tests
    x = T.fmatrix()
    unknown = theano.tensor.elemwise.Elemwise(NoSuchFunction(theano.scalar.same_out))(x)
    with pytest.raises(RuntimeError, match='the kernel of an elementwise op cannot be made: .'):
        compile_for(gpu2[0], [x], [unknown])


@pytest.mark.slow_but_with('infer', 'graph_to_gpu')
@pytest.mark.parametrize('name', ['infer', 'graph_to_gpu', 'mrg', 'conv_shape', 'legacy_convolution'])
def test_each_patch_is_needed(gpu2, monkeypatch, name):
    """Without the patch, the op that it fixes fails, or runs on the host."""
    from theano_mgpu.devices.theano_contexts import infer_context_name

    from theano.gpuarray import basic_ops, blas, opt, rng_mrg
    context = gpu2[1]
    make = {'infer': convolution_default, 'graph_to_gpu': embedding, 'mrg': random_streams,
            'conv_shape': convolution_transposed, 'legacy_convolution': convolution_legacy}[name]
    if name == 'infer':
        for module in (basic_ops, opt, blas):
            monkeypatch.setattr(module, 'infer_context_name', infer_context_name.original)
    elif name == 'graph_to_gpu':
        monkeypatch.setattr(opt.GraphToGPU, 'apply', opt.GraphToGPU.apply.__wrapped__)
    elif name == 'mrg':
        monkeypatch.setattr(rng_mrg.GPUA_mrg_uniform, 'new', staticmethod(rng_mrg.GPUA_mrg_uniform.new.__wrapped__))
    elif name == 'legacy_convolution':
        monkeypatch.setattr(opt.gpu_seqopt['replace_legacy_convolutions'], 'apply', lambda fgraph: None)
    else:
        for op in (blas.GpuCorrMM_gradInputs, blas.GpuCorrMM_gradWeights):
            monkeypatch.setattr(op, 'make_node', op.make_node.__wrapped__)
    inputs, outputs, arguments = make()
    errors = []
    monkeypatch.setattr(theano.gof.opt._logger, 'error', lambda *args: errors.append(args))
    try:
        mode = theano.compile.get_default_mode().excluding('cudnn')  # its convolutions need no patch
        function = compile_for(context, inputs, outputs, mode=mode)
        function.unwatched_call(*Sender(function).send(arguments))
    except (RuntimeError, ValueError, AssertionError) as error:
        errors.append(error)
    assert errors


def test_transfers_to_the_device_of_the_flag_are_left_out(gpu2, monkeypatch):
    """Gradients of parameters there have such transfers: "mixed devices" for each Keras model with device=cuda0."""
    monkeypatch.setitem(gpu_type._context_reg, None, gpu_type.get_context(gpu2[0].name))  # as Theano does by the flag
    x = T.fvector('x')
    there = GpuFromHost(None)
    found, = graph.host_graph([host_from_gpu(there(T.tanh(host_from_gpu(there(x))))) * 2])
    assert not any(isinstance(variable.type, gpu_type.GpuArrayType) for variable in ancestors([found]))
    np.testing.assert_allclose(found.eval({x: np.ones(2, 'float32')}), 2 * np.tanh(np.ones(2)), rtol=1e-6)
    named, _ = theano.scan(lambda each: host_from_gpu(GpuFromHost(gpu2[0].name)(each)), x.dimshuffle(0, 'x'))
    with pytest.raises(GraphError, match='mixed devices: GpuFromHost'):
        graph.host_graph([named])


def test_the_checksum_tells_graphs_apart():
    def number(constant, shape=(5, 3), op=T.tanh):
        x, w = T.matrix('x'), shared(np.ones(shape), 'w')
        outputs = [op(T.dot(x, w)) + T.sum(constant)]
        return graph.checksum([x], outputs, graph.shared_variables(outputs))
    graphs = [(1,), (2,), (1, (5, 4)), (1, (5, 3), T.exp), (np.ones((2, 3)),), (np.ones((3, 2)),)]
    numbers = [number(*each) for each in graphs]
    assert len(set(numbers)) == len(graphs) and numbers == [number(*each) for each in graphs]


def fingerprint(function):
    x, w = T.matrix('x'), shared(np.ones((3, 3)), 'w')
    (ops, whole), = graph.fingerprints([function(x, w)], {x: 0, w: 1})
    return ops, whole


def looped(combine):
    return lambda x, w: theano.scan(lambda row, before: combine(row, before), x, T.zeros_like(x[0]))[0][-1]


def wrapped(op):
    def function(x, w):
        a, b = T.matrix(), T.matrix()
        return theano.OpFromGraph([a, b], [op(a, b)])(x, w)
    return function


def test_fingerprints_are_of_ops_and_of_constants():
    """A graph within an op counts, too."""
    same = [lambda x, w: T.dot(x, w) * 2, lambda x, w: T.dot(x, w) * 3]
    others = [lambda x, w: T.dot(w, x) * 2, lambda x, w: T.dot(x, w) + 2, lambda x, w: T.dot(x, w).sum(axis=0),
              lambda x, w: T.dot(x, w).sum(axis=1), looped(lambda a, b: a + b), looped(lambda a, b: a - b),
              looped(lambda a, b: b - a), wrapped(lambda a, b: a - b), wrapped(lambda a, b: b - a)]
    found = list(map(fingerprint, same + others))
    assert found == list(map(fingerprint, same + others))
    assert found[0][0] == found[1][0] and found[0][1] != found[1][1]
    assert len({ops for ops, _ in found[1:]}) == len(found) - 1
    inner = [fingerprint(looped(lambda a, b, factor=factor: a + b * factor)) for factor in (2, 3)]
    assert inner[0][0] == inner[1][0] and inner[0][1] != inner[1][1]


def test_a_fingerprint_does_not_depend_on_the_device(gpu2):
    x = T.fmatrix('x')
    there, here = (theano.shared(np.ones((3, 2), 'float32'), 'w', **where) for where in ({'target': gpu2[0].name}, {}))
    found = [graph.fingerprints([T.dot(x, w).sum() * T.sqr(w).sum()], {x: 0, w: 1}) for w in (there, here)]
    assert found[0] == found[1]


@pytest.mark.parametrize('wider', [lambda total: T.cast(total, 'int64'), lambda total: total.sum(dtype='int64'),
                                   lambda total: T.cast(total, 'float32')], ids=['cast', 'sum', 'float'])
def test_a_sum_of_small_whole_numbers_wraps_around_before_it_is_widened(wider, cpu2):
    """No output has the sum itself, which would be exchanged then, before it is cast."""
    x = T.bmatrix('x')
    values, total = np.full((8, 2), 25, 'int8'), wider(x.sum(axis=0, dtype='int8'))
    f = mgpu.function([x], total, mode=PYTHON)
    np.testing.assert_array_equal(f(values), theano.function([x], total, mode=PYTHON)(values))
    assert f.plan.program.is_divided
