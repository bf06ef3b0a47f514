"""MPI jobs in which one rank fails, stops, or does something else than the others."""
import argparse
import atexit
import gc
import json
import os
import signal
import sys
import threading
import time

import theano_mgpu as mgpu
from theano_mgpu.comm.activities import AGREE, CALL, COMPILE, GATHER, SHARE
from theano_mgpu.runtime import compiler

import numpy as np
import theano
import theano.tensor as T

from .comparison import note_of
from .faulty_executor import faulty
from .rank_network import PYTHON, Network, no_memory


def disagree(path):
    """Raise errors on every rank at once, and catch them. The next step shows no trace of them."""
    mgpu.init('a->cpu')
    network, other = Network(), mgpu.rank() == mgpu.size() - 1
    x, labels = next(network.batches())
    met, notes = [], {}

    def caught(name, call):
        try:
            call()
            met.append([name, 'nothing', ''])
        except Exception as error:
            met.append([name, type(error).__name__, str(error)])
            notes[name] = note_of(error)

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
    if other:
        network.params[1].set_value(before[1])
    caught('weights of one', lambda: network.step(x, labels))
    network.params[1].set_value(before[1])
    caught('after all', lambda: network.step(x, labels))
    with open('%s.%d' % (path, mgpu.rank()), 'w') as f:
        json.dump({'met': met, 'unchanged': unchanged, 'notes': notes}, f)


def late_failures(path):
    """Raise errors on the last rank at different places of a step, and compare with an undisturbed training."""
    from theano_mgpu.exchange import host
    from theano_mgpu.runtime import step_run
    mgpu.init('a->cpu;b->cpu')
    networks = disturbed, undisturbed = Network(seed=0), Network(seed=0)
    step, last = disturbed.step, mgpu.rank() == mgpu.size() - 1
    executor = faulty(step)
    # No public hook runs between the runs of the executor, so there a fault replaces a method.
    places = {'scatter': (step.executable.parts[step.plan.parts[0]], 'refresh'), 'stage': (executor, 0),
              'sum': (host.HostChannel, 'prepare'), 'exchange': (step_run, 'exchanged'),
              'broadcast': (step_run.StepRun, 'finish'), 'update': (executor, 1),
              'outputs': (step_run.StepRun, 'gather'), 'store': (step_run.StepRun, '_store'),
              'check': (step, '_check')}
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
    """Train two networks at once, in an order that differs between ranks."""
    networks = Network(), Network()
    threads = [threading.Thread(target=lambda network=network: [network.step(*batch) for batch in network.batches(50)])
               for network in networks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def fail(how, mark=None):
    """Train, and have the last rank fail in one of several ways, once it has made a file, if one is named."""
    mgpu.init('a->cpu')
    network, last = Network(), mgpu.rank() == mgpu.size() - 1
    print('rank %d began' % mgpu.rank(), flush=True)
    for number, batch in enumerate(network.batches()):
        if number == 5:
            sys.stdout.write('failing at %f\n' % time.time())
            sys.stdout.flush()
            if mark and last:
                open(mark, 'w').close()
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
    """Raise errors of compilation on rank 0, which compiles first, then on all ranks; each rank reports its errors.

    Ends with a step in float16.
    """
    mgpu.init('a->cpu')
    x, w = T.matrix('x', dtype='float16'), theano.shared(np.full(3, mgpu.rank() + 1, 'float16'), name='w')
    original, met = compiler.compile_for, []
    for failing in (0, mgpu.rank()):
        if mgpu.rank() == failing:
            compiler.compile_for = no_memory
        try:
            mgpu.function([x], x * w, mode=PYTHON)
        except Exception as error:
            met.append('%s: %s' % (type(error).__name__, error))
        compiler.compile_for = original
    step = mgpu.training_function([x], T.sqr(x * w).mean(dtype='float16'), [w], lambda gradients: {
        w: w - T.cast(0.1 * gradients[0], 'float16')}, mode=PYTHON)
    step(np.arange(12, dtype='float16').reshape(4, 3) / np.float16(8))
    with open('%s.%d' % (path, mgpu.rank()), 'w') as f:
        json.dump({'met': met, 'w': w.get_value().tolist(), 'dtype': str(w.get_value().dtype)}, f)


def collect(path):
    """Run the garbage collector between two functions over a variable, on rank 1 only."""
    mgpu.init('a->cpu')
    gc.disable()
    x, w = T.matrix('x'), theano.shared(np.full(3, mgpu.rank() + 1, 'float32'), name='w')
    for _ in range(2):
        f = mgpu.function([x], x * w, mode=PYTHON)
        found = f(np.ones((4, 3), 'float32'))
        del f
        if mgpu.rank():
            gc.collect()
    report = mgpu.function([x], (x * w).sum(), mode=PYTHON).verify(np.ones((4, 3), 'float32'))
    if mgpu.rank():
        np.savez(path, found, report.passed)


def stop(*_, **__):
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_at(handshake, activity):
    """Return a handshake that stops the process where it is one of an activity."""
    def stopping(what, integers=()):
        if what[0] == activity:
            stop()
        return handshake(what, integers)
    return stopping


def stopped(where, file):
    """Stop the last rank at the moment for which the others begin to wait."""
    mgpu.init('a->cpu')
    network, last = Network(), mgpu.rank() == mgpu.size() - 1
    ranks, batches = network.step.ranks, network.batches()
    network.step(*next(batches))
    # Nothing public stops a rank in the middle of a call, so this replaces private attributes.
    activities = {'call': CALL, 'agree': AGREE, 'share': SHARE, 'gather': GATHER, 'compile': COMPILE}
    if last and where in activities:
        ranks.handshake = stop_at(ranks.handshake, activities[where])
    if last and where == 'all_reduce':
        ranks.all_reduce = stop
    if last and where == 'finalize':
        ranks._mpi = argparse.Namespace(**dict(vars(ranks._mpi), Finalize=stop))
    if last and where == 'end':
        atexit.register(stop)
    print('stopping at %f' % time.time(), flush=True)
    if where in ('end', 'finalize'):
        return
    if where == 'share':
        network.step.save(file)
    if where == 'compile':
        Network()
    x = T.matrix('x')
    if where == 'prediction':
        with mgpu.Predictor([x], x.sum(axis=1), mode=PYTHON) as predictor:
            if last:
                predictor._function.compute = stop
            predictor.predict(np.ones((1000, 2), theano.config.floatX))
    try:
        network.step(*next(batches))
    except mgpu.RankError:  # a script that goes on after it
        network.step(*next(batches))


def hang(path):
    """Keep the last rank from returning from its second group of batches."""
    mgpu.init('a->cpu')
    x = T.matrix('x')
    with mgpu.Predictor([x], x.sum(axis=1), mode=PYTHON) as predictor:
        compute = predictor._function.compute
        if mgpu.rank() == mgpu.size() - 1:
            predictor._function.compute = lambda group, following: \
                time.sleep(1000) if group.first > 2 else compute(group, following)
        predictor.predict(np.ones((1000, 2), theano.config.floatX))
