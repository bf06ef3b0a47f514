#!/usr/bin/env python
"""A convolutional autoencoder in Keras, over two contexts; writes a picture of digits beside their reconstructions.

Encoder: Conv2D with stride 2 and 64, 128, 256, 512 filters; decoder: Conv2DTranspose, mirrored; mean squared error,
Adam. The digits are padded to 32x32, so that they can be halved four times. Examples:

  python benchmarks/keras_autoencoder.py
  python benchmarks/keras_autoencoder.py --filters 8 16 32 64 --epochs 5      # a smaller one
  THEANO_FLAGS='contexts=dev0->cuda0;dev1->cuda1' python benchmarks/keras_autoencoder.py --output digits.png
"""
import argparse
import os

os.environ['THEANO_FLAGS'] = 'floatX=float32,' + os.environ.get('THEANO_FLAGS', '')

import theano_mgpu as mgpu
from theano_mgpu.keras import multi_gpu_model

import keras
import matplotlib
import numpy as np
from keras.layers import Conv2D, Conv2DTranspose, Input
from keras.models import Model
from models import add_keras_arguments, handwritten_digits, open_contexts

matplotlib.use('Agg')
import matplotlib.pyplot as plt


def build(filters):
    """Halve the image once a number of filters, then double it as often."""
    image = hidden = Input((32, 32, 1))
    for n in filters:
        hidden = Conv2D(n, 3, strides=2, padding='same', activation='relu')(hidden)
    for n in list(filters[-2::-1]) + [1]:
        last = n == 1
        hidden = Conv2DTranspose(n, 3, strides=2, padding='same', activation='sigmoid' if last else 'relu')(hidden)
    return Model(image, hidden, name='autoencoder')


def picture(path, images, reconstructions, title):
    """Return a picture: images in the upper row, the reconstruction of each below."""
    figure, axes = plt.subplots(2, len(images), figsize=(len(images), 2.6), squeeze=False)
    for row, name, values in zip(axes, ('input', 'output'), (images, reconstructions)):
        for axis, value in zip(row, values):
            axis.imshow(value[..., 0], cmap='gray', vmin=0, vmax=1)
            axis.set_xticks([])
            axis.set_yticks([])
        row[0].set_ylabel(name)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_keras_arguments(parser, epochs=10)
    parser.add_argument('--filters', type=int, nargs='+', default=[64, 128, 256, 512], metavar='N',
                        help='of each layer of the encoder, one to five of them (default %(default)s)')
    parser.add_argument('--samples', type=int, help='number of digits to train on (default: all)')
    parser.add_argument('--output', metavar='FILE', default='autoencoder.png', help='the picture (default %(default)s)')
    arguments = parser.parse_args()
    if not 1 <= len(arguments.filters) <= 5:
        parser.error('--filters: 32x32 images can be halved one to five times')
    open_contexts(arguments.gpus)
    name, (x_train, _), (x_test, _) = handwritten_digits()
    print('data: %s' % name)
    x_train, x_test = [np.pad(np.moveaxis(x, 1, -1), ((0, 0), (2, 2), (2, 2), (0, 0)), 'constant')
                       for x in (x_train[:arguments.samples], x_test)]

    model = build(arguments.filters)
    parallel = multi_gpu_model(model, gpus=arguments.gpus)  # the one line
    parallel.compile(loss='mean_squared_error', optimizer=keras.optimizers.Adam())
    parallel.fit(x_train, x_train, batch_size=arguments.batch_size, epochs=arguments.epochs,
                 validation_data=(x_test, x_test))
    error = parallel.evaluate(x_test, x_test, verbose=0)
    reconstructions = parallel.predict(x_test[:10])
    if mgpu.rank() == 0:
        picture(arguments.output, x_test[:10], reconstructions,
                'autoencoder on %d contexts, test error %.4f' % (len(parallel.contexts), error))
    print('mean squared error on the test images %.4f (of their mean image: %.4f); picture: %s'
          % (error, np.mean((x_test - x_train.mean(axis=0)) ** 2), arguments.output))


if __name__ == '__main__':
    main()
