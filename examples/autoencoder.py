"""Train a convolutional autoencoder on handwritten digits with Theano, over all contexts, and watch it in TensorBoard.

The encoder has convolutions of 64, 128, 256 and 512 filters. Each convolution halves the image. The decoder mirrors the
encoder. The loss is the sum of squared errors, and the update is Adam. The dropout rate is an input of the Theano
function, and is 0 for the test loss. autoencoder_keras.py trains the same model in Keras.

The digits come with scikit-learn, and are scaled to 32 x 32 pixels. Nothing is downloaded.

Run:

    python examples/autoencoder.py
    python examples/autoencoder.py --contexts 'dev0->cuda0;dev1->cuda1' --epochs 50
    python examples/autoencoder.py --filters 8 16 --epochs 5        # a smaller one
    tensorboard --logdir logs
"""
import argparse
import os
import time

if 'floatX' not in os.environ.get('THEANO_FLAGS', ''):
    os.environ['THEANO_FLAGS'] = 'floatX=float32,' + os.environ.get('THEANO_FLAGS', '')

import theano_mgpu as mgpu  # before theano

import numpy as np
import theano
import theano.tensor as T
from sklearn.datasets import load_digits
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.nnet.abstract_conv import conv2d_grad_wrt_inputs

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
    """Return training and test images of shape (images, 1, 32, 32), with values from 0 to 1."""
    images = load_digits().images[:, None] / 16
    images = images.repeat(SIZE // 8, axis=2).repeat(SIZE // 8, axis=3).astype(theano.config.floatX)
    np.random.RandomState(0).shuffle(images)
    return images[:1500], images[1500:]


class Autoencoder:
    """The model: `x` are images, `rate` is the dropout rate, `output` the reconstructed images."""

    def __init__(self, filters):
        self.rng, self.params = np.random.RandomState(0), []
        self.x, self.rate = T.tensor4('x'), T.scalar('rate')
        channels = [1] + filters
        hidden, self.layers = self.x, []
        for n_in, n_out in zip(channels, filters):
            w, b = self.weights((n_out, n_in, 3, 3), n_out)
            hidden = T.nnet.relu(T.nnet.conv2d(hidden, w, border_mode='half', subsample=(2, 2)) + b)
            self.layers.append(('encoder%d' % n_out, [hidden]))
        keep = MRG_RandomStreams(1).uniform(hidden.shape) >= self.rate
        hidden = T.switch(keep, hidden / (1 - self.rate), 0)
        self.layers.append(('dropout', [hidden]))
        size = SIZE >> len(filters)
        for n_in, n_out in zip(filters[::-1], channels[-2::-1]):
            size *= 2
            w, b = self.weights((n_in, n_out, 3, 3), n_out)
            hidden = b + conv2d_grad_wrt_inputs(hidden, w, (None, n_out, size, size), border_mode='half',
                                                subsample=(2, 2))
            hidden = T.nnet.relu(hidden) if n_out > 1 else T.nnet.sigmoid(hidden)
            self.layers.append(('decoder%d' % n_out, [hidden]))
        self.output = hidden
        self.loss = T.sqr(self.output - self.x).sum()

    def weights(self, shape, n_out):
        """Return a kernel with Glorot's uniform initial values, and a bias for (images, channels, rows, columns)."""
        limit = np.sqrt(6 / ((shape[0] + shape[1]) * shape[2] * shape[3]))
        number = len(self.params) // 2
        w = theano.shared(self.rng.uniform(-limit, limit, shape).astype(theano.config.floatX), 'W%d' % number)
        b = theano.shared(np.zeros(n_out, theano.config.floatX), 'b%d' % number)
        self.params += [w, b]
        return w, b.dimshuffle('x', 0, 'x', 'x')


def adam(gradients, params, rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-8):
    """Return the updates of Adam (Kingma and Ba, 2014)."""
    t = theano.shared(np.asarray(0, theano.config.floatX), 'step')
    updates = {t: t + 1}
    for param, gradient in zip(params, gradients):
        m, v = (theano.shared(param.get_value() * 0, '%s of %s' % (name, param)) for name in 'mv')
        updates[m] = beta1 * m + (1 - beta1) * gradient
        updates[v] = beta2 * v + (1 - beta2) * gradient ** 2
        corrected = updates[m] / (1 - beta1 ** (t + 1)), updates[v] / (1 - beta2 ** (t + 1))
        updates[param] = param - rate * corrected[0] / (T.sqrt(corrected[1]) + epsilon)
    return {variable: T.cast(value, variable.dtype) for variable, value in updates.items()}


def main(contexts, epochs, batch, filters, dropout, samples, logs):
    print('contexts: ' + ', '.join('%s on %s' % (each.name, each.device) for each in mgpu.init(contexts)))
    train, test = digits()
    train = train[:samples]
    print('data: %d training and %d test images of %d x %d pixels' % (len(train), len(test), SIZE, SIZE))

    model = Autoencoder(filters)
    print('model: filters %s, %d weights' % (filters, sum(param.get_value().size for param in model.params)))
    step = mgpu.training_function([model.x, model.rate], model.loss, model.params,
                                  lambda gradients: adam(gradients, model.params), name='train')
    reconstruct = mgpu.function([model.x, model.rate], [model.output, model.loss], name='reconstruct')

    rate, n_steps = np.asarray(dropout, theano.config.floatX), 0
    with mgpu.Summary(logs) as summary:
        summary.graph(model.loss, model.layers)
        summary.image('input', np.moveaxis(test[:6], 1, -1), 0)
        for epoch in range(1, epochs + 1):
            began, total = time.time(), 0
            order = np.random.RandomState(epoch).permutation(len(train))
            batches = [(train[order[i:i + batch]], rate) for i in range(0, len(train), batch)]
            for (images, _), loss in zip(batches, step.over(batches, progress='epoch %d' % epoch)):
                n_steps, total = n_steps + 1, total + loss
                summary.scalar('loss/batch', loss / len(images), n_steps)
            output, test_loss = reconstruct(test, 0)
            summary.scalar('loss/training', total / len(train), n_steps)
            summary.scalar('loss/test', test_loss / len(test), n_steps)
            summary.image('output', np.moveaxis(output[:6], 1, -1), n_steps)
            for param in model.params:
                summary.histogram('weights/' + param.name, param.get_value(), n_steps)
            print('epoch %d of %d: %.1f s, sum of squared errors of an image: training %.2f, test %.2f'
                  % (epoch, epochs, time.time() - began, total / len(train), test_loss / len(test)))
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
    parser.add_argument('--logs', default=os.path.join('logs', 'autoencoder'), metavar='FOLDER', help=HELP['logs'])
    arguments = parser.parse_args()
    if not 1 <= len(arguments.filters) <= 5 or not 0 <= arguments.dropout < 1:
        parser.error('--filters takes one to five numbers, since 32 can be halved five times; --dropout a rate from 0 '
                     'to less than 1')
    main(**vars(arguments))
