"""Keras with small data sets and short trainings: `.ci/test-keras-examples` has each example import this first.

`get_file` writes a small file of the format that the example expects, instead of downloading the whole one. `fit`
trains for one epoch of a few batches. A few calls are enough: the next one ends the script. The losses are printed
with twelve digits, without times. Random numbers are the same in each run.
"""
import datetime
import functools
import gzip
import inspect
import io
import json
import os
import pickle
import random
import sys
import tarfile

import theano

# Keras reads the precision from a file when it is imported. Keras before 2.2 looks for the file in the home folder.
home = os.environ['HOME']
os.environ.update(HOME=os.getcwd(), KERAS_HOME=os.path.abspath('.keras'))
os.makedirs('.keras')
with open('.keras/keras.json', 'w') as file:
    json.dump({'floatx': theano.config.floatX}, file)
import keras  # noqa: E402

os.environ['HOME'] = home
import keras.utils  # noqa: E402
import numpy as np  # noqa: E402
from keras.datasets import cifar10, imdb, mnist, reuters  # noqa: E402
from keras.engine.training import Model  # noqa: E402
from keras.utils import data_utils, generic_utils  # noqa: E402

SAMPLES, TEST_SAMPLES = 200, 100  # multiples of the batch sizes that examples build into a model
BATCHES = 7                       # in an epoch
CALLS = {'fit': 3, 'fit_generator': 3, 'train_on_batch': 6, 'evaluate': 6}  # the next call of the script ends it
SAMPLED = 'x', 'y', 'sample_weight', 'validation_data'  # arguments that have samples
EPOCHS, STEPS = ('nb_epoch', 'samples_per_epoch') if keras.__version__ < '2' else ('epochs', 'steps_per_epoch')
draw = np.random.RandomState(0)
active = []  # methods of a model that are running: some call each other
calls = dict.fromkeys(CALLS, 0)


class NoTime(datetime.datetime):
    """A time that does not pass: examples print how long their training takes."""

    @classmethod
    def now(cls, tz=None):
        return cls(2017, 1, 1)


def images(*shape):
    """Return images and labels for training, and others for tests."""
    return [(draw.randint(0, 256, (n, *shape)).astype('uint8'), np.arange(n) % 10) for n in (SAMPLES, TEST_SAMPLES)]


def texts(n):
    """Return texts of several lengths, as lists of the numbers of words."""
    found = np.empty(n, object)
    for i in range(n):
        found[i] = draw.randint(1, 5000, draw.randint(50, 150)).tolist()
    return found


def sets_of_texts(classes):
    """Return texts and labels for training, and others for tests."""
    return [(texts(n), np.arange(n) % classes) for n in (SAMPLES, TEST_SAMPLES)]


def npz(path, data):
    """Write training data and test data, as Keras 2 reads them."""
    (x, y), (x_test, y_test) = data
    np.savez(path, x_train=x, y_train=y, x_test=x_test, y_test=y_test)


def pickled(path, data):
    """Write data as Keras 1 reads them."""
    with (gzip.open if path.endswith('.gz') else open)(path, 'wb') as file:
        pickle.dump(data, file)


def stories(path):
    """Write the two tasks of bAbI that the examples read."""
    people, rooms = ['Mary', 'John', 'Daniel', 'Sandra'], ['bathroom', 'hallway', 'kitchen', 'garden']
    with tarfile.open(path, 'w:gz') as tar:
        for task in ('qa1_single-supporting-fact', 'qa2_two-supporting-facts'):
            for folder in ('en', 'en-10k'):
                for part, n in (('train', SAMPLES), ('test', TEST_SAMPLES)):
                    lines = []
                    for _ in range(n):
                        (one, other), (here, there) = draw.permutation(people)[:2], draw.permutation(rooms)[:2]
                        lines += ['1 %s moved to the %s.' % (one, here), '2 %s went to the %s.' % (other, there),
                                  '3 Where is %s? \t%s\t1' % (one, here)]
                    text = '\n'.join(lines).encode() + b'\n'
                    info = tarfile.TarInfo('tasks_1-20_v1-2/%s/%s_%s.txt' % (folder, task, part))
                    info.size = len(text)
                    tar.addfile(info, io.BytesIO(text))


def sentences(path, pattern='%s'):
    """Write sentences of random words, a line each."""
    words = 'the a will to power and of good evil man truth is not what we call in all that which has been'.split()
    with open(path, 'w') as file:
        for _ in range(SAMPLES):
            file.write(pattern % ((' '.join(draw.choice(words, 5)),) * pattern.count('%s')) + '\n')


def newswires():
    """Return texts and labels, which Keras parts into training data and test data."""
    return texts(SAMPLES), np.arange(SAMPLES) % 46


FILES = {'mnist.npz': lambda path: npz(path, images(28, 28)),
         'mnist.pkl.gz': lambda path: pickled(path, images(28, 28)),
         'imdb.npz': lambda path: npz(path, sets_of_texts(2)),
         'imdb_full.pkl': lambda path: pickled(path, [(x.tolist(), y.tolist()) for x, y in sets_of_texts(2)]),
         'reuters.npz': lambda path: np.savez(path, **dict(zip('xy', newswires()))),
         'reuters.pkl': lambda path: pickled(path, [each.tolist() for each in newswires()]),
         'babi-tasks-v1-2.tar.gz': stories,
         'nietzsche.txt': sentences}


def get_file(name, *_, **__):
    """Return the path of a small file."""
    if name not in FILES:
        raise OSError('the example downloads %s, and small_keras.py has no small file in its place' % name)
    FILES[name](name)
    return os.path.abspath(name)


def cut(data, n):
    """Return the first samples of an array, or of each array in a list, tuple or dict."""
    if isinstance(data, dict):
        return {name: cut(each, n) for name, each in data.items()}
    if isinstance(data, (list, tuple)):
        return type(data)(cut(each, n) for each in data)
    return data[:n] if hasattr(data, 'shape') else data


def numbers(result):
    """Return losses and metrics as text."""
    result = getattr(result, 'history', result)
    pairs = sorted(result.items()) if isinstance(result, dict) else [('', result)]
    return ' '.join('%s %s' % (name, ' '.join('%.12g' % each for each in np.ravel(values))) for name, values in pairs)


def shortened(method):
    """Return a method of a model that trains for a few batches only, and prints its losses."""
    name, signature = method.__name__, inspect.signature(method)

    @functools.wraps(method)
    def run(*args, **options):
        if active:
            return method(*args, **options)
        calls[name] += 1
        if calls[name] > CALLS[name]:
            sys.exit()
        given = signature.bind(*args, **options).arguments
        options = dict(given, **given.pop('kwargs', {}))
        if name in ('fit', 'evaluate'):
            n = BATCHES * (given.get('batch_size') or 32)
            options.update((each, cut(given[each], n)) for each in SAMPLED if each in given)
        if name.startswith('fit'):
            options[EPOCHS] = 1
        if name == 'fit_generator':
            options[STEPS] = min(given.get(STEPS) or BATCHES, BATCHES * (32 if STEPS == 'samples_per_epoch' else 1))
            options.pop('workers', None)  # several draw their random numbers in any order
        active.append(name)
        try:
            result = method(options.pop('self'), **options)
        finally:
            active.pop()
        print('\n%s: %s' % (name, numbers(result)), flush=True)
        return result
    return run


datetime.datetime = NoTime
for each in (data_utils, mnist, imdb, reuters):
    each.get_file = get_file
cifar10.load_data = lambda: tuple((x, y[:, np.newaxis]) for x, y in images(32, 32, 3))  # its files have 50,000 samples
for each in CALLS:
    setattr(Model, each, shortened(getattr(Model, each)))
generic_utils.Progbar.update = lambda *_, **__: None  # it prints times
keras.utils.plot_model = lambda *_, **__: None        # it needs pydot
os.makedirs('fra-eng', exist_ok=True)
sentences('fra-eng/fra.txt', '%s\t%s')
np.random.seed(0)
random.seed(0)
