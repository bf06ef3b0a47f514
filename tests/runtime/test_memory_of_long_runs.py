"""Bugs that were found and fixed, each under its symptom: memory that a long run keeps."""
import gc
import os
import resource

import theano_mgpu as mgpu
from theano_mgpu.devices import shared_variables
from theano_mgpu.devices.contexts import gpu_context

import numpy as np
import pytest
import theano
from models import plain_step
from support.small_models import data, dense_model, momentum

pytestmark = pytest.mark.verified


def resident_bytes():
    with open('/proc/self/statm') as f:
        return int(f.read().split()[1]) * resource.getpagesize()


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists('/proc/self/statm'), reason='reads /proc')
@pytest.mark.parametrize('kind,executor', [('cpu', 'threads'), ('gpu', 'serial')])
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


@pytest.mark.slow
def test_a_function_over_a_trained_variable_does_not_keep_its_copies(contexts, kind):
    """The last value comes home when the training function goes."""
    contexts(kind, 2)
    model, reference = dense_model(), dense_model()
    step = mgpu.training_function(model.inputs, model.loss, model.params, momentum)
    total = theano.function([], model.params[0].sum())
    step(*data(9, 7)), plain_step(reference, momentum)(*data(9, 7))
    expected = total()
    assert shared_variables.watcher_of(model.params[0]) is not None
    del step
    gc.collect()
    assert shared_variables.watcher_of(model.params[0]) is None
    assert total() == expected
    for ours, theirs in zip(model.params, reference.params):
        np.testing.assert_allclose(ours.get_value(), theirs.get_value(), rtol=2e-5, atol=1e-6)


@pytest.mark.slow
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


@pytest.mark.parametrize('kind', ['cpu', pytest.param('gpu', marks=pytest.mark.slow)])
def test_the_data_of_a_training_is_let_go_of_when_it_ends(kind, contexts):
    """The step kept the object that knows the next batch, and with it all the data of the last `fit`."""
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
        look_ahead = model.train_function.function.look_ahead
        # Private: the rows of a prepared batch are copies, so that nothing public shows that they are kept.
        assert look_ahead._next_batch is None and look_ahead._prepared is None
        held = [weakref.ref(x), weakref.ref(y)]
        del x, y
        gc.collect()
        assert [reference() is None for reference in held] == [True, True]
