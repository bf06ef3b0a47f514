#!/usr/bin/env python
"""Seconds from the kill of a rank to the next step that is done, and where they go; kills at random moments.

A job of two ranks trains; one rank after the other is killed by SIGKILL, at random moments, in the midst of steps and
of the writing of checkpoints. After the last kill the job trains to its end. Its weights, and the state of its
optimizer, have to equal the values of a job without kills to the bit. The models: tiny (Theano, 8-6-2), mlp (Theano,
784-512-512-10), lenet (Keras). A checkpoint follows each step, unless --every says otherwise. Before a kill, the job
makes a few steps and waits until the spare processes are ready: so a job lasts for any number of kills.

The target of the median is 2 s with a spare, and 4 s without. On two cores without other load, the first command takes
a quarter of an hour, and the second one ten minutes, by estimate; most of it is the compilation of each model, once a
command, and the start of the spare processes, once a kill.

  python benchmarks/recovery.py --spares 1 --kills 30
  python benchmarks/recovery.py --kills 30
  python benchmarks/recovery.py --models lenet --spares 1 --kills 5
"""
import argparse
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np

STEPS = {'tiny': 3000, 'mlp': 2000, 'lenet': 1000}  # of a job; some batches more for lenet, whose epochs are whole
PARTS = 'started', 'imported', 'built', 'loaded', 'step'
FLAGS = 'floatX=float32,contexts=a->cpu,mgpu.shares=equal'
FEW = 5  # steps of a process until it may be killed; then it makes one after the other


# ------------------------------------------------------------------------------------------------------- the job


class Log:
    """A file of events of a rank, which outlives it."""

    def __init__(self, folder):
        self.file = open('%s/%s' % (folder, os.environ['OMPI_COMM_WORLD_RANK']), 'a')
        self.goes_on, self.hurry = os.path.join(folder, 'goes_on'), os.path.join(folder, 'hurry')
        self.n_steps = 0
        with open('/proc/self/stat') as file:
            ticks = int(file.read().rpartition(')')[2].split()[19])
        boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        self.write('started', at=boot + ticks / os.sysconf('SC_CLK_TCK'))

    def write(self, event, number=0, at=None):
        self.file.write('%s %d %.4f %d\n' % (event, number, at or time.time(), os.getpid()))
        self.file.flush()

    def step(self, number, seconds):
        self.write('step', number)
        self.n_steps += 1
        if not os.path.exists(self.hurry):
            time.sleep(seconds)
        while self.n_steps >= FEW and not (os.path.exists(self.goes_on) or os.path.exists(self.hurry)):
            time.sleep(0.002)


def theano_job(log, folder, sizes, batch, steps, every, pause):
    import theano_mgpu as mgpu

    import theano
    import theano.tensor as T
    log.write('imported')
    rng = np.random.RandomState(0)
    x, target, params = T.matrix('x'), T.ivector('target'), []
    hidden = x
    for number, (inputs, outputs) in enumerate(zip(sizes, sizes[1:])):
        w = theano.shared((rng.randn(inputs, outputs) / inputs ** 0.5).astype('float32'), 'w%d' % number)
        b = theano.shared(np.zeros(outputs, 'float32'), 'b%d' % number)
        params += [w, b]
        hidden = T.dot(hidden if number == 0 else T.nnet.relu(hidden), w) + b
    loss = T.nnet.categorical_crossentropy(T.nnet.softmax(hidden), target).mean()
    speeds = {param: theano.shared(param.get_value() * 0, 'speed of ' + param.name) for param in params}

    def momentum(gradients):
        new = {speeds[param]: 0.9 * speeds[param] - 0.01 * gradient for param, gradient in zip(params, gradients)}
        return {**new, **{param: param + new[speed] for param, speed in speeds.items()}}
    step = mgpu.training_function([x, target], loss, params, momentum)
    data = rng.rand(1000, sizes[0]).astype('float32')
    labels = rng.randint(0, sizes[-1], 1000).astype('int32')
    log.write('built')
    done = step.checkpoint(folder + '/run.npz', every=every)
    log.write('loaded', done)
    for number in range(done, steps):
        rows = slice(number * batch % 900, number * batch % 900 + batch - number % 3)
        step(data[rows], labels[rows])
        log.step(number + 1, pause)
    if mgpu.rank() == 0:
        np.savez(folder + '/final.npz', *[variable.get_value() for variable in [*params, *speeds.values()]])


def keras_job(log, folder, steps, every, pause):
    import theano_mgpu as mgpu
    from theano_mgpu.keras import Checkpoint, multi_gpu_model

    import keras
    from keras import layers as L
    log.write('imported')
    np.random.seed(0)
    model = keras.Sequential([
        L.Conv2D(20, 5, activation='relu', input_shape=(28, 28, 1)), L.MaxPooling2D(),
        L.Conv2D(50, 5, activation='relu'), L.MaxPooling2D(), L.Flatten(), L.Dense(500, activation='relu'),
        L.Dropout(0.5), L.Dense(10, activation='softmax')])
    model = multi_gpu_model(model, gpus=None)
    model.compile('adam', 'sparse_categorical_crossentropy', metrics=['accuracy'])
    data, labels = np.random.rand(1000, 28, 28, 1).astype('float32'), np.random.randint(0, 10, (1000, 1))
    checkpoint, numbers = Checkpoint(folder + '/run.npz', every=every), itertools.count(1)

    class Events(keras.callbacks.Callback):
        def set_model(self, model):
            log.write('built')

        def on_train_begin(self, logs=None):
            log.write('loaded')
            self.is_told_again = checkpoint.replaying  # of the last batch before the checkpoint

        def on_batch_end(self, batch, logs=None):
            if not self.is_told_again:
                log.step(next(numbers), pause)
            self.is_told_again = False
    model.fit(data, labels, batch_size=32, epochs=-(-steps // 32), verbose=0, callbacks=[checkpoint, Events()])
    if mgpu.rank() == 0:
        np.savez(folder + '/final.npz', *model.get_weights(), *model.optimizer.get_weights())


def job(model, folder, steps, every, pause):
    log = Log(folder)
    if model == 'lenet':
        keras_job(log, folder, steps, every, pause)
    else:
        sizes, batch = {'tiny': ((8, 6, 2), 16), 'mlp': ((784, 512, 512, 10), 64)}[model]
        theano_job(log, folder, sizes, batch, steps, every, pause)


# ------------------------------------------------------------------------------------------------------- the kills


class Job:
    """A job under `theano-mgpu launch`, and what its ranks have logged."""

    def __init__(self, model, folder, compiled, arguments, restarts, spares):
        options = ['--restarts', str(restarts)] + ['--spares', str(spares)] * bool(spares)
        command = [sys.executable, '-m', 'theano_mgpu', 'launch', '-n', '2', *options, os.path.abspath(__file__), 'job',
                   model, folder, *map(str, arguments)]
        self.folder, self.printed = folder, open(folder + '/printed', 'w+')
        flags = '%s,base_compiledir=%s' % (FLAGS, compiled)
        self.process = subprocess.Popen(command, stdout=self.printed, stderr=self.printed,
                                        env=dict(os.environ, THEANO_FLAGS=flags, KERAS_BACKEND='theano'))

    def events(self, rank=0):
        """Return the events of a rank, as (event, number, time, process)."""
        try:
            with open('%s/%d' % (self.folder, rank)) as file:
                lines = file.read().split('\n')[:-1]
        except FileNotFoundError:
            return []
        return [(event, int(number), float(at), int(pid)) for event, number, at, pid in map(str.split, lines)]

    def text(self):
        with open(self.printed.name, errors='replace') as file:
            return file.read()

    def wait_for(self, found, seconds=300):
        end = time.time() + seconds
        while time.time() < end and self.process.poll() is None:
            value = found()
            if value:
                return value
            time.sleep(0.005)
        raise SystemExit('no progress; the job has ended with %s:\n%s' % (self.process.poll(), self.text()))

    def wait_for_spare(self, number):
        self.wait_for(lambda: len(re.findall('spare processes are ready', self.text())) >= number)

    def kill(self, rank):
        """Kill a rank that steps; return the seconds of each part until the next step."""
        steps = self.wait_for(lambda: [event for event in self.events(rank) if event[0] == 'step'])
        killed, pid = time.time(), steps[-1][3]
        os.kill(pid, signal.SIGKILL)
        old = {event[3] for event in self.events() if event[0] == 'step'}
        next_pid = self.wait_for(lambda: [event[3] for event in self.events()
                                          if event[0] == 'step' and event[3] not in old])[0]
        times = {}
        for event, _, at, pid in self.events():
            if pid == next_pid:
                times.setdefault(event, at)
        parts, before = {}, killed
        for part in PARTS:
            parts[part] = max(0, times[part] - before)
            before = max(before, times[part])
        return parts


def run(model, options, compiled, kills):
    """Run a job with some kills; return the parts of the time after each, and the final state."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = options.steps or STEPS[model], options.every, options.pause * bool(kills)
        job, parts = Job(model, folder, compiled, arguments, kills, options.spares if kills else 0), []
        for number in range(1, kills + 1):
            if options.spares:
                job.wait_for_spare(number)
            open(folder + '/goes_on', 'w').close()
            time.sleep(random.uniform(0.1, 0.6))
            parts.append(job.kill(random.randrange(2)))
            os.remove(folder + '/goes_on')
            print('%s: kill %d: %s' % (model, number, described(parts[-1], sum(parts[-1].values()))), flush=True)
        open(folder + '/hurry', 'w').close()  # the job pauses after its steps until then
        if job.process.wait():
            raise SystemExit(job.text())
        with np.load(folder + '/final.npz') as file:
            return parts, [file[name] for name in file.files]


def described(parts, total):
    return '%.2f s (%s)' % (total, ', '.join('%s %.2f' % item for item in parts.items()))


def measure(model, options):
    """Print the times of a model's kills; return whether the final state is the state of a job without kills."""
    with tempfile.TemporaryDirectory() as compiled:  # no code of other programs: Theano reads all
        theirs = run(model, options, compiled, 0)[1]
        parts, ours = run(model, options, compiled, options.kills)
    same = len(ours) == len(theirs) and all(np.array_equal(a, b) for a, b in zip(ours, theirs))
    totals = [sum(each.values()) for each in parts]
    print('%s, spares: %d, kills: %d: median %s, lowest %.2f, highest %.2f; the final state is %s' % (
        model, options.spares, options.kills,
        described({part: np.median([each[part] for each in parts]) for part in PARTS}, np.median(totals)),
        min(totals), max(totals), 'the same to the bit' if same else 'DIFFERENT'), flush=True)
    return same


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--models', nargs='+', choices=list(STEPS), default=list(STEPS))
    parser.add_argument('--spares', type=int, default=0)
    parser.add_argument('--kills', type=int, default=5, help='(default: %(default)s)')
    parser.add_argument('--every', type=int, default=1, help='steps between checkpoints (default: %(default)s)')
    parser.add_argument('--steps', type=int, help='steps of the job (default: %s)' % STEPS)
    parser.add_argument('--pause', type=float, default=0.02, help='seconds after each step until the last kill')
    options = parser.parse_args()
    same = [measure(model, options) for model in options.models]
    if not all(same):
        sys.exit('the weights are not the weights of a job without kills')


if __name__ == '__main__':
    if sys.argv[1:2] == ['job']:
        model, folder, steps, every, pause = sys.argv[2:]
        job(model, folder, int(steps), int(every), float(pause))
    else:
        main()
