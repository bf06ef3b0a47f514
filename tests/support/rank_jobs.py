"""Entry point of the MPI jobs of tests: ``python rank_jobs.py JOB ARGUMENTS``. Rank 0 writes the results to compare.

``JOB ARGUMENTS then JOB ARGUMENTS`` runs jobs one after the other: starting processes takes longer than most of them.
"""
import functools
import importlib
import itertools
import json
import os
import signal
import sys
import threading
import time

TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [TESTS] + [os.path.join(os.path.dirname(TESTS), name) for name in ('benchmarks', 'examples')]

import theano_mgpu as mgpu
from theano_mgpu.plan import buckets
from theano_mgpu.runtime import overlap

import numpy as np
import theano
import theano.tensor as T
from theano.configparser import change_flags
from theano.sandbox.rng_mrg import MRG_RandomStreams

from support.communicator_cases import conformance  # noqa: F401  a job
from support.exchange_cells import failing_ranks, killed, of_ranks  # noqa: F401  jobs
from support.rank_check_jobs import checked, recorded_on_rank_0, unwritten  # noqa: F401  jobs
from support.rank_data_jobs import coupled_shards, halves, other_shards, refused, shard, sharded_slices  # noqa: F401
from support.rank_fault_jobs import collect, compile_errors, disagree, fail, hang, late_failures, stopped  # noqa: F401
from support.rank_network import PYTHON, Network, shared, write
from support.rank_placement_jobs import placed  # noqa: F401  a job
from support.rank_stage_jobs import early_sums, reshaped, slices, two_functions  # noqa: F401  jobs


def train(path, contexts, *options):
    """Train with ragged batches; write all outputs, and all state afterwards. Options with a '=' are flags."""
    with change_flags(**dict(option.split('=') for option in options if '=' in option)):
        _train(path, contexts, options)


def _train(path, contexts, options):
    mgpu.init(contexts)
    if 'watched' in options:  # the network of two hosts on one machine is a fast one
        overlap.LAST, overlap.NOTICEABLE = 6, 1
    network = Network(None if 'compiled' in options else PYTHON,
                      dropout='plain' not in options)
    returned = [np.asarray(value) for batch in network.batches() for value in network.step(*batch)]
    x = next(network.batches())[0]
    write(path, returned + network.values() + [network.predict(x)])
    print('rank %d trained on %s' % (mgpu.rank(), ', '.join(context.name for context in mgpu.contexts())))
    if network.step.plan.overlaps:
        exchanging = any(thread.name.startswith('theano_mgpu exchange') for thread in threading.enumerate())
        print('pieces: %d, a thread exchanges: %s'
              % (sum(len(stage.parts) for stage in network.step.plan.stages), exchanging))


def divided(path, file, update_on):
    """Train, save to a file, or load it if it exists, and train on; rank r notes the values that it lacks."""
    mgpu.init('a->cpu')
    network = Network(update_on=update_on)
    batches = list(network.batches(1))
    lacks = []
    if os.path.exists(file):
        network.step.load(file)
    else:
        for batch in batches:
            network.step(*batch)
        lacks = [i for i, each in enumerate(network.step.updated) if not each.latest_in]
        network.step.save(file)
    for batch in batches[:2]:
        network.step(*batch)
    with open('%s.%d' % (path, mgpu.rank()), 'w') as f:
        json.dump(lacks, f)
    write(path, network.values())


def read_alone(path):
    """Read the state of a sharded update on rank 0 alone; each rank notes its error, and trains on."""
    mgpu.init('a->cpu')
    network = Network(update_on='sharded')
    batches = list(network.batches(1))
    network.step(*batches[0])
    message = None
    try:
        if mgpu.rank() == 0:
            network.values()
        network.step(*batches[1])
    except mgpu.RankError as error:
        message = str(error)
    network.step(*batches[2])
    with open('%s.%d' % (path, mgpu.rank()), 'w') as f:
        json.dump(message, f)
    assert all(np.isfinite(value).all() for value in network.values())


def script(path, name, *arguments):
    """Run one of the examples, as it is; write its final weights. The ranks' initial weights differ."""
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


def wait(path):
    """Run a script that takes its time."""
    mgpu.init('a->cpu')
    print('waiting', flush=True)
    time.sleep(1000)


def checkpoints(path, file, every, killed_at, rounds=3, most=2):
    """Train until one rank ends the job by SIGKILL, once; a restarted job goes on from the checkpoint.

    It fails if it has more than `most` ranks, as if a device had been lost.
    """
    mgpu.init('a->cpu;b->cpu')
    if os.path.exists(path + '.killed') and mgpu.size() > int(most):
        raise OSError('a device is lost')
    network = Network()
    done = network.step.checkpoint(file, int(every))
    for number, batch in enumerate(network.batches(int(rounds), done), done):
        if number == int(killed_at) and not os.path.exists(path + '.killed') and mgpu.rank() == mgpu.size() - 1:
            open(path + '.killed', 'w').close()
            os.kill(os.getpid(), signal.SIGKILL)
        network.step(*batch)
    write(path, network.values() + [np.array(done)])


def shrinks_and_grows(path, file):
    """Train in two processes until one is killed, in one until that asks to grow, and again in two."""
    lost, back = path + '.lost', path + '.back'
    mgpu.init('a->cpu')
    if mgpu.size() == 2 and os.path.exists(lost) and not os.path.exists(back):
        raise OSError('a device is lost')
    network = Network()
    done = network.step.checkpoint(file, 4)
    for number, batch in enumerate(network.batches(3, done), done):
        if number == 5 and mgpu.rank() == 1:
            open(lost, 'w').close()
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 11 and mgpu.size() == 1:
            open(back, 'w').close()
            with open('/proc/%d/stat' % os.getppid()) as stat:  # the parent of mpirun is the launcher
                os.kill(int(stat.read().rpartition(')')[2].split()[1]), signal.SIGRTMIN)
            time.sleep(1000)
        network.step(*batch)
    write(path, network.values() + [np.array([done, mgpu.size()])])


def killed_while_it_waits(path, file):
    """Train with checkpoints; in the sixth step, a job that has begun anew waits to be killed."""
    mgpu.init('a->cpu')
    print('begins')
    network = Network()
    done = network.step.checkpoint(file, 2)
    for number, batch in enumerate(network.batches(2, done), done):
        if number == 5 and done == 0 and path.endswith('killed.npz'):
            with open('%s.%d' % (path, mgpu.rank()), 'w') as f:
                f.write('%d\n' % os.getpid())
            time.sleep(1000)
        network.step(*batch)
    write(path, network.values() + [np.array(done)])


def compile_once(path):
    """Count the modules that each rank compiles for a function, in an empty folder of compiled code."""
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


def predict(path, contexts):
    """Write each rank's results of a Predictor, and batches, errors and weights of rank 0."""
    mgpu.init(contexts)
    rng = np.random.RandomState(mgpu.rank())  # weights, data and batches of its own on each rank: rank 0's count
    x, w = T.matrix('x'), shared(rng, 6, 3, name='w')
    data = rng.randn(201, 6).astype(theano.config.floatX)
    first, second = np.array(w.get_value()), np.array(2 * w.get_value())
    drawn = T.tanh(T.dot(x, w)) + 0 * MRG_RandomStreams(3).uniform((x.shape[0], 3))
    predictor = mgpu.Predictor([x], [drawn, x.sum(axis=1)],
                               mode=PYTHON if 'cpu' in contexts else theano.Mode(optimizer='fast_compile'))
    with predictor:
        whole = predictor.predict(data, batch_size=8)
        read, found = [], []
        for outputs in predictor.map(read.append(i) or data[i:i + 10] for i in [*range(0, 200, 10)] * 20):
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
        calls = predictor._function.calls
    np.savez('%s.%d.npz' % (path, mgpu.rank()), data, first, second, after, *whole)
    with open('%s.%d.json' % (path, mgpu.rank()), 'w') as f:
        json.dump({'found': [outputs.tolist() for outputs in found], 'read': len(read), 'message': message,
                   'errors': [[e.index, str(e), str(e.__cause__)] if isinstance(e, Exception) else len(e[0])
                              for e in errors], 'calls': calls}, f)


def stages(path, contexts):
    """Train a model whose samples depend on each other, over stages."""
    from support.stages import CoupledModel
    mgpu.init(contexts)
    model = CoupledModel('float64')
    write(path, model.train(model.over_contexts(PYTHON)))


if __name__ == '__main__':
    buckets.LEAST = 1  # with the flag mgpu.overlap: the networks are small
    words = iter(sys.argv[1:])
    for job in words:
        globals()[job](*itertools.takewhile(lambda word: word != 'then', words))
