"""Bugs that were found and mended, each under its symptom."""
import os
import resource
import subprocess
import sys

import theano_mgpu as mgpu

import numpy as np
import pytest
import theano
from common import data, dense_model, momentum


def resident_bytes():
    with open('/proc/self/statm') as f:
        return int(f.read().split()[1]) * resource.getpagesize()


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
