"""The time of the functions of Keras models in two checkouts, in turns: the first step, a call, and a fit.

    python benchmarks/model_functions.py BEFORE/.venv/bin/python AFTER/.venv/bin/python
    python benchmarks/model_functions.py --contexts 'a->cuda0;b->cuda1' PYTHON PYTHON

Each checkout has its own Python, with which a process is started for each round. The table has the medians, and the
median of the ratios after / before of the rounds, with the quartiles.
"""
import argparse
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('before'), parser.add_argument('after')
    parser.add_argument('--contexts', default='a->cpu;b->cpu')
    parser.add_argument('--rounds', type=int, default=ROUNDS)
    args = parser.parse_args()
    rounds = []
    for number in range(args.rounds + 1):  # the first one compiles
        order = (args.before, args.after) if number % 2 else (args.after, args.before)
        found = {python: json.loads(subprocess.run(
            [python, __file__, '--measure', args.contexts], stdout=subprocess.PIPE, check=True,
            universal_newlines=True).stdout.splitlines()[-1]) for python in order}
        rounds.append((found[args.before], found[args.after]))
    print('%-24s %10s %10s   %s' % ('', 'before ms', 'after ms', 'after / before (quartiles)'))
    for name in rounds[0][0]:
        before, after = ([each[side][name] * 1e3 for each in rounds[1:]] for side in (0, 1))
        ratios = statistics.quantiles([b / a for a, b in zip(before, after)])
        print('%-24s %10.2f %10.2f   %.3f (%.3f to %.3f)' % (
            name, statistics.median(before), statistics.median(after), ratios[1], ratios[0], ratios[2]))


if __name__ == '__main__':
    if sys.argv[1] == '--measure':
        print(json.dumps(measured(sys.argv[2])))
    else:
        main()
