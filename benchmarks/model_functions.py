"""The time of the functions of Keras models in two checkouts, in turns: the first step, a call, and a fit.

    python benchmarks/model_functions.py BEFORE/.venv/bin/python AFTER/.venv/bin/python
    python benchmarks/model_functions.py --contexts 'a->cuda0;b->cuda1' PYTHON PYTHON

Each checkout has its own Python, with which a process is started for each round. The table has the medians, and the
ratios after / before within the rounds.
"""
import functools
import gc
import json
import statistics
import subprocess
import sys
import time

ROUNDS, CALLS = 9, 60


def measured(contexts):
    """Return the seconds of each thing, as this process measures them."""
    import theano_mgpu as mgpu
    from theano_mgpu.keras import enable

    import keras
    import numpy as np
    mgpu.init(contexts)
    enable(always=True)
    rng, found = np.random.RandomState(0), {}
    for n_layers in (3, 30):
        layers = [keras.layers.Dense(32, activation='tanh', input_shape=(32,)) for _ in range(n_layers - 1)]
        model = keras.Sequential([*layers, keras.layers.Dense(10, activation='softmax')])
        model.compile('adam', 'categorical_crossentropy', metrics=['accuracy'])
        x, y = rng.rand(64, 32), np.eye(10)[rng.randint(0, 10, 64)]
        gc.collect()  # a whole collection would fall into this step on one side, and not on the other
        began = time.perf_counter()
        model.train_on_batch(x, y)
        found['first step, %d layers' % n_layers] = time.perf_counter() - began
        for _ in range(5):
            model.train_on_batch(x, y)
        times = []
        for _ in range(CALLS):
            began = time.perf_counter()
            model.train_function([x, y, np.ones(64)])
            times.append(time.perf_counter() - began)
        found['call, %d layers' % n_layers] = statistics.median(times)
    L = keras.layers
    model = keras.Sequential([L.Conv2D(8, 3, activation='relu', data_format='channels_first', input_shape=(1, 28, 28)),
                              L.MaxPooling2D(data_format='channels_first'), L.Flatten(), L.Dropout(.5),
                              L.Dense(10, activation='softmax')])
    model.compile('adadelta', 'categorical_crossentropy', metrics=['accuracy'])
    x, y = rng.rand(1280, 1, 28, 28), np.eye(10)[rng.randint(0, 10, 1280)]
    model.train_on_batch(x[:128], y[:128])
    began = time.perf_counter()
    model.fit(x, y, batch_size=128, epochs=2, verbose=0)
    found['fit, MNIST CNN'] = time.perf_counter() - began
    return found


def main():
    """Measure both checkouts in turns, and print the table."""
    import turns  # imports NumPy, which `measured` imports after theano_mgpu
    parser = turns.make_parser(__doc__, ROUNDS)
    parser.add_argument('before', help='a Python with the one checkout')
    parser.add_argument('after', help='a Python with the other checkout')
    parser.add_argument('--contexts', default='a->cpu;b->cpu')
    args = parser.parse_args()

    def measure(python):
        done = subprocess.run([python, __file__, '--measure', args.contexts], stdout=subprocess.PIPE, check=True,
                              universal_newlines=True)
        return json.loads(done.stdout.splitlines()[-1])
    sides = {side: functools.partial(measure, getattr(args, side)) for side in ('before', 'after')}
    turns.take_turns(sides, 1)  # compiles
    found = turns.take_turns(sides, args.rounds, 'rounds')
    print('%-24s %10s %10s   %s' % ('', 'before ms', 'after ms', 'after / before (lowest to highest)'))
    for name in found['before'][0]:
        before, after = ([1e3 * each[name] for each in found[side]] for side in sides)
        print('%-24s %10.2f %10.2f   %s' % (name, statistics.median(before), statistics.median(after),
                                            turns.ratio(after, before)))


if __name__ == '__main__':
    if sys.argv[1] == '--measure':
        print(json.dumps(measured(sys.argv[2])))
    else:
        main()
