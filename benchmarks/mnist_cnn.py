#!/usr/bin/env python
"""Train a small CNN on handwritten digits, over all contexts and over one, and compare the two.

Conv 32 3x3 relu, max-pool 2x2, dense 10 softmax, Adam. Both runs start from the same weights and see
the same batches; their epochs take turns, so that they meet the same machine. Examples:

  python benchmarks/mnist_cnn.py
  THEANO_FLAGS='contexts=dev0->cuda0;dev1->cuda1' python benchmarks/mnist_cnn.py --data mnist.npz
  python benchmarks/mnist_cnn.py --contexts 'dev0->cpu;dev1->cpu;dev2->cpu' --epochs 3
"""
import argparse
import json
import os
import sys
import time

# Set before Theano reads it: without a flag, Theano computes in float64.
if 'floatX' not in os.environ.get('THEANO_FLAGS', ''):
    os.environ['THEANO_FLAGS'] = 'floatX=float32,' + os.environ.get('THEANO_FLAGS', '')

import theano_mgpu as mgpu
from theano_mgpu.devices.context_map import describe
from theano_mgpu.profiling.timeline import PHASES

import numpy as np
import theano
from models import adam, cnn, flat_mlp, handwritten_digits, open_contexts
from tqdm import tqdm

NOTES = """\
s/step: median over the whole batches, first epoch left out; the phases: means. accuracy: on the test images.
difference: largest of the parameters from the one-context run, relative to the largest value of each; in float32 ReLU
and max-pooling amplify rounding, in float64 (THEANO_FLAGS=floatX=float64) it is about 1e-13."""


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--contexts', metavar='N|MAP', help="contexts to train on: their number, which "
                        "uses this machine's devices in turn; or a map, e.g. 'dev0->cuda0;dev1->cuda1'. By "
                        'default those of THEANO_FLAGS or .theanorc, else every GPU, else two on the CPU')
    parser.add_argument('--opencl-cpus', action='store_true', help='on a machine without a GPU use its CPU through '
                        'OpenCL, if it can: the code paths of a GPU, and slower than a `cpu` context')
    parser.add_argument('--data', metavar='FILE', help="an .npz file like Keras's mnist.npz; by default "
                        "~/.keras/datasets/mnist.npz, else scikit-learn's digits")
    parser.add_argument('--epochs', type=int, default=9)
    parser.add_argument('--batch-size', type=int, default=128, help='samples in the whole batch (default %(default)s)')
    parser.add_argument('--executor', choices=['auto', 'serial', 'threads', 'mpi'])
    parser.add_argument('--json', metavar='FILE', help='also write the results there')
    arguments = parser.parse_args()
    if arguments.contexts == '0':
        parser.error('--contexts must be at least 1')
    if arguments.epochs < 1 or arguments.batch_size < 1:
        parser.error('--epochs and --batch-size must be at least 1')
    if arguments.data and not os.path.exists(arguments.data):
        parser.error('no such file: %s' % arguments.data)
    return arguments


class Run:
    """One model in training over some contexts."""

    def __init__(self, names, executor, model):
        self.names = names
        self.model = model
        start = time.time()
        self.step = mgpu.training_function(self.model.inputs, self.model.loss, self.model.params, adam,
                                           contexts=names, executor=executor)
        self.accuracy = mgpu.function(self.model.inputs, self.model.accuracy, reduce='mean', contexts=names)
        n = self.step.n_replicas  # on all ranks
        self.title = '%d context%s' % (n, 's' if n > 1 else '')
        print('%s compiled in %.0f s' % (self.title, time.time() - start))
        self.seconds = []  # of each whole batch; the first epoch warms up

    def epoch(self, number, data, order, batch_size):
        """Train on all samples, in the given order."""
        images, labels = data
        losses = []
        with tqdm(total=len(order), unit=' samples', desc='epoch %d, %s' % (number, self.title), leave=True,
                  disable=None, mininterval=0.5) as bar:
            for start in range(0, len(order), batch_size):
                batch = order[start:start + batch_size]
                begin = time.perf_counter()
                losses.append(float(self.step(images[batch], labels[batch])))
                if number > 1 and len(batch) == batch_size:
                    self.seconds.append(time.perf_counter() - begin)
                bar.update(len(batch))
                bar.set_postfix(loss='%.4f' % np.mean(losses), refresh=False)
        if number == 1:
            self.step.timings.reset()
            self.step.timings.exact = True

    def results(self, test, batch_size):
        """What the table shows."""
        step = float(np.median(self.seconds)) if self.seconds else float('nan')
        weights = [len(test[0][i:i + batch_size]) for i in range(0, len(test[0]), batch_size)]
        accuracies = [self.accuracy(test[0][i:i + batch_size], test[1][i:i + batch_size])
                      for i in range(0, len(test[0]), batch_size)]
        return dict(contexts=self.names, samples_per_second=batch_size / step, seconds_per_step=step,
                    phases=self.step.timings.per_call(), accuracy=float(np.average(accuracies, weights=weights)))


def largest_difference(run, reference):
    """Largest difference of the parameters from the other run's, relative to the largest value of each."""
    pairs = [(p.get_value(), q.get_value()) for p, q in zip(run.model.params, reference.model.params)]
    return max(float(abs(a - b).max() / abs(b).max()) for a, b in pairs)


def print_table(rows):
    header = ['contexts', 'samples/s', 's/step'] + list(PHASES) + ['accuracy', 'difference']
    widths = [max(10, len(title)) for title in header]
    print('\n' + '  '.join(title.rjust(width) for title, width in zip(header, widths)))
    for row in rows:
        values = ['%d' % len(row['contexts']), '%.0f' % row['samples_per_second'], '%.4f' % row['seconds_per_step']]
        values += ['%.4f' % row['phases'][phase] for phase in PHASES]
        values += ['%.4f' % row['accuracy'], '%.1e' % row['difference'] if row['difference'] is not None else '-']
        print('  '.join(value.rjust(width) for value, width in zip(values, widths)))
    print('\n' + NOTES)


def main():
    arguments = parse_arguments()
    contexts = open_contexts(arguments.contexts, arguments.opencl_cpus)
    print('contexts: %s' % describe(contexts))
    name, train, test = handwritten_digits(arguments.data)
    print('data: %s' % name)
    names = [context.name for context in contexts]
    make_model = cnn
    if not theano.config.cxx:
        print('no C++ compiler, which convolutions need (Debian: apt-get install g++ python3-dev): '
              'training dense layers instead')
        make_model = flat_mlp
    one = Run(names[:1], arguments.executor, make_model())
    runs = [one] if len(names) == 1 else [one, Run(names, arguments.executor, make_model())]
    rng = np.random.RandomState(0)
    for number in range(1, arguments.epochs + 1):
        order = rng.permutation(len(train[0]))
        for run in runs:
            run.epoch(number, train, order, arguments.batch_size)
    rows = [dict(run.results(test, arguments.batch_size), difference=None if run is one else
                 largest_difference(run, one)) for run in runs]
    print_table(rows)
    if arguments.json and mgpu.rank() == 0:
        with open(arguments.json, 'w') as f:
            json.dump(dict(data=name, devices=[c.device for c in contexts], rows=rows), f, indent=1)
    return 0


if __name__ == '__main__':
    sys.exit(main())
