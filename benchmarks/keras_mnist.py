#!/usr/bin/env python
"""Keras's small CNN on handwritten digits, over two contexts: the published script with one line changed.

Conv2D 32 3x3 relu, MaxPooling, Flatten, Dense softmax; Adam, sparse categorical cross-entropy, batch 128. Examples:

  python benchmarks/keras_mnist.py
  python benchmarks/keras_mnist.py --gpus 4 --epochs 12
  THEANO_FLAGS='contexts=dev0->cuda0;dev1->cuda1' python benchmarks/keras_mnist.py --data mnist.npz
"""
import argparse
import os

if 'floatX' not in os.environ.get('THEANO_FLAGS', ''):
    os.environ['THEANO_FLAGS'] = 'floatX=float32,' + os.environ.get('THEANO_FLAGS', '')

from theano_mgpu.keras import multi_gpu_model

import keras
import numpy as np
from keras.layers import Conv2D, Dense, Flatten, MaxPooling2D
from keras.models import Sequential
from models import add_keras_arguments, handwritten_digits, open_contexts


def build():
    return Sequential([Conv2D(32, (3, 3), activation='relu', input_shape=(28, 28, 1)), MaxPooling2D((2, 2)), Flatten(),
                       Dense(10, activation='softmax')])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_keras_arguments(parser, epochs=6)
    parser.add_argument('--data', metavar='FILE', help="an .npz file like Keras's mnist.npz; by default "
                        "~/.keras/datasets/mnist.npz, else scikit-learn's digits")
    arguments = parser.parse_args()
    open_contexts(str(arguments.gpus))
    name, (x_train, y_train), (x_test, y_test) = handwritten_digits(arguments.data)
    print('data: %s' % name)
    x_train, x_test = [np.moveaxis(x, 1, -1) for x in (x_train, x_test)]

    model = build()
    parallel = multi_gpu_model(model, gpus=arguments.gpus)  # the one line
    parallel.compile(loss='sparse_categorical_crossentropy', optimizer=keras.optimizers.Adam(), metrics=['accuracy'])
    parallel.summary()
    parallel.fit(x_train, y_train, batch_size=arguments.batch_size, epochs=arguments.epochs,
                 validation_data=(x_test, y_test))
    loss, accuracy = parallel.evaluate(x_test, y_test, verbose=0)
    print('test loss %.4f, test accuracy %.4f, on %s'
          % (loss, accuracy, ', '.join('%s (%s)' % (c.name, c.device) for c in parallel.contexts)))


if __name__ == '__main__':
    main()
