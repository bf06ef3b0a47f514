"""Bugs that were found and mended, each under its symptom."""
import os
import resource
import subprocess
import sys

import theano_mgpu as mgpu
from theano_mgpu.contexts import compiling_for, gpu_context

import numpy as np
import pytest
import theano
import theano.tensor as T
from common import data, dense_model, momentum


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


# --- Batches of a fixed length, and batches that cannot be divided -------------------------------

FIXED = 10


def noisy(v):
    from keras import backend as K
    return v + K.random_normal((FIXED, 2))


def fixed_models():
    """name -> (model with FIXED written into it, contexts that it runs on, whether it draws random numbers)."""
    from keras import backend as K
    from keras import layers as L
    from keras.models import Sequential

    def dense(n, fixed=True):
        return L.Dense(n, **({'batch_input_shape': (FIXED, 6)} if fixed else {'input_shape': (6,)}))

    def shaped(function, shape):
        return L.Lambda(function, output_shape=shape, name='fixed')
    return {
        'reshape': (lambda: Sequential([dense(8), shaped(lambda v: K.reshape(v, (FIXED, 2, 4)), (2, 4)), L.Flatten(),
                                        L.Dense(3)]), 2, False),
        'reshape to what is left': (lambda: Sequential([dense(8), shaped(lambda v: K.reshape(v, (FIXED, -1)), (8,)),
                                                        L.Dense(3)]), 2, False),
        'reshape, batch_input_shape not given': (lambda: Sequential([
            dense(8, False), shaped(lambda v: K.reshape(v, (FIXED, 8)), (8,)), L.Dense(3)]), 2, False),
        'filled': (lambda: Sequential([dense(2), shaped(lambda v: v * T.ones((FIXED, 2)), (2,)), L.Dense(3)]),
                   2, False),
        'variable': (lambda: Sequential([dense(2), shaped(lambda v: v * K.ones((FIXED, 2)), (2,)), L.Dense(3)]),
                     1, False),
        'noise_shape': (lambda: Sequential([L.Dropout(0.5, noise_shape=(FIXED, 1), batch_input_shape=(FIXED, 6)),
                                            L.Dense(3)]), 2, True),
        'random_normal': (lambda: Sequential([dense(2), shaped(noisy, (2,)), L.Dense(3)]), 2, True),
        'random_normal, batch_input_shape not given': (lambda: Sequential([dense(2, False), shaped(noisy, (2,)),
                                                                           L.Dense(3)]), 2, True),
    }


@pytest.fixture
def enabled():
    """A function that enables all contexts for Keras's models; texts for the user go into its report alone."""
    from theano_mgpu.keras import disable, enable

    def start(**options):
        return enable(**dict({'tell': lambda text: None}, **options))
    yield start
    disable()


def trained(model, x, y, size=FIXED, mode='FAST_COMPILE'):
    """Train, test and predict; returns everything that this leaves behind."""
    from keras import backend as K
    model.compile('adam', 'mse', mode=mode)
    losses = [model.train_on_batch(x[i:i + size], y[i:i + size]) for _ in range(2) for i in range(0, len(x), size)]
    return [losses, model.evaluate(x, y, batch_size=size, verbose=0), model.predict(x, batch_size=size)] \
        + [K.get_value(w) for w in model.weights + model.optimizer.weights]


@pytest.mark.parametrize('name,kind', [(name, 'cpu') for name in (
    'reshape', 'reshape to what is left', 'reshape, batch_input_shape not given', 'filled', 'variable', 'noise_shape',
    'random_normal', 'random_normal, batch_input_shape not given')] + [
        pytest.param(name, 'gpu', marks=pytest.mark.slow) for name in ('variable', 'random_normal')])  # 40 s to compile
def test_a_model_with_the_length_of_its_batches_written_into_it_trains(name, kind, contexts, enabled):
    """"Input dimension mis-match", "total size of new array must be unchanged": sub-batches are shorter."""
    from theano_mgpu.keras import disable
    names = [context.name for context in contexts(kind, 2)]
    make, n_contexts, draws = fixed_models()[name]
    x, y = data(2 * FIXED, 6)[0], data(2 * FIXED, 3, seed=1)[0]
    found = []
    for several in (False, True):
        report = enabled() if several else disable()
        np.random.seed(3)
        model = make()
        found.append(trained(model, x, y, mode='FAST_COMPILE' if kind == 'cpu' else None))
    for one, other in zip(*found):
        assert np.shape(one) == np.shape(other) and np.isfinite(other).all()
        if not draws:
            np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-6)
    functions = model.train_function, model.test_function, model.predict_function
    assert [len(function.function.contexts) for function in functions] == [n_contexts] * 3
    assert [context.name for context in report.usages[0].contexts] == names[:n_contexts]
    notes = [note for note in report.notes if 'runs on one context' in note]
    assert len(notes) == (n_contexts == 1)
    assert all('replica 0' in note and model.name in note and note in str(report) for note in notes)
    if 'not given' not in name:
        assert not [note for note in report.notes if 'not exactly as on one' in note]


@pytest.mark.slow  # convolutions are compiled: 15 s on each kind where they are not cached
@pytest.mark.parametrize('kind', ['cpu', 'gpu'])
def test_convolutions_of_a_fixed_batch_train(kind, contexts, enabled):
    """"could not broadcast input array from shape (5, ...) into shape (10, ...)": of the length given to the op."""
    from theano_mgpu.keras import disable

    from keras import layers as L
    from keras.models import Sequential
    contexts(kind, 2)
    x, y = data(2 * FIXED, 6, 6, 2)[0], data(2 * FIXED, 3, seed=1)[0]
    found = []
    for several in (False, True):
        report = enabled() if several else disable()
        np.random.seed(3)
        model = Sequential([L.Conv2D(2, 3, padding='same', activation='tanh', batch_input_shape=(FIXED, 6, 6, 2)),
                            L.AveragePooling2D(), L.UpSampling2D(), L.Flatten(), L.Dense(3)])
        found.append(trained(model, x, y, mode=None))
    for one, other in zip(*found):
        np.testing.assert_allclose(other, one, rtol=1e-3, atol=1e-5)
    assert len(model.train_function.function.contexts) == 2
    assert not report.notes


def test_a_batch_that_is_at_fault_does_not_take_a_model_off_its_contexts(cpu2, enabled):
    """One `predict_on_batch` of no rows left a model to plain Keras for good."""
    from keras import layers as L
    from keras.models import Model, Sequential
    report = enabled()
    model = Sequential([L.Dense(3, input_shape=(6,))])
    with pytest.raises(mgpu.BatchError, match='the batch is empty'):  # so it is in plain Keras
        model.predict_on_batch(np.zeros((0, 6), 'float32'))
    assert model.predict_on_batch(np.zeros((10, 6), 'float32')).shape == (10, 3)
    a, b = L.Input((6,)), L.Input((6,))
    both = Model([a, b], L.add([a, b]))
    with pytest.raises(mgpu.BatchError, match='different lengths'):
        both.predict_on_batch([np.zeros((8, 6)), np.zeros((6, 6))])
    both.predict_on_batch([np.zeros((8, 6))] * 2)
    fixed = fixed_models()['variable'][0]()
    with pytest.raises(mgpu.ReplicaError, match='7'):
        fixed.predict_on_batch(data(14, 6)[0])  # is none of FIXED samples: fails on one context, too
    assert [len(each.predict_function.function.contexts) for each in (model, both, fixed)] == [2, 2, 2]
    assert not report.notes
    fixed.predict_on_batch(data(FIXED, 6)[0])
    assert len(fixed.predict_function.function.contexts) == 1 and 'runs on one context' in report.notes[0]


def test_a_batch_of_another_length_than_the_fixed_one_fails_as_in_plain_keras(cpu2, enabled):
    from theano_mgpu.keras import disable
    for several in (False, True):
        enabled() if several else disable()
        model = fixed_models()['reshape'][0]()
        assert model.predict_on_batch(data(FIXED, 6)[0]).shape == (FIXED, 3)
        with pytest.raises((ValueError, mgpu.ReplicaError), match='reshape|size'):
            model.predict_on_batch(data(7, 6)[0])
    assert model.predict_on_batch(data(FIXED, 6)[0]).shape == (FIXED, 3)
    assert len(model.predict_function.function.contexts) == 2


def test_an_error_after_batches_that_were_divided_is_raised(cpu2, enabled):
    """A model that has trained over its contexts is not moved by an error that comes later."""
    from keras import layers as L
    from keras.models import Sequential
    enabled()
    model = Sequential([L.Lambda(lambda v: T.opt.Assert('too few')(v, T.ge(v.shape[0], 4)), output_shape=(6,),
                                 input_shape=(6,)), L.Dense(3)])
    model.compile('sgd', 'mse', mode='FAST_COMPILE')
    x, y = data(8, 6)[0], data(8, 3)[0]
    model.train_on_batch(x, y)
    with pytest.raises(mgpu.ReplicaError, match='too few'):
        model.train_on_batch(x[:7], y[:7])
    assert len(model.train_function.function.contexts) == 2


def test_a_first_batch_that_cannot_be_divided_is_an_error_if_strict(cpu2, enabled):
    enabled(strict=True)
    model = fixed_models()['variable'][0]()
    model.compile('sgd', 'mse', mode='FAST_COMPILE')
    before = model.get_weights()
    with pytest.raises(mgpu.ReplicaError, match='replica 0'):
        model.train_on_batch(*[data(FIXED, n)[0] for n in (6, 3)])
    np.testing.assert_array_equal(model.get_weights()[0], before[0])


def test_a_parallel_model_whose_batch_cannot_be_divided_runs_on_one_context(cpu2):
    from theano_mgpu.keras import multi_gpu_model
    x, y = data(2 * FIXED, 6)[0], data(2 * FIXED, 3, seed=1)[0]
    found = []
    for parallel in (False, True):
        np.random.seed(3)
        model = fixed_models()['variable'][0]()
        if not parallel:
            found.append(trained(model, x, y))
            continue
        model = multi_gpu_model(model)
        with pytest.warns(mgpu.MgpuWarning, match='runs on one context') as caught:
            found.append(trained(model, x, y))
    for one, other in zip(*found):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-6)
    assert [context.name for context in model.contexts] == ['host0']
    assert len([w for w in caught if w.category is mgpu.MgpuWarning]) == 1 and caught[0].filename == __file__


# --- What is said of a model ---------------------------------------------------------------------

def with_flat_loss():
    """A variational autoencoder's loss: a mean over all pixels, added to a divergence of each sample."""
    from keras import backend as K
    from keras import layers as L
    from keras.models import Model
    x = L.Input((6,))
    code = L.Dense(2)(x)
    out = L.Dense(6, activation='sigmoid')(code)
    model = Model(x, out)
    divergence = -0.5 * K.sum(1 - K.square(code), axis=-1)
    model.add_loss(K.mean(6 * K.mean(K.binary_crossentropy(K.flatten(x), K.flatten(out)), axis=-1) + divergence))
    return model


def test_a_mean_over_all_pixels_that_is_added_to_a_loss_of_each_sample_is_exact(cpu2, enabled):
    """"the loss mixes samples": it is a mean over the replicas' means, as that of one device is."""
    from theano_mgpu.keras import disable
    x = np.random.RandomState(1).rand(11, 6).astype('float32')
    found = []
    for several in (False, True):
        report = enabled() if several else disable()
        np.random.seed(3)
        model = with_flat_loss()
        model.compile('adam', mode='FAST_COMPILE')
        found.append([model.train_on_batch(x, None) for _ in range(3)] + model.get_weights())
    for one, other in zip(*found):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-6)
    assert report.notes == [] and len(model.train_function.function.contexts) == 2


def test_batch_normalisation_is_exact_in_a_model_that_only_predicts(cpu2, enabled):
    """"normalises each sub-batch by its own statistics": a prediction uses the running averages."""
    from keras import layers as L
    from keras.models import Sequential
    report = enabled()
    layers = [L.Dense(4, input_shape=(6,)), L.BatchNormalization(name='normal')]
    model = Sequential(layers)
    assert model.predict_on_batch(data(9, 6)[0]).shape == (9, 4) and report.notes == []
    model.compile('sgd', 'mse')
    assert 'layer normal normalises each sub-batch' in report.notes[0]


def test_a_layer_within_a_model_within_a_model_is_named_with_its_path(cpu2, enabled):
    from keras import backend as K
    from keras import layers as L
    from keras.models import Model, Sequential

    def centred():
        return L.Lambda(lambda v: K.square(v - K.mean(v, axis=0)), output_shape=(4,), name='centre')
    report = enabled()
    inner = Sequential([L.Dense(4, input_shape=(4,)), centred(), L.BatchNormalization(name='normal')], name='inner')
    middle = Sequential([L.Dense(4, input_shape=(6,)), inner], name='middle')
    a = L.Input((6,))
    model = Model(a, L.Dense(3)(middle(a)))
    model.compile('sgd', 'mse')
    note, = report.notes
    assert 'layer middle/inner/centre mixes samples' in note and 'layer middle/inner/normal normalises' in note


@pytest.mark.parametrize('optimizer', ['sgd', 'adam'])
def test_a_gradient_that_is_zero_in_theory_is_no_difference(optimizer, cpu2):
    """The bias of a layer before a softmax over its units' mean: --verify found a relative difference of 2.0."""
    from theano_mgpu.keras import verify

    from keras import backend as K
    from keras import layers as L
    from keras.models import Sequential
    np.random.seed(2)
    model = Sequential([L.Dense(5, input_shape=(6,)), L.Lambda(lambda v: v - K.mean(v, axis=-1, keepdims=True),
                                                               output_shape=(5,)),
                        L.Dense(1, use_bias=False, kernel_initializer='ones', trainable=False), L.Dense(3)])
    model.compile(optimizer, 'mse', mode='FAST_COMPILE')
    x, y = data(11, 6)[0], data(11, 3, seed=1)[0]
    certificate = verify(model, x, y)
    assert certificate.passed, str(certificate)
    assert len(certificate.arbitrary) == 3 and 'gradient is zero but for rounding' in str(certificate)
    assert {row.kind for row in certificate.rows} >= {'gradient', 'weight', 'optimizer'}


def test_a_summary_without_a_model_on_contexts_says_why(cpu2, enabled):
    """"0 models on 0 contexts ()" where every model was left to plain Keras."""
    from keras import backend as K
    from keras import layers as L
    from keras.models import Model
    report = enabled()
    tensor = L.Input(tensor=K.variable(np.ones((4, 6))))
    model = Model(tensor, L.Dense(3)(tensor))
    model.compile('sgd', 'mse', target_tensors=K.variable(np.ones((4, 3))))
    title, note = str(report).splitlines()
    assert title == 'no model ran on the contexts'
    assert note.startswith('note: %s is left to plain Keras' % model.name) and 'reads its data from a tensor' in note


# --- The batch after this one --------------------------------------------------------------------

def quick_step(model):
    return mgpu.training_function(model.inputs, model.loss, model.params, momentum)


def test_no_room_for_the_next_batch_does_not_undo_this_one(gpu2, monkeypatch):
    """The next batch is sent within the step: its MemoryError undid the step, and was raised a batch too early."""
    from theano_mgpu import forward, transfers
    x, labels = data(24, 7)
    parts = [(x[i:i + 8], labels[i:i + 8]) for i in range(0, 24, 8)]
    model, reference = dense_model(), dense_model()
    expected = list(quick_step(reference).over(parts))
    send, prepare, failed = transfers.Sender.send, forward.Forward.prepare_next, []

    def fail(self, values):
        failed.append(True)
        raise MemoryError('no room on the device')

    def prepare_next(self):
        with monkeypatch.context() as patch:
            if not failed:
                patch.setattr(transfers.Sender, 'send', fail)
            prepare(self)
        assert transfers.Sender.send is send
    monkeypatch.setattr(forward.Forward, 'prepare_next', prepare_next)
    np.testing.assert_allclose(list(quick_step(model).over(parts)), expected, rtol=1e-6)
    assert len(failed) == 2  # a task a replica
    np.testing.assert_allclose(model.params[0].get_value(), reference.params[0].get_value(), rtol=1e-6)


def test_a_bad_batch_of_a_generator_does_not_undo_the_one_before(gpu2):
    """The shape of the next batch is checked within the step before it, which was then rolled back."""
    from theano_mgpu import compat
    from theano_mgpu.keras import multi_gpu_model

    import keras
    from keras.layers import Dense
    from keras.models import Sequential
    x, y = data(8, 6)[0], data(8, 3, seed=1)[0]

    class NextIsThere(keras.callbacks.Callback):
        ended = 0

        def on_batch_begin(self, batch, logs=None):
            if not batch:
                compat.keras_batches._enqueuer.queue.queue[0].wait(30)

        def on_batch_end(self, batch, logs=None):
            self.ended += 1

    class Batches(keras.utils.Sequence):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return (x, y) if index == 0 else (x[:, 1:], y)
    found = []
    for bad in (True, False):
        np.random.seed(3)
        model = multi_gpu_model(Sequential([Dense(3, input_shape=(6,))]))
        model.compile('sgd', 'mse')
        callback = NextIsThere()
        if bad:
            with pytest.raises(ValueError, match='to have shape'):
                model.fit_generator(Batches(), epochs=1, shuffle=False, verbose=0, callbacks=[callback])
            assert callback.ended == 1 and len(model.train_function.function.contexts) == 2
        else:
            model.train_on_batch(x, y)
        found.append(model.get_weights())
    for one, other in zip(*found):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize('kind', ['cpu', 'gpu'])
def test_the_data_of_a_training_is_let_go_of_when_it_ends(kind, contexts):
    """The step kept what knows the next batch, and with it all the data of the last `fit`."""
    import gc
    import weakref

    from theano_mgpu.keras import multi_gpu_model

    import keras
    from keras.layers import Dense
    from keras.models import Sequential
    contexts(kind, 2)
    model = multi_gpu_model(Sequential([Dense(3, input_shape=(6,))]))
    model.compile('sgd', 'mse', **({'mode': 'FAST_COMPILE'} if kind == 'cpu' else {}))

    def stop(batch, logs):
        raise KeyboardInterrupt
    for callbacks in ([], [keras.callbacks.LambdaCallback(on_batch_end=stop)]):
        x, y = data(24, 6)[0], data(24, 3, seed=1)[0]
        try:
            model.fit(x, y, batch_size=8, verbose=0, callbacks=callbacks)
        except KeyboardInterrupt:
            pass
        forward = model.train_function.function.forward
        assert forward.next_batch is None and forward._prepared is None
        held = [weakref.ref(x), weakref.ref(y)]
        del x, y
        gc.collect()
        assert [reference() is None for reference in held] == [True, True]
