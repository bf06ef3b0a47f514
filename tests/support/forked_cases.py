"""Programs in which processes compute the parts of the contexts of the CPU; each function is a program of its own."""
import contextlib
import cProfile
import faulthandler
import fcntl
import functools
import gc
import io
import os
import queue
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / 'benchmarks')]

import theano_mgpu as mgpu
from theano_mgpu.auto import choice, found
from theano_mgpu.devices import arena, processes
from theano_mgpu.devices import children as children_of_package
from theano_mgpu.errors import ReplicaError
from theano_mgpu.plan import planner
from theano_mgpu.runtime import forked_parts, step_run
from theano_mgpu.runtime.batch import Crew
from theano_mgpu.utils import processor

import numpy as np
import theano
import theano.tensor as T
from models import adam, plain_step
from theano.sandbox.rng_mrg import MRG_RandomStreams

from support import dispatch_clock
from support.small_models import data, dense_model, momentum

LENGTHS = 13, 13, 5, 2, 1, 13, 8


def begin(n=2):
    """Have processes compute whatever they can, from the first step on."""
    forked_parts.ForkedParts.crew = lambda self, samples: Crew(n, bool(processes.may_fork() and not self._is_full))
    forked_parts.ForkedParts.note = lambda *facts: None
    arena.SMALL = planner.LARGE = 64  # all arrays but the smallest go through the arena, and are updated by processes
    return mgpu.init(';'.join('dev%d->cpu' % i for i in range(n)))


def children():
    """Return the processes that this one has started."""
    with open('/proc/self/task/%d/children' % os.getpid()) as file:
        return [int(each) for each in file.read().split()]


def assert_alike(found, expected):
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


def step_of(model, updates=adam, **options):
    return mgpu.training_function(model.inputs, model.loss, model.params, updates, [model.accuracy], **options)


def exact():
    """Train on ragged batches, with two and four contexts, and compare with plain Theano."""
    for n, make, updates, shape in (2, dense_model, adam, (7,)), (4, dense_model, momentum, (7,)):
        begin(n)
        models = make(), make()
        plain = theano.function(models[0].inputs, [models[0].loss, models[0].accuracy], updates=updates(
            T.grad(models[0].loss, models[0].params), models[0].params), mode='FAST_COMPILE')
        step = step_of(models[1], updates, mode='FAST_COMPILE')
        for seed, length in enumerate(LENGTHS):
            batch = data(length, *shape, seed=seed)
            assert_alike(step(*batch), plain(*batch))
        assert_alike([p.get_value() for p in models[1].params], [p.get_value() for p in models[0].params])
        assert len(children()) == n - 1


def data_sets():
    """Functions over data sets and frozen weights share one copy of these, until the script changes them."""
    begin()
    x, w, i = theano.shared(data(64, 7)[0], 'x'), theano.shared(np.ones((7, 40), 'float32'), 'w'), T.iscalar('i')
    outputs = T.tanh(T.dot(x, w)).sum(), T.tanh(T.dot(x[i * 20:(i + 1) * 20], w))

    def made():
        return [theano.function([i], output, on_unused_input='ignore', mode='FAST_COMPILE') for output in outputs]
    plain = made()
    mgpu.enable(always=True)
    divided = made()
    copies, own = [], arena.Arena.copied
    arena.Arena.copied = lambda self, array: copies.append(array.shape) or own(self, array)

    def alike():
        """Compare the results of two calls, and return the shapes of the arrays that the second one has copied."""
        for _ in range(2):
            del copies[:]
            for number in 0, 2, 3:
                assert_alike([f(number) for f in divided], [f(number) for f in plain])
        return copies
    of_slices = alike()
    assert (64, 7) not in of_slices and (7, 40) not in of_slices, of_slices
    lent = w.get_value(borrow=True)
    for _ in range(3):
        lent += 1
        alike()
    del lent
    alike()
    for change in (lambda v: v.set_value(v.get_value() / 2), lambda v: v.get_value(borrow=True).__imul__(2),
                   lambda v: v.container.data.__imul__(3), theano.function([], [], updates={w: w + 1}).__call__):
        for variable in x, w:
            change(*[variable] * (change.__name__ == '<lambda>'))
            alike()
    child = os.fork()  # which has its own copies
    if not child:
        alike()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0 and len(children()) == 1


def drawn():
    """Draw random numbers, return rows, and read a variable that the script edits in place."""
    begin()
    found = []
    for divided in False, True:
        x, streams = T.matrix('x'), MRG_RandomStreams(5)
        w = theano.shared(np.ones((40, 3), 'float32'), 'w', borrow=True)
        noisy = T.dot(x, w) + streams.normal((x.shape[0], 3))
        f = (mgpu.function if divided else theano.function)([x], [noisy, noisy.sum(), x.mean(axis=0)],
                                                             mode='FAST_COMPILE')
        results = []
        for length in LENGTHS:
            results += f(data(length, 40)[0])
            w.get_value(borrow=True, return_internal_type=True)[0] += 1
            w.set_value(w.get_value() * np.float32(.9))
        found.append(results)
        assert bool(children()) == divided
    assert_alike(found[1], found[0])


def killed():
    """Kill the process of a context between steps, in a step, and again and again."""
    begin()
    models = dense_model(), dense_model()
    plain, step, batch = plain_step(models[0]), step_of(models[1]), data(16, 7)
    plain(*batch), step(*batch)
    for _ in range(5):
        os.kill(children()[0], signal.SIGKILL)
        assert_alike([step(*batch)[0]], [plain(*batch)])

    steps = [0]

    def kill():
        for _ in range(20):
            before = steps[0]
            while steps[0] < before + 3:  # not both attempts of a step
                time.sleep(.01)
            for each in children():
                os.kill(each, signal.SIGKILL)
    killer = threading.Thread(target=kill)
    killer.start()
    while killer.is_alive():
        assert_alike([step(*batch)[0]], [plain(*batch)])
        steps[0] += 1
    assert_alike([step(*batch)[0]], [plain(*batch)])
    assert_alike([p.get_value() for p in models[1].params], [p.get_value() for p in models[0].params])
    own, before = forked_parts.ForkedPart.compute, [p.get_value() for p in models[1].params]
    forked_parts.ForkedPart.compute = lambda *call: os.kill(os.getpid(), signal.SIGKILL)
    os.kill(children()[0], signal.SIGKILL)  # the next process has the new method
    try:
        step(*batch)
        raise AssertionError('no error')
    except ReplicaError as error:
        assert 'context dev1->cpu has ended by signal 9, 2 times' in str(error), error
    forked_parts.ForkedPart.compute = own
    for p, value in zip(models[1].params, before):
        np.testing.assert_array_equal(p.get_value(), value)
    assert_alike([step(*batch)[0]], [plain(*batch)])


def fails():
    """An error in an op has its class, its text, and Theano's trace."""
    begin()
    x, i = T.matrix('x'), T.ivector('i')
    w = theano.shared(np.ones((5, 40), 'float32'), 'w')
    f = mgpu.function([x, i], (x * w[i]).sum(axis=1), mode='FAST_COMPILE')
    good = np.ones((8, 40), 'float32'), np.arange(8, dtype='int32') % 5
    f(*good)
    try:
        f(good[0], np.array([0] * 6 + [7, 7], 'int32'))  # in the part of the second context
        raise AssertionError('no error')
    except IndexError as error:
        text = str(error) + ''.join(getattr(error, '__notes__', ()))
        assert 'index 7 is out of bounds' in text and 'Apply node that caused the error' in text, text
        assert 'context dev1->cpu' in text
    assert_alike([f(*good)], [np.full(8, 40)])
    assert len(children()) == 1


def interrupted():
    """Ctrl-C ends a step while a process computes, twice; the next step is right."""
    begin()
    x = T.matrix('x')
    w = theano.shared(np.eye(600, dtype='float32'), 'w')
    product = x
    for _ in range(40):
        product = T.dot(product, w)
    f = mgpu.function([x], product.sum(axis=1))
    batch = np.random.RandomState(0).rand(600, 600).astype('float32')
    expected = f(batch)
    for delay in np.linspace(.002, .08, 12):
        try:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()
            while True:
                f(batch)
        except KeyboardInterrupt:
            pass
        np.testing.assert_array_equal(f(batch), expected)
    assert len(children()) == 1
    block, calls = processes.arena().empty((1000,), 'float32'), []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == 'call' else None)
    del block
    sys.setprofile(None)
    assert calls == []  # in a destructor, Ctrl-C would be lost


def files():
    """Files that the script closes are closed: a pipe to another program, and a file with a lock."""
    begin(3)
    reader = subprocess.Popen(['cat'], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with tempfile.TemporaryFile() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        again = os.open('/proc/self/fd/%d' % file.fileno(), os.O_RDWR)
        step_of(dense_model())(*data(16, 7))
        assert len(children()) == 3
    fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert reader.communicate(b'text', timeout=20)[0] == b'text'


def forked():
    """A fork of the script computes by itself, and leaves the processes to its parent."""
    begin()
    model = dense_model()
    step, batch = step_of(model), data(16, 7)
    step(*batch)
    child = os.fork()
    if not child:
        values = [step(*batch)[0] for _ in range(3)]
        os._exit(0 if np.isfinite(values).all() and not children() else 1)
    losses = [step(*batch)[0] for _ in range(3)]
    assert os.waitpid(child, 0)[1] == 0 and np.isfinite(losses).all() and len(children()) == 1


def updates():
    """Processes update the large variables, a share each; forks of the script have these as they were, and go on alone.
    """
    begin()
    models = dense_model(), dense_model()
    plain, step, batch = plain_step(models[0]), step_of(models[1]), data(16, 7)
    kept = []

    def train():
        """Train both models for a while, and compare them."""
        for _ in range(4):
            kept.append((step(*batch), plain(*batch)))
        assert_alike(*[[p.get_value() for p in model.params] for model in models])
    train()
    large = [p for p in models[1].params if p.get_value().nbytes > arena.SMALL]
    there = [processes.arena().place_of(p.container.storage[0]) for p in large]
    assert all(there) and 'each parameter on one of the contexts' in str(step.plan), there
    begun, finished, at_fork = os.pipe(), os.pipe(), [p.get_value() for p in models[1].params]
    lent = large[0].get_value(borrow=True)
    child = os.fork()
    if not child:
        os.read(begun[0], 1)  # until the parent has changed its values
        np.testing.assert_equal([p.get_value() for p in models[1].params], at_fork)
        np.testing.assert_equal(lent, large[0].get_value())
        train()
        for p in large:
            p.get_value(borrow=True)[...] = 5
        grandchild = os.fork()
        if not grandchild:
            assert {p.get_value().min() for p in large} == {5}
            os._exit(0)
        ended = os.waitpid(grandchild, 0)[1]
        os.write(finished[1], b'1')
        os._exit(ended)
    train()
    os.write(begun[1], b'1')
    os.read(finished[0], 1)
    train()
    assert os.waitpid(child, 0)[1] == 0 and len(children()) == 1
    doubled = theano.function([], [], updates={large[0]: 2 * large[0]}, mode='FAST_RUN')  # in place
    for _ in range(3):
        expected = large[0].get_value()
        child = os.fork()
        if not child:
            np.testing.assert_equal(large[0].get_value(), expected)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        doubled()
    assert_alike([loss for (loss, _), _ in kept], [loss for _, loss in kept])


def threads():
    """Threads of the script train at the same time; processes compute for all of them."""
    begin(3)
    batch, found = data(16, 7), {}
    functions = [(plain_step(dense_model(number)), step_of(dense_model(number))) for number in range(3)]

    def train(number):
        plain, step = functions[number]
        for _ in range(15):
            found.setdefault(number, []).append((float(step(*batch)[0]), float(plain(*batch))))
    workers = [threading.Thread(target=train, args=(number,)) for number in range(3)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    for pairs in found.values():
        assert len(pairs) == 15
        assert_alike(*zip(*pairs))


def waiting():
    """Threads that wait, as in a notebook, a debugger and a queue of batches, keep no process away."""
    begin()
    ours, theirs = socket.socketpair()
    for wait in queue.Queue().get, functools.partial(ours.recv, 1), functools.partial(time.sleep, 1000), \
            functools.partial(select.select, [ours], [], []):
        threading.Thread(target=wait, daemon=True).start()
    model, batch = dense_model(), data(16, 7)
    step_of(model)(*batch)
    assert len(children()) == 1


def busy():
    """Products of another thread, which several threads of BLAS compute, never keep a fork for ever."""
    begin()
    models, batch, end = (dense_model(), dense_model()), data(16, 7), threading.Event()
    plain, step = plain_step(models[0]), step_of(models[1])

    def multiply():
        random = np.random.RandomState(0)
        while not end.is_set():
            a = np.ones((800, 800), 'float32')
            for _ in range(random.randint(5)):
                a = np.dot(a, a) / 800
            time.sleep(2e-2 * random.rand())
    thread = threading.Thread(target=multiply)
    thread.start()
    forks, deadline = set(), time.time() + 60
    while len(forks) < 20 and time.time() < deadline:
        assert_alike([step(*batch)[0]], [plain(*batch)])
        for each in children():
            forks.add(each)
            os.kill(each, signal.SIGKILL)
    end.set()
    thread.join()
    assert len(forks) > 3, forks  # 20 unless the machine is very busy


class Noted(theano.Op):
    """An op of the script, which keeps something."""

    __props__ = ()
    seen = []

    def make_node(self, x):
        return theano.Apply(self, [T.as_tensor_variable(x)], [x.type()])

    def perform(self, node, inputs, outputs):
        Noted.seen.append(len(inputs[0]))
        outputs[0][0] = inputs[0] * 2

    def infer_shape(self, node, shapes):
        return shapes


class NotedNumbers(theano.scalar.UnaryScalarOp):
    """An op of the script on single numbers, which keeps something."""

    seen = []

    def impl(self, number):
        NotedNumbers.seen.append(1)
        return number * 3


def generators():
    """Keras's threads and processes that make batches go on beside the processes of contexts; many forks do, too."""
    from keras.layers import Dense
    from keras.models import Sequential
    from keras.utils import Sequence
    batches = [data(length, 7, seed=seed) for seed, length in enumerate(LENGTHS)]

    class Batches(Sequence):
        def __len__(self):
            return len(batches)

        def __getitem__(self, i):
            np.dot(np.ones((300, 300), 'float32'), np.ones((300, 300), 'float32'))
            return batches[i][0], np.eye(10)[batches[i][1] % 10]

    def trained():
        np.random.seed(1)
        model = Sequential([Dense(40, activation='tanh', input_shape=(7,)), Dense(10, activation='softmax')])
        model.compile('adam', 'categorical_crossentropy')
        for _ in range(2):
            for options in dict(workers=4), dict(workers=2, use_multiprocessing=True), dict(workers=0):
                model.fit_generator(Batches(), epochs=2, verbose=0, shuffle=False, max_queue_size=3, **options)
        return model.get_weights() + [model.predict_generator(Batches(), workers=4)]
    expected = trained()
    begin()
    mgpu.enable(always=True)
    assert_alike(trained(), expected)
    assert len(children()) == 1
    model, batch = dense_model(), data(16, 7)
    step = step_of(model)
    for i in range(100):
        child = os.fork()
        if not child:
            os._exit(7)
        if i % 10 == 0:
            assert np.isfinite(step(*batch)[0])
        assert os.waitpid(child, 0)[1] == 7 << 8
    assert len(children()) == 1


def of_ranks():
    """The contexts of each rank of a job are processes; the way is each rank's own, and so is a killed process."""
    contexts = begin(4)
    models, crew = (dense_model(), dense_model()), forked_parts.ForkedParts.crew
    assert len(contexts) == 2
    plain, step = plain_step(models[0]), step_of(models[1])
    forked_parts.ForkedParts.crew = lambda self, n: Crew(1, False) if turn % 3 == rank and n < 7 else crew(self, n)
    rank = contexts[0].name == 'dev2'
    for turn, length in enumerate(LENGTHS * 2):
        batch = data(length, 7, seed=turn)
        assert_alike([step(*batch)[0]], [plain(*batch)])
        if turn == 5 and rank:
            os.kill(children()[0], signal.SIGKILL)
    assert_alike([p.get_value() for p in models[1].params], [p.get_value() for p in models[0].params])
    assert len(children()) == 1
    print('fine', flush=True)


def own_op():
    """An op of the script computes in the script's process, since its effects in a fork would be lost."""
    begin()
    x = T.matrix('x')
    mgpu.function([x], Noted()(x).sum(), mode='FAST_COMPILE')(np.ones((8, 40), 'float32'))
    assert sum(Noted.seen) == 8 and not children()
    tripled = T.Elemwise(NotedNumbers(theano.scalar.same_out))
    rows, _ = theano.scan(lambda row: tripled(row).sum(), x)
    for outputs in tripled(x).sum(), rows:
        mgpu.function([x], outputs, mode=theano.Mode('py', 'fast_compile'))(np.ones((8, 40), 'float32'))
        assert sum(NotedNumbers.seen) >= 320 and not children()
        del NotedNumbers.seen[:]


def handled():
    """A handler of a signal calls functions within a step; none runs in a process; SIGPIPE of the script's has no say.
    """
    begin()
    faulthandler.dump_traceback_later(100, exit=True)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    x, calls, script = T.matrix('x'), [], os.getpid()
    w, product = theano.shared(np.eye(400, dtype='float32'), 'w'), x
    for _ in range(20):
        product = T.dot(product, w)
    outer = mgpu.function([x], product.sum(axis=1), mode='FAST_COMPILE')
    inner = mgpu.function([x], (x * 2).sum(axis=1), mode='FAST_COMPILE')
    large, small = np.ones((400, 400), 'float32'), np.ones((8, 40), 'float32')
    outer(large), inner(small)
    assert len(children()) == 1

    def call(*_):
        calls.append(inner(small))
        signal.setitimer(signal.ITIMER_REAL, .01 + .005 * (len(calls) % 5))
    signal.signal(signal.SIGALRM, call)
    signal.setitimer(signal.ITIMER_REAL, .005)
    while len(calls) < 12:
        assert_alike([outer(large)], [np.full(400, 400)])
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert_alike(calls, [np.full(8, 80)] * len(calls))
    for _ in range(3):
        os.kill(children()[0], signal.SIGKILL)
        assert_alike([inner(small)], [np.full(8, 80)])

    def end(*_):
        raise RuntimeError('time is over')
    signal.signal(signal.SIGALRM, end)
    mgpu.enable(always=True)
    enabled = theano.function([x], product.sum(axis=1), mode='FAST_COMPILE')
    mgpu.disable()
    enabled(large)
    for delay in np.linspace(.002, .02, 8):
        try:
            signal.setitimer(signal.ITIMER_REAL, delay)
            for _ in range(300):
                enabled(large)
            raise AssertionError('the error of the handler is lost')
        except RuntimeError as error:
            assert 'time is over' in str(error)

    # Another thread gets the signal, and Python runs its handler here: a hook of a fork ended, and the error was lost.
    is_over, hooks = threading.Event(), []
    other = threading.Thread(target=is_over.wait, daemon=True)
    other.start()

    def hook():
        if not is_over.is_set():
            hooks.append('begins')
            signal.pthread_kill(other.ident, signal.SIGALRM)
            time.sleep(.1)
            hooks.append('ends')
    os.register_at_fork(before=hook, after_in_parent=hook)
    for each in children():  # an interrupted call may have ended it
        os.kill(each, signal.SIGKILL)
    try:
        enabled(large)
        raise AssertionError('the error of the handler is lost')
    except RuntimeError as error:
        assert 'time is over' in str(error)
    is_over.set()
    other.join()
    assert hooks == ['begins', 'ends'] * 2 and signal.getsignal(signal.SIGALRM) is end
    assert_alike([enabled(large)], [np.full(400, 400)])

    ours, theirs = os.pipe()
    signal.signal(signal.SIGUSR1, lambda *_: os.write(theirs, b'.' if os.getpid() == script else b'x'))
    sent = 'while kill -USR1 $(cat /proc/%d/task/*/children | sed s/$$//); do :; done' % script
    with subprocess.Popen(['sh', '-c', sent], stderr=subprocess.DEVNULL) as killer:
        for _ in range(20):
            inner(small)
            for each in set(children()) - {killer.pid}:
                os.kill(each, signal.SIGKILL)
        killer.kill()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    os.close(theirs)
    assert b'x' not in os.read(ours, 1 << 16)


def children_of_the_script():
    """A script that waits for all its children, or closes all files, meets neither processes nor their connections."""
    begin()
    x, batch = T.matrix('x'), np.ones((8, 40), 'float32')
    f = mgpu.function([x], (x * 2).sum(axis=1), mode='FAST_COMPILE')
    for wait in os.wait, lambda: os.waitpid(-1, 0), lambda: os.waitid(os.P_ALL, 0, os.WEXITED), lambda: os.wait3(0):
        assert_alike([f(batch)], [np.full(8, 80)])
        assert len(children()) == 1
        if not os.fork():
            os._exit(3)
        signal.alarm(60)
        found = wait()
        try:
            wait()
            raise AssertionError('a second child')
        except ChildProcessError:
            signal.alarm(0)
        assert (found.si_status if hasattr(found, 'si_status') else found[1] >> 8) == 3
    f(batch)
    os.closerange(3, 64)
    others = [tempfile.TemporaryFile() for _ in range(30)]
    for _ in range(3):
        assert_alike([f(batch)], [np.full(8, 80)])
    for other in others:
        assert other.seek(0, os.SEEK_END) == 0
        other.close()
    assert_alike([f(batch)], [np.full(8, 80)])
    assert len(children()) == 1


class Told(theano.scalar.UnaryScalarOp):
    """An op of the script, a function of its inputs that prints."""

    mgpu_pure = True

    def impl(self, number):
        print('told')
        return number * 2


class Deleted:
    """An object that writes down in which process it is deleted."""

    def __init__(self, file):
        self.file, self.own = file, self

    def __del__(self):
        os.write(self.file, b'%d ' % os.getpid())


def state_of_the_script():
    """Tracers, destructors and threads of a script stay in it; its `numpy.seterr` and warnings count in processes."""
    begin()
    x, w, batch = T.matrix('x'), theano.shared(np.ones(40, 'float32'), 'w'), np.ones((8, 40), 'float32')
    f = mgpu.function([x], T.dot(T.log(x), w), mode=theano.Mode('py', 'fast_compile'))
    with tempfile.TemporaryFile(buffering=0) as file:
        def trace(frame, *_):
            file.write(b'%d ' % os.getpid())
            return trace
        local, end = threading.local(), threading.Event()

        def keep(ready):
            local.kept = Deleted(file.fileno())
            del local.kept.own
            ready.set()
            end.wait()
        ready = threading.Event()
        thread = threading.Thread(target=keep, args=[ready])
        thread.start()
        ready.wait()
        gc.disable()
        for _ in range(100):
            Deleted(file.fileno())
        gc.enable()
        gc.set_threshold(1)
        before = sys.gettrace()  # a tool that measures coverage goes on afterwards
        sys.settrace(trace)
        f(batch), f(batch)
        assert sys.gettrace() is trace and gc.isenabled()
        sys.settrace(before)
        gc.set_threshold(700)
        assert len(children()) == 1
        end.set()
        thread.join()
        file.seek(0)
        assert set(file.read().split()) == {b'%d' % os.getpid()}
    children_of_package.end_all()
    with cProfile.Profile() as profile:
        before = sys.getprofile()  # None since Python 3.12, whose cProfile is no function that Python calls
        f(batch)
        assert sys.getprofile() is before and len(children()) == 1
    assert profile.getstats()
    told = mgpu.function([x], T.Elemwise(Told(theano.scalar.same_out))(x), mode=theano.Mode('py', 'fast_compile'))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        print('before', end=' ')
        told(batch), told(batch)
    assert len(children()) == 1
    assert printed.getvalue().startswith('before told') and printed.getvalue().count('told\n') >= 2 * batch.size
    batch[-1] = -1  # in the part of the second context
    with np.errstate(invalid='raise'):
        try:
            f(batch)
            raise AssertionError('no error')
        except FloatingPointError as error:
            assert 'context dev1->cpu' in ''.join(getattr(error, '__notes__', ())) + str(error), error
    with np.errstate(invalid='warn'), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        f(batch)
    assert [str(each.message) for each in caught] == ['invalid value encountered in log'], caught
    with np.errstate(invalid='call', call=lambda *facts: caught.append(facts)):
        f(batch)
    assert caught.pop()[0] == 'invalid value' and len(children()) == 1
    children_of_package.end_all()
    forks = set()
    for _ in range(3):  # threads that end, with one of which the process began
        thread = threading.Thread(target=f, args=[batch])
        thread.start()
        thread.join()
        time.sleep(.05)
        forks.update(children())
    assert len(forks) == 1


def abandoned():
    """The memory of a call that was given up, as by a second Ctrl-C, is not used again while its process may write."""
    context, memory = begin()[1], processes.arena()
    call = Waiting()
    number, worker = processes.add_function(call), processes.worker_of(context)
    block = memory.empty((1000,), 'float32')
    place = memory.place_of(block)
    worker.begin(number, place, block)
    del block
    others = [memory.empty((1000,), 'float32') for _ in range(3)]
    assert place not in map(memory.place_of, others)
    worker.give_up()
    assert memory.place_of(memory.empty((1000,), 'float32')) == place and not children()


class Waiting:
    """A function that does not end."""

    def compute(self, message, ask):
        time.sleep(1000)


def full():
    """One process computes once the arena is full, and a warning says so."""
    begin()
    processes.Arena = functools.partial(arena.Arena, 1 << 12)
    model, other = dense_model(), dense_model()
    step, plain, batch = step_of(model), plain_step(other), data(600, 7)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        assert_alike([step(*batch)[0] for _ in range(3)], [plain(*batch) for _ in range(3)])
    messages = [str(each.message) for each in caught if 'in one process from now on' in str(each.message)]
    assert len(messages) == 1 and 'the memory that contexts of the CPU share is full' in messages[0], messages


def limits():
    """Less memory is shared where the address space is limited; without a new process, this one computes."""
    begin()
    with open('/proc/self/status') as file:
        size = 1024 * next(int(line.split()[1]) for line in file if line.startswith('VmSize'))
    resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 30),) * 2)
    models, batch = (dense_model(), dense_model()), data(600, 7)
    step, plain = step_of(models[1]), plain_step(models[0])
    assert_alike([step(*batch)[0]], [plain(*batch)])
    assert len(children()) == 1 and 1 << 24 < processes.arena().size < 1 << 28

    def fork():
        raise OSError(11, 'Resource temporarily unavailable')
    own, os.fork = os.fork, fork  # which does not fail for root
    os.kill(children()[0], signal.SIGKILL)
    assert_alike([step(*batch)[0] for _ in range(3)], [plain(*batch) for _ in range(3)])
    assert not children()
    os.fork = own
    assert_alike([step(*batch)[0]], [plain(*batch)])
    assert len(children()) == 1


def orphans():
    """Processes end with their parent, however that ends."""
    for how in 'os._exit(3)', 'os.kill(os.getpid(), 9)', 'sys.exit(0)', 'raise KeyError':
        done = subprocess.run([sys.executable, '-c', 'import os, sys\nfrom support import forked_cases\n'
                               'print(*forked_cases.with_processes(), flush=True)\n' + how],
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        left = [int(each) for each in done.stdout.split()]
        assert len(left) == 3
        deadline = time.time() + 5
        while any(map(is_running, left)) and time.time() < deadline:
            time.sleep(.01)
        assert not any(map(is_running, left)), how


def with_processes():
    begin(4)
    step_of(dense_model())(*data(16, 7))
    return children()


def is_running(process):
    try:
        with open('/proc/%d/stat' % process) as file:
            return file.read().rpartition(')')[2].split()[0] != 'Z'
    except OSError:
        return False


def chosen():
    """Short steps stay in one process; of long ones, the fastest crew is taken: all contexts, or half of the cores."""
    processor.cores, plain, batch = lambda: 4, plain_step(dense_model()), data(16, 7)
    mgpu.init()
    step = step_of(dense_model())
    for _ in range(10):
        step(*batch)
    assert not children()
    forked_parts.SHORTEST, note, crews, seconds = 0, forked_parts.ForkedParts.note, [], {}

    def noted(self, samples, _, crew):
        crews.append(tuple(crew))
        took = seconds[crew]
        note(self, samples, took.pop(0) if isinstance(took, list) else took, crew)
    forked_parts.ForkedParts.note = noted
    alone, whole, all_, half = (4, False), (1, False), (4, True), (2, True)
    for contexts, times, expected in [
            (4, {alone: 3, all_: 1}, [alone] * 4 + [all_] * 12),
            (4, {alone: 1, all_: 3}, [alone] * 4 + [all_] * 4 + [alone] * 8),
            (None, {whole: 3, all_: 1}, [whole] * 4 + [all_] * 12),
            (None, {whole: 3, all_: [5, 4, 3.5, 3.2] + [1] * 8}, [whole] * 4 + [all_] * 12),  # it still gets faster
            (None, {whole: 3, all_: 4, half: 1}, [whole] * 4 + [all_] * 4 + [half] * 8),
            (None, {whole: 3, all_: 4, half: 5}, [whole] * 4 + [all_] * 4 + [half] * 4 + [whole] * 4)]:
        seconds.update(times)
        mgpu.init(contexts)
        models = dense_model(), dense_model()
        plain, step = plain_step(models[0]), step_of(models[1])
        for _ in range(16):
            assert_alike([step(*batch)[0]], [plain(*batch)])
        assert crews == expected, crews
        del crews[:]
    assert str(step.plan).count('processes') == 0
    assert [each.reason for each in step.executable.forked.changes()] == [
        '3e+03 ms in one, 4e+03 ms in 4, 5e+03 ms in 2, for batches of 16 to 31 samples']


def cores():
    """Short steps are whole on the first core, and long ones take the faster way; plain Theano gives the same answers.
    """
    processor.cores = lambda: 2
    mgpu.init()
    models = dense_model(), dense_model()
    plain, step = plain_step(models[0]), step_of(models[1])
    parts, places = step.executable.forked, []
    run = step_run.StepRun.start

    def start(self):
        places.append(len(self._split.shards))
        run(self)
    step_run.StepRun.start = start
    for length in LENGTHS:
        batch = data(length, 7)
        assert_alike([step(*batch)[0]], [plain(*batch)])
    assert set(places) == {1} and not children() and parts.cores
    report = step.verify(*batch)
    assert report.passed and places.pop() == 2  # both parts are compared
    choice, = parts.changes()
    assert choice.chosen == 'one' and choice.reason.endswith(' ms in one, for batches of 8 to 15 samples')
    forked_parts.SHORTEST, note, seconds = 0, parts.note, {False: 3., True: 1.}
    parts.note = lambda samples, _, crew: note(samples, seconds[crew.are_forked], crew)
    batch = data(300, 7)
    for _ in range(9):
        assert_alike([step(*batch)[0]], [plain(*batch)])
    assert places[-9:] == [1] * 4 + [2] * 5 and len(children()) == 1
    seconds[True], batch = 4., data(600, 7)
    for _ in range(9):
        assert_alike([step(*batch)[0]], [plain(*batch)])
    assert places[-9:] == [1] * 4 + [2] * 4 + [1]
    assert_alike([p.get_value() for p in models[1].params], [p.get_value() for p in models[0].params])
    mgpu.enable(always=True)
    assert not step_of(dense_model()).executable.forked.cores
    mgpu.enable()
    assert step_of(dense_model()).executable.forked.cores


def left():
    """Plain Theano computes what processes do not compute faster, and not the first context as a whole."""
    processor.cores, forked_parts.SHORTEST, choice.SHORTEST = lambda: 2, 0, 0
    found.FoundBatch.patience = lambda self: 0
    note, seconds = forked_parts.ForkedParts.note, {}
    forked_parts.ForkedParts.note = lambda self, samples, _, crew: note(
        self, samples, seconds[crew.are_forked].pop(0), crew)
    clock, batch, calls = dispatch_clock.Clock(divided=1e-3, whole=2e-3), data(64, 7)[0], []
    clock.install(setattr)
    report = mgpu.enable()
    for faster in True, False:
        x = T.matrix('x')
        # Processes are slow at first, as they share the pages of this one.
        seconds.update({True: [.06, .035, .04, .04] + [.01 if faster else .04] * 99, False: [.03] * 99})
        f = theano.function([x], T.tanh(x).sum(axis=1), mode='FAST_COMPILE')
        clock.calls = calls
        for _ in range(60):
            assert_alike([f(batch)], [np.tanh(batch).sum(axis=1)])
        assert (report.usages[-1].contexts == mgpu.contexts()) == faster, report
        assert calls[-1] == ('divided' if faster else 'whole') and 'divided' in calls
        assert report.usages[-1].why == ('divided, 1 ms (host 2 ms)' if faster else
                                         'host, 2 ms (processes at best: 30 ms in one, 35 ms in 2)')


if __name__ == '__main__':
    of_ranks()
