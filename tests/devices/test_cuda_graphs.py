"""CUDA graphs: one launch in place of one for each op, and the same bits; each case in a process on the stand-in."""
import json

import cuda_on_cpu
import pytest
from support.standin import run

pytest.importorskip('pygpu', reason='CUDA contexts need pygpu')
pytestmark = [pytest.mark.needs_compiler, pytest.mark.skipif(cuda_on_cpu.unavailable() is not None,
                                                             reason=cuda_on_cpu.unavailable() or '')]
OFF = 'mgpu.cuda_graphs=off,mgpu.shares=equal'
ON = 'mgpu.shares=equal'

STEPS = '''
import hashlib, json
import models
from cuda_on_cpu import driver
model, shape = {'mlp': (lambda: models.mlp(sizes=(8, 16, 16, 4)), (8,)), 'cnn': (lambda: models.cnn(filters=4, size=8,
                classes=4), (1, 8, 8)), 'lstm': (lambda: models.lstm(n_in=4, units=6, classes=4), (5, 4))}[NAME]
model, random = model(), np.random.RandomState(0)
step = mgpu.training_function(model.inputs, model.loss, model.params, models.adam, contexts=mgpu.init())
for number in range(36):
    n = 6 if number % 3 == 2 else 12
    x, labels = random.rand(n, *shape).astype('float32'), random.randint(0, 4, n).astype('int32')
    [driver.calls(i) for i in range(N)]
    loss = step(x, labels)
    calls = [driver.calls(i) for i in range(N)]
    print(json.dumps([float(loss).hex(), n, [[each.launches, each.graph_launches] for each in calls]]))
print(json.dumps(hashlib.sha256(b''.join(each.get_value().tobytes() for each in model.params)).hexdigest()))
print(json.dumps([choice.chosen for choice in step.executable.changes()] if N else 0))
'''


def steps(name, devices, flags, before='', **settings):
    """Return losses and calls of a model's training steps, the digest of its weights, and what its parts have chosen.
    """
    *found, digest, chosen = map(json.loads, run('NAME, N = %r, %d\n' % (name, devices) + before + STEPS, devices,
                                                 flags=flags, quiet=1, **settings))
    return found, digest, chosen


@pytest.mark.slow
@pytest.mark.parametrize('devices', [1, 2])
@pytest.mark.parametrize('name', ['mlp', 'cnn', 'lstm'])
def test_a_step_is_few_launches(name, devices):
    """One launch for each part of a step, and bits as without graphs, with batches of two lengths."""
    found, digest, chosen = steps(name, devices, ON, delay_us=50)
    plain, plain_digest, none = steps(name, devices, OFF)
    assert [loss for loss, *_ in found] == [loss for loss, *_ in plain] and digest == plain_digest
    assert all(graphs == 0 and launches > 20 for _, _, calls in plain for launches, graphs in calls)
    assert {(n, *call) for _, n, calls in found[-3:] for call in calls} == {(12, 0, devices), (6, 0, devices)}
    assert chosen == ['%d of %d part%s in one launch each' % (devices ** 2, devices ** 2, 's' * (devices > 1))]
    assert none == []



IN_A_THREAD = """
import threading
import theano, theano.tensor as T
opening = threading.Thread(target=mgpu.init)  # a thread's memory is above 4 GiB
opening.start()
opening.join()
x = T.fmatrix()
f = mgpu.function([x], [T.dot(x, x.T), T.tanh(x)])
for _ in range(6):
    f(np.ones((4, 4), 'float32'))
print([choice.chosen for choice in f.executable.changes()])
"""


@pytest.mark.slow
def test_handles_of_a_driver_that_are_long():
    """The address of a stream was cut to 32 bits: a segmentation fault, always with a Python that is built as PIE."""
    assert eval(run(IN_A_THREAD, 1)[0]) == ['1 of 1 part in one launch each']


@pytest.mark.slow
def test_layers_are_timed_before_graphs_are_launched():
    """The choice of `--explain` is true without it, too: timing a layer waits for the device, which no graph can."""
    found, _, chosen = steps('mlp', 1, ON, 'from theano_mgpu.graph import layers\nlayers.is_on = True\n')
    assert found[-1][2] == [[0, 1]] and chosen == ['1 of 1 part in one launch each']


RANDOM = '''
import collections, logging, random
import theano
from support.random_graphs import RandomGraph, statistics
from theano_mgpu.devices.transfers import DeviceBuffers
from theano_mgpu.graph import graph as graphs
from theano_mgpu.runtime import compiler
from theano_mgpu.runtime.replicas.replicated import copy_on
logging.getLogger('theano').setLevel(logging.CRITICAL)
theano.config.floatX, statistics.PYTHON = 'float64', None  # ops on a GPU have no Python
context, = mgpu.init()
told, launches = collections.Counter(), 0
for seed in SEEDS:
    graph, draw = RandomGraph(random.Random(seed)), random.Random(seed)
    state = theano.shared(np.zeros(3), 'state')
    update = 0.5 * state + graph.outputs[0]
    copies = {each: copy_on(context, each, each.get_value())
              for each in graphs.shared_variables([*graph.outputs, update])}
    function = compiler.compile_for(context, graph.inputs, graph.outputs, {state: update}, copies)
    calls, buffers, held = function.mgpu_call, DeviceBuffers(context), []
    for number in range(32):
        n = 3 if number % 3 == 2 else 7
        values = [value * (1 + number % 2) if value.dtype == 'float64' else value for value in graph.data(n)]
        given = [buffers.send((i, n), value) if on_device else value
                 for i, (value, on_device) in enumerate(zip(values, function.mgpu_takes))]
        expected = [np.asarray(value).tobytes() for value in calls.op_by_op(*given)]
        results = calls(*given)
        assert [np.asarray(value).tobytes() for value in results] == expected, (seed, number, calls.launches)
        copies[state].container.storage[0] = results[function.mgpu_order.index(len(graph.outputs))]
        # A result may be an argument, whose memory is that of the next one; set_value writes to the last new value.
        places = [array.gpudata for array in [*given, copies[state].container.storage[0]] if hasattr(array, 'gpudata')]
        if draw.random() < .05:
            held += [(result, bits) for result, bits in zip(results, expected)
                     if hasattr(result, 'gpudata') and result.gpudata not in places]
        if draw.random() < .05:
            copies[state].set_value(np.ones(3))
    assert all(np.asarray(result).tobytes() == bits for result, bits in held), (seed, 'held')
    told[calls.why_not or 'a graph' * (calls.launches > 0)] += 1
    launches += calls.launches
for why, count in told.most_common():
    print(count, why)
print(launches)
'''


def check_random_programs(seeds):
    """Compare drawn graphs, in one launch and op by op, with batches of two lengths, held results and set values."""
    *told, launches = run('SEEDS = range(%d, %d)\n' % seeds + RANDOM, 1, quiet=1)
    print('\n'.join(told))
    assert int(launches) > 2 * (seeds[1] - seeds[0]), told


@pytest.mark.slow
def test_random_programs():
    check_random_programs((2, 4))


@pytest.mark.slow
@pytest.mark.parametrize('start', range(0, 200, 25))
def test_200_random_programs(start):
    check_random_programs((start, start + 25))


ROWS = '''
import theano, theano.tensor as T
from cuda_on_cpu import driver
table = theano.shared(np.random.RandomState(0).rand(20, 4).astype('float32'), 'table')
ids, wanted = T.imatrix('ids'), T.fvector('wanted')
loss = T.sqr(table[ids].sum(axis=(1, 2)) - wanted).mean()
step = mgpu.training_function([ids, wanted], loss, [table], lambda gradients, params: {
    params[0]: params[0] - np.float32(0.01) * gradients[0]}, contexts=mgpu.init())
random = np.random.RandomState(1)
for number in range(16):
    batch = random.randint(0, 20, (8, 3)).astype('int32'), random.rand(8).astype('float32')
    if number in (13, 14):
        before = table.get_value()
        batch[0][7, 1] = 20
        try:
            step(*batch)
        except IndexError as error:
            print('error', str(error).splitlines()[0], error.__notes__, (table.get_value() == before).all())
    else:
        driver.calls()
        step(*batch)
        print(driver.calls().launches, table.get_value().sum())
print([choice.chosen for choice in step.executable.changes()])
'''


@pytest.mark.slow_with('2')
@pytest.mark.parametrize('devices', [1, 2])
def test_an_index_out_of_bounds_is_an_error(devices):
    """A graph looks up rows of a table; a wrong row is the error that it is op by op, and nothing changes."""
    found, plain = [run(ROWS, devices, flags=flags, quiet=1) for flags in (ON, OFF)]
    assert found[13] == found[14] == plain[13] == plain[14]
    assert plain[13].startswith('error') and 'samples' in plain[13] and plain[13].endswith('True')
    assert [line.split()[1] for line in found[:13] + found[15:-1]] == \
        [line.split()[1] for line in plain[:13] + plain[15:-1]]
    assert found[12].startswith('0 ') and 'in one launch' in found[-1]


PREPARED = '''
import threading, theano, theano.tensor as T
from pygpu import gpuarray
from theano.gpuarray.type import get_context
from theano_mgpu.runtime import compiler
from theano_mgpu.runtime.graph_calls import GraphCalls
context = mgpu.init()[0]
x, y = T.fmatrix('x'), T.ivector('y')
function = compiler.compile_for(context, [x, y], [T.tanh(T.dot(x, x.T)).sum(axis=1) + y, T.sqr(x).sum()], {}, {})
array = gpuarray.array(np.random.RandomState(0).rand(6, 6).astype('float32'), context=get_context(context.name))
labels = np.arange(6, dtype='int32')
expected = [np.asarray(value).tobytes() for value in function.mgpu_call.op_by_op(array, labels)]

def recorded():
    """Calls that have just become a graph."""
    calls = GraphCalls(function, function.mgpu_call.op_by_op, context, 2)
    for _ in range(5):
        assert [np.asarray(value).tobytes() for value in calls(array, labels)] == expected
    return calls
'''

THREADS = PREPARED + '''
import sys
sys.setswitchinterval(1e-5)
done, failures, copies = threading.Event(), [], 0

def copy():
    global copies
    try:
        while not done.is_set():
            fresh = gpuarray.array(np.full(1000, copies % 7, 'float32'), context=get_context(context.name))
            assert (np.asarray(fresh) == copies % 7).all()
            copies += 1
    except BaseException as error:
        failures.append(error)

thread = threading.Thread(target=copy)
thread.start()
found = [recorded() for _ in range(40)]
done.set()
thread.join()
print([calls.why_not for calls in found if not calls.launches], failures, copies > 100)
'''


@pytest.mark.slow
def test_another_thread_uses_the_device_meanwhile():
    """Calls of another thread on the stream, while a graph is recorded, are no part of it, and have their results."""
    assert run(THREADS, 1, quiet=1, delay_us=20) == ['[] [] True']


REFUSALS = PREPARED + '''
from theano_mgpu.devices import cuda_graphs
from theano_mgpu.runtime import graph_calls
launch, write = cuda_graphs.Graph.launch, cuda_graphs.GraphMemory.page_locked
print(recorded().why_not or 'a graph')
cuda_graphs.Graph.launch = lambda graph: None  # it computes nothing, as a driver with a fault might
print(recorded().why_not)
cuda_graphs.Graph.launch = launch
cuda_graphs.GraphMemory.page_locked = lambda memory, size: write(memory, 1)
print(recorded().why_not)
cuda_graphs.GraphMemory.page_locked = write
fill, kept = graph_calls.Result.fill, []
graph_calls.Result.fill = lambda *given: kept.append(gpuarray.empty(9, context=array.context)) or fill(*given)
print(recorded().why_not)
'''


def test_a_call_that_is_no_graph_goes_on_op_by_op():
    """Its results are right, and it says why."""
    assert run(REFUSALS, 1, quiet=1) == ['a graph', 'its first launch had another result than the call',
                                         'it copies more to the device than before',
                                         'it keeps memory on the device from call to call']


SHORT = PREPARED + '''
from cuda_on_cpu import driver
calls = recorded()
before, held = calls.launches, []
try:
    while True:
        held.append(gpuarray.empty(1 << 16, context=get_context(context.name)))
except gpuarray.GpuArrayException:
    print(calls.why_not)
for _ in range(4):
    assert [np.asarray(value).tobytes() for value in calls(array, labels)] == expected
print(calls.launches - before)
'''


@pytest.mark.slow
def test_memory_of_graphs_is_given_back():
    """Arrays get the memory of graphs where it is short, and calls go on op by op."""
    assert run(SHORT, 1, quiet=1, memory='24M') == ['the device is short of memory', '0']


IN_PLACE = '''
import theano, theano.tensor as T
from pygpu import gpuarray
from theano.gpuarray.type import get_context
from theano_mgpu.runtime import compiler
context = mgpu.init()[0]
x, factor, ids = T.fmatrix('x'), T.fscalar('factor'), T.ivector('ids')
rows = T.tanh(x)
sums, n, count = rows.sum(axis=0), x.shape[1] + 1, T.cast(factor * 2 + x.shape[0], 'float32')
read = T.argmax(T.sqr(rows - 0.5), axis=1)
# exp works in place on the sums once they are multiplied by what the host has read; and 2 n in place on n.
outputs = [T.cast(read, 'float32').dimshuffle(0, 'x') * sums, T.exp(sums), factor * n, T.alloc(rows.sum(), n),
           T.alloc(rows.max(), n * 2), rows[ids] + factor, read + ids, rows.sum() / count,
           -1 / count.dimshuffle('x') * factor]
function = compiler.compile_for(context, [x, factor, ids], outputs, {}, {})
calls = function.mgpu_call
for shape in (4, 6), (2, 6), (4, 6):
    array = gpuarray.empty(shape, 'float32', context=get_context(context.name))
    for number in range(6):
        array.write(np.random.RandomState(number).rand(*shape).astype('float32'))
        given = array, np.array(number, "float32"), np.arange(shape[0], dtype='int32') % 2
        expected = [np.asarray(value).tobytes() for value in calls.op_by_op(*given)]
        assert [np.asarray(value).tobytes() for value in calls(*given)] == expected, (shape, number, calls.launches)
        calls.check()
print(calls.why_not, calls.launches)
'''


@pytest.mark.slow
def test_ops_that_work_in_place():
    """Shapes, numbers of the host and values that the host reads survive ops in place, at whatever time these run."""
    assert run(IN_PLACE, 1, quiet=1) == [' 10']


EVICTED = PREPARED + '''
calls = GraphCalls(function, function.mgpu_call.op_by_op, context, 2)
rows = np.random.RandomState(0).rand(14, 6).astype('float32')
given = [(gpuarray.array(rows[:n], context=array.context), np.arange(n, dtype='int32')) for n in range(2, 15)]
expected = [[np.asarray(value).tobytes() for value in calls.op_by_op(*each)] for each in given]

def rounds(n, begin, end):
    """Call the function some times with each of some lengths, and print how many calls were launches."""
    before = calls.launches
    for _ in range(n):
        for each, bits in list(zip(given, expected))[begin:end]:
            assert [np.asarray(value).tobytes() for value in calls(*each)] == bits
    print(calls.launches - before, len(calls._graphs), calls.why_not)

rounds(2, 0, 8)
rounds(4, 0, 13)  # there is no room for the last lengths
rounds(20, 8, 13)
rounds(2, 8, 13)
'''


def test_graphs_of_many_lengths():
    """A function has a few graphs: one that was not launched for long goes for another, and results stay right."""
    first, *_, last = run(EVICTED, 1, quiet=1)
    assert first == '0 0 ' and last == '10 8 '


NUMBERED = '''
from support.data_set_cases import CASES, differences
from theano_mgpu.runtime import graph_calls
made, begin = [], graph_calls.GraphCalls.__init__
graph_calls.GraphCalls.__init__ = lambda self, *given: made.append(self) or begin(self, *given)
graph_calls.GraphCalls._has_seen = lambda self, arguments: True
difference, usage = differences(CASES['numbered'], None)
print(difference < 1e-12, usage.why, [each.why_not for each in made if each.why_not], len(made))
'''


@pytest.mark.slow
def test_a_view_of_a_number_is_worked_on_in_place():
    """The host divides a view of the number of samples in place, before the graph copies the number."""
    assert run(NUMBERED, 2, flags='floatX=float64', quiet=1) == ['True divided [] 6']
