"""Train a convolutional autoencoder on handwritten digits with Keras, over all contexts, and watch it in TensorBoard.

The encoder has convolutions of 64, 128, 256 and 512 filters. Each convolution halves the image. The decoder mirrors the
encoder. The loss is the sum of squared errors of an image, and the optimizer is Adam. autoencoder.py trains the same
model without Keras.

`keras.callbacks.TensorBoard` writes losses, histograms of weights, and the graph of the layers. A callback of this
script adds six reconstructed images after each epoch.

The digits come with scikit-learn, and are scaled to 32 x 32 pixels. Nothing is downloaded.

Run, with Theano as the backend of Keras:

    KERAS_BACKEND=theano python examples/autoencoder_keras.py
    KERAS_BACKEND=theano python examples/autoencoder_keras.py --contexts 'dev0->cuda0;dev1->cuda1' --epochs 50
    KERAS_BACKEND=theano python examples/autoencoder_keras.py --filters 8 16 --epochs 5        # a smaller one
    tensorboard --logdir logs
"""
import argparse
import os

import theano_mgpu as mgpu  # before keras
from theano_mgpu.keras import multi_gpu_model

import numpy as np
from keras import backend as K
from keras.callbacks import Callback, TensorBoard
from keras.layers import Conv2D, Conv2DTranspose, Dropout, Input
from keras.models import Model
from sklearn.datasets import load_digits

SIZE = 32  # rows and columns of an image
HELP = {
    'contexts': 'devices to use, as "NAME->DEVICE;NAME->DEVICE". Default: the devices that `theano-mgpu devices` lists',
    'epochs': 'passes over the training images (default: %(default)s)',
    'batch': 'images in a batch, over all contexts together (default: %(default)s)',
    'filters': 'filters of each convolution of the encoder, one to five numbers (default: 64 128 256 512)',
    'dropout': 'share of the encoder output that is set to 0 in training (default: %(default)s)',
    'samples': 'training images to use (default: all)',
    'logs': 'the folder for TensorBoard (default: %(default)s)',
}


def digits():
    """Return training and test images of shape (images, 32, 32, 1), with values from 0 to 1."""
    images = load_digits().images[..., None] / 16
    images = images.repeat(SIZE // 8, axis=1).repeat(SIZE // 8, axis=2)
    np.random.RandomState(0).shuffle(images)
    return images[:1500], images[1500:]


def autoencoder(filters, dropout):
    """Return the model."""
    image = hidden = Input((SIZE, SIZE, 1))
    for n in filters:
        hidden = Conv2D(n, 3, strides=2, padding='same', activation='relu')(hidden)
    hidden = Dropout(dropout)(hidden)
    for n in filters[-2::-1]:
        hidden = Conv2DTranspose(n, 3, strides=2, padding='same', activation='relu')(hidden)
    output = Conv2DTranspose(1, 3, strides=2, padding='same', activation='sigmoid')(hidden)
    return Model(image, output, name='autoencoder')


def squared_errors(targets, outputs):
    return K.sum(K.square(outputs - targets), axis=(1, 2, 3))


class Pictures(Callback):
    """A callback that writes images, and their reconstructions after each epoch."""

    def __init__(self, summary, images):
        super().__init__()
        self.summary, self.images = summary, images
        summary.image('input', images, 0)

    def on_epoch_end(self, epoch, logs=None):
        self.summary.image('output', self.model.predict(self.images), epoch)


def main(contexts, epochs, batch, filters, dropout, samples, logs):
    print('contexts: ' + ', '.join('%s on %s' % (each.name, each.device) for each in mgpu.init(contexts)))
    train, test = digits()
    train = train[:samples]
    print('data: %d training and %d test images of %d x %d pixels' % (len(train), len(test), SIZE, SIZE))

    model = multi_gpu_model(autoencoder(filters, dropout))
    model.compile('adam', squared_errors)
    print('model: filters %s, %d weights' % (filters, model.count_params()))
    with mgpu.Summary(logs) as summary:
        history = model.fit(train, train, batch_size=batch, epochs=epochs, validation_data=(test, test), verbose=2,
                            callbacks=[TensorBoard(logs, histogram_freq=1), Pictures(summary, test[:6])]).history
    print('sum of squared errors of an image: training %.2f, test %.2f'
          % (history['loss'][-1], history['val_loss'][-1]))
    print('the mean image has %.2f' % (np.square(test - train.mean(axis=0)).sum() / len(test)))
    print('now run: tensorboard --logdir %s' % logs)


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--contexts', metavar='MAP', help=HELP['contexts'])
    parser.add_argument('--epochs', type=int, default=10, help=HELP['epochs'])
    parser.add_argument('--batch', type=int, default=100, help=HELP['batch'])
    parser.add_argument('--filters', type=int, nargs='+', default=[64, 128, 256, 512], metavar='N',
                        help=HELP['filters'])
    parser.add_argument('--dropout', type=float, default=0.2, metavar='RATE', help=HELP['dropout'])
    parser.add_argument('--samples', type=int, metavar='N', help=HELP['samples'])
    parser.add_argument('--logs', default=os.path.join('logs', 'autoencoder_keras'), metavar='FOLDER',
                        help=HELP['logs'])
    arguments = parser.parse_args()
    if not 1 <= len(arguments.filters) <= 5 or not 0 <= arguments.dropout < 1:
        parser.error('--filters takes one to five numbers, since 32 can be halved five times; --dropout a rate from 0 '
                     'to less than 1')
    main(**vars(arguments))
