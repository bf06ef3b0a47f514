"""Train Keras's MNIST network on two devices. The one new line is `multi_gpu_model(model, gpus=2)`.

The network has two convolutions, max-pooling, dropout and two dense layers. It is trained with Adadelta and batches of
128. The data are scikit-learn's 1,797 scanned digits of 8 x 8 pixels. Nothing is downloaded. Each batch is divided
between the devices. The result is the same as on one device, also with dropout and with a smaller last batch.

Run:

    python examples/mnist_cnn.py                # the devices of THEANO_FLAGS or .theanorc, else of this machine
    python examples/mnist_cnn.py --gpus 4
    THEANO_FLAGS='contexts=dev0->cuda0;dev1->cuda1' python examples/mnist_cnn.py
    theano-mgpu launch -n 2 examples/mnist_cnn.py       # in two processes, one device each

It prints Keras's progress of each epoch, then

    Test loss: ...
    Test accuracy: ...
    trained on dev0 (cpu), dev1 (cpu)
"""
import argparse

import theano_mgpu as mgpu  # before keras
from theano_mgpu.keras import multi_gpu_model

import keras
import numpy as np
from keras.layers import Conv2D, Dense, Dropout, Flatten, MaxPooling2D
from keras.models import Sequential
from sklearn.datasets import load_digits

NUM_CLASSES = 10


def load_data():
    """Return images of shape (n, 8, 8, 1), with values from 0 to 1, and one-hot labels: for training and for test."""
    digits = load_digits()
    x, y = digits.images[..., None] / 16, keras.utils.to_categorical(digits.target, NUM_CLASSES)
    return (x[:1500], y[:1500]), (x[1500:], y[1500:])


def build():
    model = Sequential()
    model.add(Conv2D(32, (3, 3), activation='relu', input_shape=(8, 8, 1)))
    model.add(Conv2D(64, (3, 3), activation='relu'))
    model.add(MaxPooling2D((2, 2)))
    model.add(Dropout(0.25))
    model.add(Flatten())
    model.add(Dense(128, activation='relu'))
    model.add(Dropout(0.5))
    model.add(Dense(NUM_CLASSES, activation='softmax'))
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--gpus', type=int, default=2, metavar='N', help='devices to train on (default: %(default)s); '
                        'without a GPU these are contexts on the CPU')
    parser.add_argument('--epochs', type=int, default=12, help='(default: %(default)s)')
    parser.add_argument('--batch-size', type=int, default=128, help='samples of the whole batch (default: %(default)s)')
    arguments = parser.parse_args()
    (x_train, y_train), (x_test, y_test) = load_data()
    print('data: %d training and %d test images' % (len(x_train), len(x_test)))

    np.random.seed(1)  # of the initial weights, the order of the samples and dropout: each run prints the same
    mgpu.init(arguments.gpus)  # not needed on GPUs; on the CPU there would be one context without it
    model = build()
    parallel = multi_gpu_model(model, gpus=arguments.gpus)  # the new line
    parallel.compile(loss='categorical_crossentropy', optimizer=keras.optimizers.Adadelta(), metrics=['accuracy'])
    parallel.fit(x_train, y_train, batch_size=arguments.batch_size, epochs=arguments.epochs, verbose=2,
                 validation_data=(x_test, y_test))
    loss, accuracy = parallel.evaluate(x_test, y_test, verbose=0)
    print('Test loss: %.4f' % loss)
    print('Test accuracy: %.4f' % accuracy)
    print('trained on ' + ', '.join('%s (%s)' % (context.name, context.device) for context in parallel.contexts))


if __name__ == '__main__':
    main()
