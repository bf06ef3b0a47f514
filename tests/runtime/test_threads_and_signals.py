"""Bugs that were found and fixed, each under its symptom: replicas in threads, and Ctrl-C."""
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import theano_mgpu as mgpu
from theano_mgpu import training as training_module
from theano_mgpu.devices.context_map import parse_context_map
from theano_mgpu.devices.theano_contexts import compiling_for, infer_context_name
from theano_mgpu.exchange import host as host_module
from theano_mgpu.exchange import orders as orders_module
from theano_mgpu.exchange import over_ranks as sums_module
from theano_mgpu.graph.theano_functions import builds_graphs
from theano_mgpu.runtime import divided_function as divided_function_module
from theano_mgpu.runtime import step_run as run_module
from theano_mgpu.utils.attributes import temporarily

import numpy as np
import pytest
import theano
from support.interrupts import interrupted_at_each_line
from support.launch import INTERPRETED
from support.processes import python
from support.small_models import data, dense_model, momentum

pytestmark = pytest.mark.verified
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


@pytest.mark.slow
@pytest.mark.parametrize('inner', ['scan', 'OpFromGraph'])
def test_replicas_in_threads_do_not_run_one_inner_function(inner):
    """Functions over one op shared its compiled inner graph: "expected an ndarray, not None", or wrong results."""
    python('-c', INNER, inner)


def test_two_threads_that_change_an_attribute_for_a_while_leave_it_as_it_was():
    """The one that left last put back the value of the other one: its hooks stayed for ever."""
    owner, inside = SimpleNamespace(value='before'), threading.Barrier(2)

    def change(number):
        with temporarily(owner, 'value', number):
            inside.wait(20)
            time.sleep(.05 * number)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(change, range(2)))
    assert owner.value == 'before'


def test_a_thread_compiles_for_its_own_context():
    """It compiled for the context that another thread had begun to compile for."""
    one, other = parse_context_map('a->opencl0:0;b->opencl0:1')
    with ThreadPoolExecutor(1) as threads, compiling_for(one):
        block = compiling_for(other)
        threads.submit(block.__enter__).result()
        assert infer_context_name() == 'a' and threads.submit(infer_context_name).result() == 'b'
        threads.submit(block.__exit__, None, None, None).result()


def test_threads_that_build_functions_leave_the_flags_as_they_were():
    """The user's flag compute_test_value stayed off."""
    inside = threading.Barrier(3)

    @builds_graphs
    def build(number):
        inside.wait(20)
        time.sleep(.05 * number)
        return theano.config.compute_test_value
    with theano.configparser.change_flags(compute_test_value='warn'), ThreadPoolExecutor(3) as threads:
        assert list(threads.map(build, range(3))) == ['off'] * 3
        assert theano.config.compute_test_value == 'warn'


MODES = {'cpu': 'FAST_COMPILE', 'gpu': theano.Mode(optimizer='fast_compile')}  # quick to compile


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['cpu', 'gpu'])
def test_ctrl_c_at_any_line_of_a_step_leaves_all_of_it_or_nothing(kind, contexts):
    """The lock stayed taken, so that the next call waited for ever."""
    contexts(kind, 2)

    def training():
        model, count = dense_model(), theano.shared(np.int64(0), 'count')
        with theano.configparser.change_flags(**{'mgpu.shares': 'equal'}):  # the trace of the interpreter takes time
            step = mgpu.training_function(model.inputs, model.loss, model.params, momentum,
                                          outputs=[model.probabilities], mode=MODES[kind],
                                          batch_updates={count: count + model.inputs[0].shape[0]})
        return step, lambda: [variable.variable.get_value() for variable in step.variables()]
    (step, values), (undisturbed, expected) = training(), training()
    modules = divided_function_module, training_module, run_module, sums_module, host_module, orders_module
    batch, done = data(6, 7), 1
    step(*batch)
    before = values()

    def after(number):
        nonlocal before, done
        assert step.lock.acquire(blocking=False), 'line event %d' % number
        step.lock.release()
        changed = [not np.array_equal(a, b) for a, b in zip(before, values())]
        assert all(changed) or not any(changed), 'line event %d' % number
        step(*batch)
        before, done = values(), done + 1 + all(changed)
    assert interrupted_at_each_line(lambda: step(*batch), modules, after) >= 50
    for _ in range(done):
        undisturbed(*batch)
    for ours, theirs in zip(values(), expected()):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_interrupts_of_predictions_leave_the_threads_of_the_replicas_working():
    """Ctrl-C in `theano-mgpu predict` left the lock of a Future locked, and the process hung; so did a notebook."""
    script = '''
import random, signal, theano_mgpu as mgpu, numpy as np, theano.tensor as T
mgpu.init('a->cpu;b->cpu')
x = T.matrix()
signal.signal(signal.SIGALRM, signal.default_int_handler)
interrupted = 0
with mgpu.Predictor([x], x.sum(axis=1)) as predictor:
    for _ in range(800):
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0005, 0.003))
            for _ in predictor.map(np.ones((1, 3), 'float32') for _ in iter(int, 1)):
                pass
        except KeyboardInterrupt:
            interrupted += 1
    assert (predictor.predict(np.ones((50, 3), 'float32'), batch_size=1) == 3).all()
print(interrupted)
'''
    assert python('-c', script, flags=INTERPRETED).stdout == '800\n'


def test_interrupts_of_training_leave_its_threads_working():
    """After Ctrl-C in a notebook, the next step of a function with executor='threads' waited for ever."""
    script = '''
import random, signal
from theano_mgpu.utils.executors import make_executor
executor, begun, ended, interrupted = make_executor('threads', 3), [0] * 3, [0] * 3, 0
def task_of(replica):
    def task():
        begun[replica] += 1
        ended[replica] += 1
    return task
tasks = [task_of(replica) for replica in range(3)]
signal.signal(signal.SIGALRM, signal.default_int_handler)
for _ in range(1500):
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0002, 0.002))
        while True:
            executor.run(tasks)
    except KeyboardInterrupt:
        interrupted += 1
        assert begun[1:] == ended[1:]  # the first task is of this thread, and is interrupted itself before Python 3.10
executor.run(tasks)
print(interrupted)
'''
    assert python('-c', script, flags=INTERPRETED).stdout == '1500\n'
