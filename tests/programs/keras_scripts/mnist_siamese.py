"""Trains a Siamese network on pairs of made-up digits: one base network maps both images, and the distance between the
results tells whether they show the same digit (contrastive loss, Hadsell et al. 2006)."""
import sys

import numpy as np
from keras import backend as K
from keras.layers import Dense, Dropout, Flatten, Input, Lambda
from keras.models import Model
from keras.optimizers import RMSprop

np.random.seed(1337)

dropout = float(sys.argv[1]) if len(sys.argv) > 1 else 0.1
num_classes = 10
epochs = 2
input_shape = (12, 12)
prototypes = np.random.rand(num_classes, *input_shape)


def euclidean_distance(vectors):
    x, y = vectors
    return K.sqrt(K.maximum(K.sum(K.square(x - y), axis=1, keepdims=True), K.epsilon()))


def contrastive_loss(y_true, y_pred):
    margin = 1
    return K.mean(y_true * K.square(y_pred) + (1 - y_true) * K.square(K.maximum(margin - y_pred, 0)))


def accuracy(y_true, y_pred):
    """Return the share of right answers; pairs closer than 0.5 are taken for the same digit."""
    return K.mean(K.equal(y_true, K.cast(y_pred < 0.5, y_true.dtype)))


def make_pairs(samples):
    """Return pairs, alternately two images of one digit (1) and images of two different digits (0)."""
    same = np.arange(samples) % 2 == 0
    first = np.random.randint(0, num_classes, samples)
    other = (first + np.random.randint(1, num_classes, samples)) % num_classes
    labels = np.stack([first, np.where(same, first, other)], axis=1)
    images = prototypes[labels] + 0.1 * np.random.randn(samples, 2, *input_shape)
    return images.astype('float32'), same.astype('float32')


def create_base_network():
    inputs = Input(shape=input_shape)
    x = Flatten()(inputs)
    for _ in range(2):
        x = Dense(32, activation='relu')(x)
        if dropout:
            x = Dropout(dropout)(x)
    return Model(inputs, Dense(16, activation='relu')(x))


tr_pairs, tr_y = make_pairs(260)
te_pairs, te_y = make_pairs(70)

base_network = create_base_network()
input_a = Input(shape=input_shape)
input_b = Input(shape=input_shape)
# the same instance twice: both branches share its weights
distance = Lambda(euclidean_distance, output_shape=(1,))([base_network(input_a), base_network(input_b)])
model = Model([input_a, input_b], distance)

model.compile(loss=contrastive_loss, optimizer=RMSprop(), metrics=[accuracy])
model.fit([tr_pairs[:, 0], tr_pairs[:, 1]], tr_y, batch_size=32, epochs=epochs, verbose=2,
          validation_data=([te_pairs[:, 0], te_pairs[:, 1]], te_y))

loss, acc = model.evaluate([te_pairs[:, 0], te_pairs[:, 1]], te_y, verbose=0)
print('Accuracy on test set: %0.2f%%' % (100 * acc))
print('Test loss: %r' % float(loss))
