"""Bugs that were found and mended, each under its symptom."""
import json
import os
import resource
import signal
import subprocess
import sys
import time

import theano_mgpu as mgpu
from theano_mgpu import step as step_module
from theano_mgpu import training as training_module
from theano_mgpu.contexts import compiling_for, gpu_context

import numpy as np
import pytest
import theano
import theano.tensor as T
from common import data, dense_model, momentum
from test_ranks import INTERPRETED, JOBS, launch, needs_mpi

MODES = {'cpu': 'FAST_COMPILE', 'gpu': theano.Mode(optimizer='fast_compile')}  # quick to compile


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


@needs_mpi
def test_a_failure_of_one_rank_late_in_a_step_is_one_of_all(tmp_path):
    """Where the script caught it, the other ranks had new weights, and went on: 0.2467 against 0.2127, no error."""
    launch(2, 'late_failures', tmp_path / 'met', flags=INTERPRETED + ',mgpu.timeout=10')
    for rank, own in enumerate([{'RankError'}, {'MemoryError', 'ReplicaError'}]):
        with open('%s.%d' % (tmp_path / 'met', rank)) as f:
            found = json.load(f)
        assert len(found['met']) == 7
        for place, kind, unchanged in found['met']:
            assert kind in own and unchanged, (rank, place, kind)
        assert all(found['same']) and len(found['same']) > 3


def processes_of(text):
    """Running processes whose command line has a text in it."""
    found = []
    for pid in filter(str.isdigit, os.listdir('/proc')):
        try:
            with open('/proc/%s/cmdline' % pid) as file:
                if text in file.read():
                    found.append(int(pid))
        except OSError:  # it has ended
            pass
    return found


@needs_mpi
@pytest.mark.parametrize('killed', ['launch', 'mpirun'])
def test_a_killed_launcher_leaves_no_process(killed, tmp_path):
    """mpirun and the ranks went on training, and writing checkpoints, for ever."""
    mark = str(tmp_path / 'state.npz')
    job = subprocess.Popen([sys.executable, '-m', 'theano_mgpu', 'launch', '-n', '2', JOBS, 'wait', mark],
                           env=dict(os.environ, THEANO_FLAGS=INTERPRETED), stdout=subprocess.PIPE, text=True)
    with job:
        assert job.stdout.readline() == 'waiting\n'
        assert len(processes_of(mark)) == 4
        mpirun, = set(processes_of(mark)) & set(processes_of('mpirun'))
        os.kill(job.pid if killed == 'launch' else mpirun, signal.SIGKILL)
        job.wait(60)
        for _ in range(600):
            if not processes_of(mark):
                break
            time.sleep(0.1)
    assert not processes_of(mark)


@pytest.mark.parametrize('kind', ['cpu', 'gpu'])
def test_a_checkpoint_of_another_job_is_refused(kind, contexts, tmp_path):
    """Two jobs on one file went on from each other's state."""
    contexts(kind, 2)
    path, model = str(tmp_path / 'run.npz'), dense_model()
    code = "import sys; from theano_mgpu.checkpoint_lock import lock_checkpoint; lock = lock_checkpoint(%r)\n" \
        "print('locked', flush=True); sys.stdin.read()" % path
    step = mgpu.training_function(model.inputs, model.loss, model.params, momentum, mode=MODES[kind])
    with subprocess.Popen([sys.executable, '-c', code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(mgpu.MgpuError, match='checkpoints of another job, process %d on host' % other.pid):
            step.checkpoint(path, 1)
    assert step.checkpoint(path, 1) == 0


def interrupting_at(number, files):
    """A trace function that raises KeyboardInterrupt at a line event in some files, as a signal may."""
    seen = [0]

    def trace(frame, event, argument):
        if frame.f_code.co_filename not in files:
            return None
        seen[0] += event == 'line'
        if seen[0] == number:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace
    return trace


@pytest.mark.parametrize('kind', ['cpu', 'gpu'])
def test_ctrl_c_at_any_line_of_a_step_leaves_all_of_it_or_nothing(kind, contexts):
    """The lock stayed taken, so that the next call waited for ever."""
    contexts(kind, 2)

    def training():
        model, count = dense_model(), theano.shared(np.int64(0), 'count')
        step = mgpu.training_function(model.inputs, model.loss, model.params, momentum, outputs=[model.probabilities],
                                      batch_updates={count: count + model.inputs[0].shape[0]},
                                      mode=MODES[kind])
        return step, lambda: [variable.variable.get_value() for variable in step.variables()]
    (step, values), (undisturbed, expected) = training(), training()
    batch, files = data(6, 7), (step_module.__file__, training_module.__file__)
    step(*batch)
    number, done, interrupted = 0, 1, True
    while interrupted:
        number += 1
        before = values()
        sys.settrace(interrupting_at(number, files))
        try:
            step(*batch)
            interrupted = False
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        assert step.forward.lock.acquire(blocking=False), 'line event %d' % number
        step.forward.lock.release()
        changed = [not np.array_equal(a, b) for a, b in zip(before, values())]
        assert all(changed) or not any(changed), 'line event %d' % number
        step(*batch)
        done += 1 + all(changed)
    assert number > 50
    for _ in range(done):
        undisturbed(*batch)
    for ours, theirs in zip(values(), expected()):
        np.testing.assert_array_equal(ours, theirs)


@needs_mpi
def test_a_compile_error_on_the_first_rank_is_one_of_all(tmp_path):
    """The others waited for it for ever; and float16 was an error of mpi4py's, "KeyError: 'e'"."""
    launch(2, 'compile_errors', tmp_path / 'met', flags=INTERPRETED + ',mgpu.timeout=10')
    own = 'MemoryError: no memory left'
    for rank, first in enumerate([own, 'RankError: rank 0 (host %s) failed to compile' % os.uname().nodename]):
        with open('%s.%d' % (tmp_path / 'met', rank)) as f:
            found = json.load(f)
        assert found['met'][0].startswith(first) and found['met'][1] == own
        x = np.arange(12, dtype='float32').reshape(4, 3) / 8
        expected = 1 - 0.1 * 2 * (x ** 2).sum(axis=0) / 12
        np.testing.assert_allclose(found['w'], expected, rtol=2e-3)
        assert found['dtype'] == 'float16'


@needs_mpi
def test_two_threads_that_train_over_ranks_at_once_end_the_job():
    """MPI_ERR_REQUEST in one thread, and exit code 0."""
    done = launch(2, 'fail', 'threads', flags=INTERPRETED + ',mgpu.timeout=10', expected=1)
    assert 'MPI_ERR' not in done.stderr and done.stderr.count(') failed:') == 1
    assert 'one thread' in done.stderr
