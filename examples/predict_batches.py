"""Predict a file that may be larger than memory, over several devices, with the outputs in the order of the inputs.

The script trains a small network on scikit-learn's scanned digits and writes it to model.h5, and many noisy copies of
the digits to images.npy. A `Predictor` computes several batches at a time, one on each device. Both files are read and
written batch by batch.

Run:

    python examples/predict_batches.py                                  # files in a temporary folder
    python examples/predict_batches.py --folder . --samples 1000000
    python examples/predict_batches.py --contexts 'dev0->cuda0;dev1->cuda1'
    theano-mgpu launch -n 2 examples/predict_batches.py                 # in two processes

The script prints the samples per second and the accuracy, and compares some of the outputs with Keras's own `predict`.
At the end it prints a command that does the same without a script, and also continues after a kill:

    theano-mgpu predict model.h5 images.npy classes.npy --batch-size 256

With --command, the script runs this command, too, and compares the files.
"""
import argparse
import os
import subprocess
import sys
import tempfile
import time

import theano_mgpu as mgpu  # before keras
from theano_mgpu.keras import Predictor

import numpy as np
from keras.layers import Dense
from keras.models import Sequential
from sklearn.datasets import load_digits

CHUNK = 10000  # samples to write or compare at a time


def train():
    """Return a trained network for digits of 64 pixels, images of shape (1797, 64), and their labels."""
    digits = load_digits()
    x, y = (digits.data / 16).astype('float32'), digits.target
    model = Sequential([Dense(128, activation='relu', input_shape=(64,)), Dense(10, activation='softmax')])
    model.compile('adam', 'sparse_categorical_crossentropy')
    model.fit(x, y, batch_size=32, epochs=5, verbose=0)
    return model, x, y


def chunk_of(x, samples, start):
    """Return a chunk of the images, copies of the digits with noise: the same in each process."""
    rows = np.arange(start, min(start + CHUNK, samples)) % len(x)
    return (x[rows] + 0.1 * np.random.RandomState(start).randn(len(rows), x.shape[1])).astype('float32')


def write_images(path, x, samples):
    """Write the images to an .npy file of shape (samples, 64)."""
    file = np.lib.format.open_memmap(path, 'w+', 'float32', (samples, x.shape[1]))
    for start in range(0, samples, CHUNK):
        file[start:start + CHUNK] = chunk_of(x, samples, start)
    file.flush()


def predict(model, source, target, batch_size):
    """Predict from file to file, and return the seconds."""
    images = np.load(source, mmap_mode='r')
    outputs = np.lib.format.open_memmap(target, 'w+', 'float32', (len(images),) + model.output_shape[1:])
    batches = (np.array(images[start:start + batch_size]) for start in range(0, len(images), batch_size))
    with Predictor(model) as predictor:
        begin, row = time.perf_counter(), 0
        for predicted in predictor.map(batches):  # in the order of the batches, not of the devices
            outputs[row:row + len(predicted)] = predicted
            row += len(predicted)
    outputs.flush()
    return time.perf_counter() - begin


def main(folder, samples, batch_size, contexts, command):
    places = mgpu.init(contexts)
    model, x, y = train()
    paths = [os.path.join(folder, name) for name in ('model.h5', 'images.npy', 'classes.npy', 'outputs.npy')]
    model_path, source, target, own = paths
    last = (samples - 1) // CHUNK * CHUNK
    expected = model.predict(chunk_of(x, samples, last))  # by each process: "run" divides it among them
    if mgpu.rank() == 0:  # with several processes, rank 0 has the files
        model.save(model_path, include_optimizer=False)
        write_images(source, x, samples)
    else:
        with Predictor(model) as predictor:
            return len(list(predictor.map(())))  # it computes the batches that rank 0 sends, and yields nothing
    seconds = predict(model, source, own, batch_size)

    outputs = np.load(own, mmap_mode='r')
    correct = sum((outputs[start:start + CHUNK].argmax(1) == y[np.arange(start, min(start + CHUNK, samples)) % len(y)])
                  .sum() for start in range(0, samples, CHUNK))
    difference = abs(outputs[last:] - expected).max()
    print('%d samples over %s: %.0f samples/s, %.1f %% correct, at most %.1e from Keras' % (
        samples, ', '.join('%s (%s)' % (place.name, place.device) for place in places), samples / seconds,
        100 * correct / samples, difference))
    arguments = ['predict', model_path, source, target, '--batch-size', str(batch_size)]
    print('the same without a script: theano-mgpu ' + ' '.join(arguments))
    if command:
        flags = ','.join([os.environ.get('THEANO_FLAGS', '')] + ['contexts=%s' % contexts] * bool(contexts)).strip(',')
        subprocess.run([sys.executable, '-m', 'theano_mgpu'] + arguments, check=True,
                       env=dict(os.environ, THEANO_FLAGS=flags))
        difference = max(difference, abs(np.load(target, mmap_mode='r')[last:] - outputs[last:]).max())
        print('its file: at most %.1e from the script\'s' % difference)
    return 0 if difference < 1e-5 else 1


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--folder', help='where model.h5, images.npy and the outputs are written and stay (default: a '
                        'temporary folder, removed at the end)')
    parser.add_argument('--samples', type=int, default=100000, help='images to predict (default: %(default)s)')
    parser.add_argument('--batch-size', type=int, default=256, help='images that a device works on at a time '
                        '(default: %(default)s)')
    parser.add_argument('--contexts', metavar='MAP', help="such as 'dev0->cuda0;dev1->cuda1' (default: from "
                        'THEANO_FLAGS or .theanorc, else all GPUs)')
    parser.add_argument('--command', action='store_true', help='also run the command theano-mgpu predict')
    options = vars(parser.parse_args())
    with tempfile.TemporaryDirectory() as temporary:
        options['folder'] = options['folder'] or temporary
        sys.exit(main(**options))
