"""What the ranks of the tests' MPI jobs do: ``python rank_jobs.py JOB ARGUMENTS``; rank 0 writes what is compared."""
import argparse
import atexit
import functools
import gc
import importlib
import json
import os
import signal
import sys
import threading
import time

TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [TESTS, os.path.join(os.path.dirname(TESTS), 'benchmarks')]

import theano_mgpu as mgpu
from theano_mgpu.graphs import graph
from theano_mgpu.prediction import rank_pool

import numpy as np
import theano
import theano.tensor as T
from theano.sandbox.rng_mrg import MRG_RandomStreams

from support.faulty_executor import faulty

PYTHON = theano.Mode('py', 'fast_compile')
RAGGED = [7, 5, 8, 1, 3, 2]
SLICED = np.random.RandomState(3).randn(23, 4)  # a data set


def shared(rng, *shape, name):
    return theano.shared(np.asarray(rng.randn(*shape) * 0.3, theano.config.floatX), name=name)


class Network:
    """A small network with dropout, a running mean, a count, and Adam; weights of its own on each rank at first."""

    def __init__(self, mode=PYTHON, dropout=True, seed=None, **options):
        from models import adam
        rng = np.random.RandomState(mgpu.rank() if seed is None else seed)
        x, labels = T.matrix('x'), T.ivector('labels')
        self.params = [shared(rng, 6, 16, name='w1'), shared(rng, 16, name='b1'), shared(rng, 16, 3, name='w2')]
        hidden = T.tanh(T.dot(x, self.params[0]) + self.params[1])
        if dropout:
            hidden *= MRG_RandomStreams(7).binomial((x.shape[0], 16), p=0.8, dtype=theano.config.floatX)
        probabilities = T.nnet.softmax(T.dot(hidden, self.params[2]))
        loss = T.nnet.categorical_crossentropy(probabilities, labels).mean() + 1e-3 * (self.params[0] ** 2).sum()
        self.mean, self.count = shared(rng, 6, name='mean'), theano.shared(np.int64(0), name='count')
        updates = {self.mean: T.cast(0.9 * self.mean + 0.1 * x.mean(axis=0), x.dtype),
                   self.count: self.count + x.shape[0]}
        right = T.eq(T.argmax(probabilities, axis=1), labels).sum(dtype='int64')
        self.step = mgpu.training_function([x, labels], loss, self.params, adam, [(right, 'sum'), probabilities],
                                           batch_updates=updates, mode=mode, name='train', **options)
        self.predict = mgpu.function([x], probabilities, mode=mode, name='predict')

    def batches(self, rounds=3, first=0):
        """The same ragged batches on every rank."""
        for number, n in enumerate(RAGGED * rounds):
            rng = np.random.RandomState(100 + number)
            batch = rng.randn(n, 6).astype(theano.config.floatX), rng.randint(0, 3, n).astype('int32')
            if number >= first:
                yield batch

    def values(self):
        """Everything that training has changed, and the predictions for one batch."""
        arrays = [variable.variable.get_value() for variable in self.step.variables()
                  if isinstance(variable.variable.get_value(borrow=True), np.ndarray)]
        return arrays


def write(path, arrays):
    if mgpu.rank() == 0:
        np.savez(path, *arrays)


def train(path, contexts, *options):
    """Ragged steps; all that they returned, and all state after them."""
    mgpu.init(contexts)
    network = Network(None if 'compiled' in options else PYTHON,
                      dropout='plain' not in options)
    returned = [np.asarray(value) for batch in network.batches() for value in network.step(*batch)]
    x = next(network.batches())[0]
    write(path, returned + network.values() + [network.predict(x)])
    print('rank %d trained on %s' % (mgpu.rank(), ', '.join(context.name for context in mgpu.contexts())))


def script(path, name, *arguments):
    """One of the benchmarks' scripts, as it is; the weights that it ends with. Each rank would begin with its own."""
    module = importlib.import_module(name)
    models = []
    for make in ('build', 'cnn'):
        if hasattr(module, make):
            setattr(module, make, recording(getattr(module, make), models))
    np.random.seed(mgpu.rank())
    sys.argv = [name + '.py'] + list(arguments)
    module.main()
    model = models[0]
    weights = model.get_weights() + model.optimizer.get_weights() if hasattr(model, 'get_weights') \
        else [param.get_value() for param in model.params]
    write(path, weights)


def recording(make, made):
    @functools.wraps(make)
    def wrapper(*args, **kwargs):
        made.append(make(*args, **kwargs))
        return made[-1]
    return wrapper


def disagree(path):
    """Errors that every rank meets at once and can catch; the step after each is as if it had not been."""
    mgpu.init('a->cpu')
    network, other = Network(), mgpu.rank() == mgpu.size() - 1
    x, labels = next(network.batches())
    met = []

    def caught(name, call):
        try:
            call()
            met.append([name, 'nothing', ''])
        except mgpu.MgpuError as error:
            met.append([name, type(error).__name__, str(error)])

    n = 6 if other else 7
    caught('lengths', lambda: network.step(x[:n], labels[:n]))
    caught('data', lambda: network.step(x + other, labels))
    caught('functions', lambda: network.predict(x) if other else network.step(x, labels))
    caught('model', lambda: Network(dropout=other))
    before = [param.get_value() for param in network.params]
    if other:
        faulty(network.step).inject(MemoryError('no memory left'))
    caught('replica', lambda: network.step(x, labels))
    unchanged = all((a == b.get_value()).all() for a, b in zip(before, network.params))
    network.params[0].set_value(before[0] * (2 if other else 1))
    caught('weights', lambda: network.step(x, labels))
    network.params[0].set_value(before[0])
    caught('after all', lambda: network.step(x, labels))
    with open('%s.%d' % (path, mgpu.rank()), 'w') as f:
        json.dump({'met': met, 'unchanged': unchanged}, f)


def no_memory(*_, **__):
    raise MemoryError('no memory left')


def late_failures(path):
    """The last rank fails at different places of a step; weights, and those of an undisturbed training beside it."""
    from theano_mgpu import training
    from theano_mgpu.program import run
    mgpu.init('a->cpu;b->cpu')
    networks = disturbed, undisturbed = Network(seed=0), Network(seed=0)
    step, last = disturbed.step, mgpu.rank() == mgpu.size() - 1
    executor = faulty(step)
    # Between the runs of the executor, a fault takes the place of a method: nothing public runs there.
    places = {'scatter': (step.compiled_program.graphs[0], 'refresh'), 'stage': (executor, 0), 'sum': (run.Sums, 'add'),
              'exchange': (run, 'exchanged'), 'broadcast': (run.Runner, '_broadcast'), 'update': (executor, 1),
              'outputs': (run.Runner, 'gather'), 'store': (run.Runner, '_store'),
              'check': (training.TrainingFunction, '_check')}
    met = []
    batches = undisturbed.batches()
    for place, (owner, name) in places.items():
        before, batch = disturbed.values(), next(batches)
        by_executor = owner is executor
        original = None if by_executor else getattr(owner, name)
        if last and by_executor:
            executor.inject(MemoryError('no memory left'), run=name)
        elif last:
            setattr(owner, name, no_memory)
        try:
            step(*batch)
            met.append([place, 'nothing', False])
        except Exception as error:
            unchanged = all((a == b).all() for a, b in zip(before, disturbed.values()))
            met.append([place, type(error).__name__, unchanged])
        if last and not by_executor:
            setattr(owner, name, original)
        for network in networks:
            network.step(*batch)
    same = [bool((a == b).all()) for a, b in zip(*(network.values() for network in networks))]
    with open('%s.%d' % (path, mgpu.rank()), 'w') as f:
        json.dump({'met': met, 'same': same}, f)


def in_two_threads():
    """Two trainings at once, in an order that the ranks do not agree on."""
    networks = Network(), Network()
    threads = [threading.Thread(target=lambda network=network: [network.step(*batch) for batch in network.batches(50)])
               for network in networks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def fail(how):
    """Steps, in which the last rank fails in some way."""
    mgpu.init('a->cpu')
    network, last = Network(), mgpu.rank() == mgpu.size() - 1
    print('rank %d began' % mgpu.rank(), flush=True)
    for number, batch in enumerate(network.batches()):
        if number == 5:
            sys.stdout.write('failing at %f\n' % time.time())
            sys.stdout.flush()
            if how == 'threads':
                return in_two_threads()
            if how == 'output' and last:
                sys.stdout = None
                sys.stderr = argparse.Namespace(write=no_memory, flush=no_memory)
                raise ValueError('the data of step 5 are bad')
            if how == 'hook' and last:
                sys.excepthook = no_memory
                raise ValueError('the data of step 5 are bad')
            if how == 'replica' and last:
                faulty(network.step).inject(MemoryError('no memory left'))
            if how == 'raise everywhere' or how == 'raise' and last:
                raise ValueError('the data of step 5 are bad')
            if how == 'exit' and last:
                sys.exit(3)
            if how == 'sleep' and last:
                time.sleep(1000)
            if how == 'segfault' and last:
                os.kill(os.getpid(), signal.SIGSEGV)
            if how == 'kill' and last:
                os.kill(os.getpid(), signal.SIGKILL)
        network.step(*batch)


def compile_errors(path):
    """Rank 0, which compiles first, cannot; then no rank can. Each tells what it met; float16 at the end."""
    mgpu.init('a->cpu')
    x, w = T.matrix('x', dtype='float16'), theano.shared(np.full(3, mgpu.rank() + 1, 'float16'), name='w')
    original, met = graph.compile_for, []
    for failing in (0, mgpu.rank()):
        if mgpu.rank() == failing:
            graph.compile_for = no_memory
        try:
            mgpu.function([x], x * w, mode=PYTHON)
        except Exception as error:
            met.append('%s: %s' % (type(error).__name__, error))
        graph.compile_for = original
    step = mgpu.training_function([x], T.sqr(x * w).mean(dtype='float16'), [w], lambda gradients: {
        w: w - T.cast(0.1 * gradients[0], 'float16')}, mode=PYTHON)
    step(np.arange(12, dtype='float16').reshape(4, 3) / np.float16(8))
    with open('%s.%d' % (path, mgpu.rank()), 'w') as f:
        json.dump({'met': met, 'w': w.get_value().tolist(), 'dtype': str(w.get_value().dtype)}, f)


def collect(path):
    """Rank 1's garbage collector runs between two functions over a variable, that of rank 0 does not."""
    mgpu.init('a->cpu')
    gc.disable()
    x, w = T.matrix('x'), theano.shared(np.full(3, mgpu.rank() + 1, 'float32'), name='w')
    for _ in range(2):
        f = mgpu.function([x], x * w, mode=PYTHON)
        found = f(np.ones((4, 3), 'float32'))
        del f
        if mgpu.rank():
            gc.collect()
    certificate = mgpu.function([x], (x * w).sum(), mode=PYTHON).verify(np.ones((4, 3), 'float32'))
    if mgpu.rank():
        np.savez(path, found, certificate.passed)


def stop(*_, **__):
    os.kill(os.getpid(), signal.SIGSTOP)


def stopped(where, file):
    """The last rank is stopped where the others begin to wait for it."""
    mgpu.init('a->cpu')
    network, last = Network(), mgpu.rank() == mgpu.size() - 1
    ranks, batches = network.step.ranks, network.batches()
    network.step(*next(batches))
    # A rank that stops in the middle of a call cannot be had otherwise: private attributes stand for what it waits in.
    if last and hasattr(ranks, where):
        setattr(ranks, where, stop)
    if last and where == 'finalize':
        ranks._mpi = argparse.Namespace(**dict(vars(ranks._mpi), Finalize=stop))
    if last and where == 'end':
        atexit.register(stop)
    if last and where == 'prediction':
        rank_pool.outcome = stop
    print('stopping at %f' % time.time(), flush=True)
    if where in ('end', 'finalize'):
        return
    if where == 'broadcast_object':
        network.step.checkpoint(file, 1)
    if where == 'gather_object':
        network.step.save(file)
    if where in ('broadcast', 'first_compiler'):
        Network()
    x = T.matrix('x')
    if where in ('prediction', 'end of prediction'):
        with mgpu.Predictor([x], x.sum(axis=1), mode=PYTHON) as predictor:
            if last and where == 'end of prediction':
                predictor._pool.end = stop
            predictor.predict(np.ones((1000, 2), theano.config.floatX))
    try:
        network.step(*next(batches))
    except mgpu.RankError:  # a script that goes on after it
        network.step(*next(batches))


def wait(path):
    """A script that takes its time."""
    mgpu.init('a->cpu')
    print('waiting', flush=True)
    time.sleep(1000)


def checkpoints(path, file, every, killed_at, rounds=3):
    """Training that one rank ends by SIGKILL once; started again it goes on from the checkpoint."""
    mgpu.init('a->cpu;b->cpu')
    network = Network()
    done = network.step.checkpoint(file, int(every))
    for number, batch in enumerate(network.batches(int(rounds), done), done):
        if number == int(killed_at) and not os.path.exists(path + '.killed') and mgpu.rank() == mgpu.size() - 1:
            open(path + '.killed', 'w').close()
            os.kill(os.getpid(), signal.SIGKILL)
        network.step(*batch)
    write(path, network.values() + [np.array(done)])


def compile_once(path):
    """Counts what each rank compiles for a function, in an empty folder of compiled code."""
    from theano.gof.cmodule import GCC_compiler
    mgpu.init('a->cpu')
    x = T.matrix('x')
    w = theano.shared(np.ones(3, theano.config.floatX), name='w')
    compiled, original = [], GCC_compiler.compile_str

    def compile_str(module_name, *args, **kwargs):
        compiled.append(module_name)
        return original(module_name, *args, **kwargs)
    GCC_compiler.compile_str = staticmethod(compile_str)
    f = mgpu.function([x], T.tanh(x * w).sum(axis=1) + 2)
    with open('%s.%d' % (path, mgpu.rank()), 'w') as file:
        json.dump({'compiled': compiled}, file)
    f(np.ones((4, 3), theano.config.floatX))


def shard(path, *n_batches):
    """Each rank feeds its own data: so many batches; the global batches are written, too."""
    mgpu.init('a->cpu')
    network = Network(dropout=False, sharded=True)
    own = [batch for number, batch in enumerate(network.batches()) if number % mgpu.size() == mgpu.rank()]
    losses = [network.step(*batch)[0] for batch in own[:int(n_batches[mgpu.rank()])]]
    network.step.join()
    write(path, network.values())
    assert len(losses) == int(n_batches[mgpu.rank()])


def coupled_shards(path, n_batches='3'):
    """Each rank feeds its own samples, which have a state each, and a rate; the last one has none in the end.

    Writes the losses, the weights, and each rank's state.
    """
    mgpu.init('a->cpu')
    alone, n = mgpu.size() == 1, int(n_batches)
    own = slice(5) if alone else [slice(0, 3), slice(3, 5)][mgpu.rank()]
    step, weights, state = recurrent(len(range(5)[own]), sharded=True)
    losses, states = [], []
    for number in range(n - mgpu.rank()):
        x = recurrent_batch(number)[own]
        if alone and number == n - 1:
            x = x[:3]
            state.set_value(state.get_value()[:3])
        losses.append(step(x, np.float64(0.1 * (number + 1)))[0])
        states.append(state.get_value())
    step.join()
    np.savez('%s.%d.npz' % (path, mgpu.rank()), *losses, *states, weights.get_value(), state.get_value())


def sliced(given, x, w):
    """What `sharded_slices` computes: a cost in which samples meet, and a row of each; the new weights."""
    rows = T.tanh(T.dot(x - x.mean(axis=0), w))
    cost = (rows ** 2).mean() / x.max()
    return [cost, rows], [(w, w - 0.1 * T.grad(cost, w))], given


def sharded_slices(path, *calls):
    """Each rank slices batches from a data set of its own, in so many calls; writes what it got, and the weights."""
    mgpu.init('a->cpu;b->cpu')
    data = theano.shared(np.split(SLICED, [14])[mgpu.rank()], 'data')
    index, x, w = T.lscalar('index'), T.matrix('x', 'float64'), theano.shared(np.eye(4) * (1 + mgpu.rank()), 'w')
    outputs, updates, givens = sliced({x: data[index * 4:(index + 1) * 4]}, x, w)
    step = mgpu.function([index], outputs, updates=updates, givens=givens, mode=PYTHON)
    found = [value for i in range(int(calls[mgpu.rank()])) for value in step(i)]
    step.join()
    report = mgpu.enable(always=True)
    plain = theano.function([index], data[index * 4:(index + 1) * 4], mode=PYTHON)
    np.testing.assert_array_equal(plain(0), data.get_value()[:4])
    assert 'samples of its own' in str(report) and 'one device' in str(report), report
    np.savez('%s.%d.npz' % (path, mgpu.rank()), *found, w.get_value())


def recurrent(n, **options):
    """A step whose samples are coupled and have a state each, and whose rate is an input."""
    x, rate = T.matrix('x', 'float64'), T.scalar('rate', 'float64')
    w, h = theano.shared(np.full((4, 4), 0.3), 'w'), theano.shared(np.zeros((n, 4)), 'h')
    new = T.tanh(x - x.mean(axis=0) + T.dot(h, w))
    step = mgpu.training_function([x, rate], (new ** 2).sum() / x.max(), [w],
                                  lambda gradients: {w: w - rate * gradients[0]}, [new], batch_updates={h: new},
                                  mode=PYTHON, **options)
    return step, w, h


def recurrent_batch(number):
    return np.random.RandomState(number).randn(5, 4)


def refused(path):
    """A graph that cannot be computed in parts, over ranks: all compute it whole, or none where each has its data."""
    mgpu.init('a->cpu;b->cpu')
    x, w = T.matrix('x', 'float64'), theano.shared(np.full(3, 0.5 + mgpu.rank()), 'w')
    sums = T.extra_ops.cumsum(T.dot(x, w)) * MRG_RandomStreams(3).uniform((x.shape[0],), dtype='float64')

    def make(**options):
        return mgpu.training_function([x], (sums ** 2).mean(), [w], lambda gradients: {w: w - 0.01 * gradients[0]},
                                      [sums], mode=PYTHON, **options)
    error = ''
    if mgpu.size() > 1:
        try:
            make(sharded=True)
        except mgpu.GraphError as caught:
            error = str(caught)
    step = make()
    returned = [value for n in (5, 1, 4) for value in step(np.random.RandomState(n).randn(n, 3))]
    np.savez('%s.%d.npz' % (path, mgpu.rank()), *returned, w.get_value(), np.array(error))


def predict(path, contexts, per_context=1):
    """What a Predictor gives on each rank, and what rank 0 alone has: batches, errors, weights taken over meanwhile."""
    mgpu.init(contexts)
    rng = np.random.RandomState(mgpu.rank())  # weights, data and batches of its own on each rank: rank 0's count
    x, w = T.matrix('x'), shared(rng, 6, 3, name='w')
    data = rng.randn(201, 6).astype(theano.config.floatX)
    first, second = np.array(w.get_value()), np.array(2 * w.get_value())
    drawn = T.tanh(T.dot(x, w)) + 0 * MRG_RandomStreams(3).uniform((x.shape[0], 3))
    predictor = mgpu.Predictor([x], [drawn, x.sum(axis=1)], replicas_per_context=int(per_context),
                               mode=PYTHON if 'cpu' in contexts else theano.Mode(optimizer='fast_compile'))
    with predictor:
        whole = predictor.predict(data, batch_size=8)
        read, found = [], []
        for outputs in predictor.map(read.append(i) or data[i:i + 10] for i in range(0, 200, 10)):
            found.append(outputs[0])
            if len(found) == 8:
                w.set_value(second)
                predictor.refresh()
        bad = [data[:5], data[:, :5, None], data[5:12]]
        errors = list(predictor.map(bad, on_error='yield'))
        try:
            predictor.predict(data[:, :5])
            message = 'no error'
        except mgpu.PredictionError as error:
            message = '%d %s' % (error.index, error)
        given_up = predictor.map(data[:7] for _ in range(1000))
        if mgpu.rank() == 0:
            next(given_up)
            try:
                next(predictor.map([data]))
            except mgpu.MgpuError as error:
                message += '; %s' % error
            given_up.close()
        else:
            list(given_up)
        after = predictor.predict(data[:3])[0]
        calls = [resident.calls for resident in predictor.residents]
    np.savez('%s.%d.npz' % (path, mgpu.rank()), data, first, second, after, *whole)
    with open('%s.%d.json' % (path, mgpu.rank()), 'w') as f:
        json.dump({'found': [outputs.tolist() for outputs in found], 'read': len(read), 'message': message,
                   'errors': [[e.index, str(e), str(e.__cause__)] if isinstance(e, Exception) else len(e[0])
                              for e in errors], 'calls': calls}, f)


def stages(path, contexts):
    """A model whose samples depend on each other, over stages."""
    from support.stages import CoupledModel
    mgpu.init(contexts)
    model = CoupledModel('float64')
    write(path, model.train(model.over_contexts(PYTHON)))


def hang(path):
    """The last rank's replica never ends its second batch."""
    mgpu.init('a->cpu')
    x = T.matrix('x')
    with mgpu.Predictor([x], x.sum(axis=1), mode=PYTHON) as predictor:
        resident, run = predictor.residents[0], predictor.residents[0].run  # predictions have no executor
        if mgpu.rank() == mgpu.size() - 1:
            resident.run = lambda job: time.sleep(1000) if job.index > 2 else run(job)
        predictor.predict(np.ones((1000, 2), theano.config.floatX))


if __name__ == '__main__':
    globals()[sys.argv[1]](*sys.argv[2:])
