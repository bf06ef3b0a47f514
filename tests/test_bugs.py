"""Bugs that were found and mended, each under its symptom."""
import gc
import os
import resource
import subprocess
import sys
import threading

import theano_mgpu as mgpu
from theano_mgpu import compat
from theano_mgpu.contexts import compiling_for, gpu_context

import numpy as np
import pytest
import theano
import theano.tensor as T
from common import data, dense_model, momentum
from models import plain_step


def resident_bytes():
    with open('/proc/self/statm') as f:
        return int(f.read().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not os.path.exists('/proc/self/statm'), reason='reads /proc')
@pytest.mark.parametrize('kind,executor', [('cpu', 'threads'),
                                           pytest.param('gpu', 'serial', marks=pytest.mark.slow)])
def test_2000_steps_do_not_grow_the_process(contexts, kind, executor):
    contexts(kind, 2)
    model = dense_model()
    step = mgpu.training_function(model.inputs, model.loss, model.params, momentum, executor=executor,
                                  outputs=[model.probabilities])
    x, labels = data(24, 7)
    for _ in range(200):
        step(x, labels)
    before = resident_bytes()
    for n in range(2000):
        step(x[n % 7:], labels[n % 7:])
    assert resident_bytes() - before < 20e6


def test_a_child_process_can_open_a_gpu_too(gpu2):
    """Theano marks the environment; children then refused: "You can't initialize the GPU in a subprocess"."""
    code = 'import theano_mgpu as mgpu; print(mgpu.init("dev0->%s")[0].name)' % gpu2[0].device
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert done.stdout.strip() == 'dev0', done.stderr


def test_a_borrowed_value_of_a_variable_with_copies_is_not_written_to_in_silence(cpu2):
    model = dense_model()
    step = mgpu.training_function(model.inputs, model.loss, model.params, momentum)
    with pytest.raises(ValueError, match='read-only'):
        model.params[0].get_value(borrow=True)[...] = 0
    assert np.isfinite(step(*data(6, 7)))


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


def test_two_inputs_without_names_get_each_its_own_argument(cpu2):
    """They were told apart by their text, which is that of their type: both got the last argument."""
    a, b = theano.tensor.fmatrix(), theano.tensor.fmatrix()
    first, second = data(5, 3)[0], data(5, 3, seed=1)[0]
    np.testing.assert_array_equal(mgpu.function([a, b], a - b)(first, second), first - second)


INNER = '''
import sys
import theano_mgpu as mgpu
import numpy as np
import theano
import theano.tensor as T
mgpu.init('a->cpu;b->cpu;c->cpu')
x, w = T.tensor3('x'), theano.shared(np.eye(64, dtype='float32') / 2)
if sys.argv[1] == 'scan':
    y = theano.scan(lambda row, total: T.tanh(T.dot(total, w) + row), sequences=x.dimshuffle(1, 0, 2),
                    outputs_info=T.zeros_like(x[:, 0]))[0][-1]
else:
    row, m = T.matrices('row', 'm')
    layer = theano.OpFromGraph([row, m], [T.tanh(T.dot(T.exp(T.dot(row, m)), m))])
    y = x[:, 0]
    for _ in range(8):
        y = layer(y + x[:, 1], w)
mode = theano.Mode('py', 'fast_compile')
whole = theano.function([x], y, mode=mode)
f = mgpu.function([x], y, mode=mode, executor='threads')
sys.setswitchinterval(1e-6)
for number in range(200):
    values = np.random.RandomState(number).randn(9 + number % 5, 6, 64).astype('float32')
    np.testing.assert_allclose(f(values), whole(values), rtol=1e-5)
'''


@pytest.mark.parametrize('inner', ['scan', 'OpFromGraph'])
def test_replicas_in_threads_do_not_run_one_inner_function(inner):
    """Functions over one op shared its compiled inner graph: "expected an ndarray, not None", or wrong results."""
    done = subprocess.run([sys.executable, '-c', INNER, inner], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def elementwise(x):
    return [T.maximum(x, 0.5), T.minimum(x, 0.5), T.round(x), x // 2, T.cast(T.cast(x, 'bool'), 'float32'),
            T.switch(x, x, 2)]


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


def test_elementwise_ops_on_a_gpu_are_those_of_the_cpu(gpu2):
    x = T.fvector('x')
    total = sum(elementwise(x))
    values = np.array([-2.5, -1, -0.5, 0, 0.25, 0.5, 1.5, 3], 'float32')
    np.testing.assert_allclose(mgpu.function([x], total)(values), theano.function([x], total)(values), rtol=1e-6)


def test_validation_in_fit_generator_leaves_the_progress_bar_of_the_training_alone(cpu2):
    """Keras hands its callbacks on to `evaluate`: "'<' not supported between instances of 'int' and 'NoneType'"."""
    from theano_mgpu.keras import multi_gpu_model

    from keras.layers import Dense
    from keras.models import Sequential
    x, y = np.ones((10, 3)), np.ones((10, 2))
    model = multi_gpu_model(Sequential([Dense(2, input_shape=(3,))]))
    model.compile('sgd', 'mse', mode=theano.Mode(linker='py', optimizer='fast_compile'))
    generator = ((x, y) for _ in range(20))
    history = model.fit_generator(generator, steps_per_epoch=2, epochs=2, verbose=2, validation_data=(x, y))
    assert len(history.history['val_loss']) == 2


@pytest.mark.parametrize('kind', ['cpu', 'gpu'])
def test_a_keras_model_whose_layers_are_all_frozen_is_fitted(kind, contexts):
    """Keras runs such a model, for its metrics or running statistics: "params is empty: name the shared variables"."""
    from theano_mgpu.keras import multi_gpu_model

    from keras.layers import Dense
    from keras.models import Sequential
    contexts(kind, 2)
    x, y = np.ones((10, 3)), np.ones((10, 2))
    template = Sequential([Dense(2, input_shape=(3,))])
    template.trainable = False
    template.compile('adam', 'mse', metrics=['mae'])
    before = template.get_weights()
    expected = template.evaluate(x, y, verbose=0)
    model = multi_gpu_model(template)
    for _ in range(2):
        np.testing.assert_allclose(model.train_on_batch(x, y), expected, rtol=1e-6)
    np.testing.assert_array_equal(template.get_weights()[0], before[0])
    assert model.optimizer.get_weights()[0] == 2  # steps are counted all the same


def gpu_blas():
    """Products whose output is given and multiplied by 0: a name, the op and its other inputs."""
    from theano.gpuarray import blas
    matrix, vector, stack = np.ones((8, 8), 'float32'), np.ones(8, 'float32'), np.ones((2, 8, 8), 'float32')
    return {'gemv': (blas.gpugemv_no_inplace, vector, matrix, vector),
            'gemm': (blas.gpugemm_no_inplace, matrix, matrix, matrix),
            'gemm of transposed': (blas.gpugemm_no_inplace, matrix, matrix.T, matrix),
            'batched gemm': (blas.gpugemmbatch_no_inplace, stack, stack, stack)}


@pytest.mark.parametrize('name,linker', [('gemv', 'c'), ('gemv', 'py'), ('gemm', 'c'), ('gemm of transposed', 'c'),
                                         ('batched gemm', 'c')])
def test_a_product_into_memory_that_holds_nan_is_not_nan(gpu2, name, linker):
    """Theano has matrix * vector computed into uninitialised memory, times 0: on OpenCL NaN in 9 of 10 runs."""
    op, like, a, b = gpu_blas()[name]
    with compiling_for(gpu2[0]):
        out, a, b = (theano.shared(value, target=gpu2[0].name) for value in (like * np.float32(np.nan), a, b))
        f = theano.function([], op(out, np.float32(1), a, b, np.float32(0)), mode=theano.Mode(linker, None))
    np.testing.assert_array_equal(f(), like * 8)


def with_rate(update_on, seed=0):
    """A training function over two contexts, its model, and its learning rate in a shared variable."""
    model, rate = dense_model(seed), theano.shared(np.float32(0.1), 'rate')

    def sgd(gradients, params):
        return {param: param - rate * gradient for param, gradient in zip(params, gradients)}
    return mgpu.training_function(model.inputs, model.loss, model.params, sgd, update_on=update_on), model, rate


def schedule(model, rate, seen):
    """Batches, before each of which the learning rate is set and the weights are read."""
    for number in range(4):
        rate.set_value(np.float32(0.1 + 0.2 * number))
        seen.append(model.params[0].get_value())
        yield data(9, 7, seed=number)


@pytest.mark.parametrize('update_on', ['device', 'host'])
def test_a_learning_rate_that_is_set_by_the_generator_of_batches_counts_from_its_batch_on(contexts, kind, update_on):
    """It never reached the devices' copies, or it counted one batch early, or for one replica only."""
    contexts(kind, 2)
    found = []
    for loop in (lambda step, batches: [float(step(*batch)) for batch in batches],
                 lambda step, batches: [float(loss) for loss in step.over(batches)]):
        (step, model, rate), seen = with_rate(update_on), []
        losses = loop(step, schedule(model, rate, seen))
        found.append((losses, seen, [param.get_value() for param in model.params]))
    assert found[0][0] == found[1][0]
    for one, other in zip(found[0][1] + found[0][2], found[1][1] + found[1][2]):
        np.testing.assert_array_equal(one, other)


def test_a_generator_that_is_asked_ahead_may_not_touch_variables(contexts, gpu2):
    step, model, rate = with_rate('device')
    losses = step.over(schedule(model, rate, []), ahead=True)
    assert np.isfinite(next(losses))
    with pytest.raises(mgpu.MgpuError, match='rate was read or set by what prepares the next batch'):
        next(losses)
    assert np.isfinite(step(*data(9, 7)))


@pytest.mark.parametrize('update_on', ['device', 'host'])
def test_a_value_that_another_thread_sets_within_a_step_counts_from_the_next_one_on(contexts, kind, update_on):
    contexts(kind, 2)
    (step, model, rate), (expected, reference, reference_rate) = with_rate(update_on), with_rate(update_on)
    setter = threading.Thread(target=rate.set_value, args=(np.float32(0.7),))
    run = step.update.run

    def run_and_set(replica, arguments):
        if setter.ident is None:
            setter.start()
            setter.join(0.3)
        return run(replica, arguments)
    step.update.run = run_and_set
    step(*data(9, 7))
    setter.join()
    expected(*data(9, 7))
    reference_rate.set_value(np.float32(0.7))
    assert step(*data(8, 7)) == expected(*data(8, 7))
    assert step(*data(7, 7)) == expected(*data(7, 7))
    for param, other in zip(model.params, reference.params):
        np.testing.assert_array_equal(param.get_value(), other.get_value())


def test_a_function_that_fails_after_it_has_updated_in_place_leaves_replicas_alike(contexts, kind):
    """The copies kept the former value, the variable had the new one."""
    contexts(kind, 2)
    found = []
    for training in (lambda *args: mgpu.training_function(*args, update_on='device'), None):
        model = dense_model()
        step = training(model.inputs, model.loss, model.params, momentum) if training else plain_step(model, momentum)
        w, table = model.params[1], T.fvector('table')
        place = T.cast((w + 1)[0], 'int64') + 10
        grow = theano.function([table], table[place], updates=[(w, w + 1)])
        step(*data(9, 7))
        with pytest.raises(IndexError):
            grow(np.zeros(3, 'float32'))
        found.append([float(step(*data(9, 7, seed=1))) for _ in range(2)] + [w.get_value()])
    np.testing.assert_allclose(found[0][:2], found[1][:2], rtol=1e-5)
    np.testing.assert_allclose(found[0][2], found[1][2], rtol=1e-5)


def test_what_is_made_of_the_gradient_of_a_mean_is_reported(cpu2):
    """Replicas divide by the samples of their sub-batch: wrong by 1e-2, without a word."""
    model = dense_model()
    u = theano.shared(np.zeros((7, 9), 'float32'), name='u')
    gradient = T.grad(model.loss, model.params[0])
    with pytest.warns(mgpu.MgpuWarning, match='the new value of u cannot be computed exactly'):
        mgpu.training_function(model.inputs, model.loss, model.params, momentum,
                               batch_updates={u: u - np.float32(0.1) * gradient}, mode='FAST_COMPILE')


def test_an_output_that_mixes_samples_is_reported(cpu2):
    x = T.fmatrix('x')
    with pytest.warns(mgpu.MgpuWarning, match='an output cannot be computed exactly'):
        mgpu.function([x], x - x.mean(axis=0), mode='FAST_COMPILE')


def test_batches_of_one_input_are_taken_as_bare_arrays(cpu2):
    """Each array was taken apart into its rows: "9 arguments were given for the inputs ['x']"."""
    x, w = T.fmatrix('x'), theano.shared(np.ones(7, 'float32'), 'w')
    step = mgpu.training_function([x], T.dot(x, w).mean(), [w], lambda gradients: {w: w - gradients[0]},
                                  mode='FAST_COMPILE')
    assert len(list(step.over([data(9, 7)[0], data(5, 7)[0]]))) == 2


def test_a_function_over_a_trained_variable_does_not_keep_its_copies(contexts, kind):
    contexts(kind, 2)
    model = dense_model()
    step = mgpu.training_function(model.inputs, model.loss, model.params, momentum)
    total = theano.function([], model.params[0].sum())
    step(*data(9, 7))
    expected = total()
    del step
    gc.collect()
    assert compat.watcher_of(model.params[0]) is None
    assert total() == expected
    np.testing.assert_allclose(model.params[0].get_value().sum(), expected, rtol=1e-5)


@pytest.mark.skipif(not os.path.exists('/proc/self/statm'), reason='reads /proc')
def test_kernels_that_were_made_and_deleted_leave_no_memory_behind(gpu2):
    """libgpuarray keeps the header of each OpenCL kernel: 60 training functions grew the process by 150 MB."""
    from pygpu import _elemwise as pygpu_elemwise
    arguments = [pygpu_elemwise.arg('a', 'f', read=True), pygpu_elemwise.arg('o', 'f', write=True)]

    def make(times):
        for _ in range(times):
            pygpu_elemwise.GpuElemwise(gpu_context(gpu2[0]), 'o = a + 1', arguments, 2)
    make(100)
    before = resident_bytes()
    make(200)
    assert resident_bytes() - before < 5e6
