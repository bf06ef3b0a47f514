"""Trains a small fully connected network with two hidden layers on made-up digits."""
import sys

import keras
import numpy as np
from keras.layers import Dense, Dropout
from keras.models import Sequential
from keras.optimizers import RMSprop

np.random.seed(1337)

dropout = float(sys.argv[1]) if len(sys.argv) > 1 else 0.2
batch_size = 32
num_classes = 10
epochs = 2

# The digits: ten fixed images, one a class, under noise.
prototypes = np.random.rand(num_classes, 12, 12)


def make_digits(samples):
    labels = np.random.randint(0, num_classes, samples)
    return prototypes[labels] + 0.2 * np.random.randn(samples, 12, 12), labels


x_train, y_train = make_digits(250)
x_test, y_test = make_digits(75)
x_train = x_train.reshape(-1, 144).astype('float32')
x_test = x_test.reshape(-1, 144).astype('float32')
print(x_train.shape[0], 'train samples')
print(x_test.shape[0], 'test samples')

# class numbers to one-hot rows
y_train = keras.utils.to_categorical(y_train, num_classes)
y_test = keras.utils.to_categorical(y_test, num_classes)

model = Sequential()
model.add(Dense(48, activation='relu', input_shape=(144,)))
if dropout:
    model.add(Dropout(dropout))
model.add(Dense(32, activation='relu'))
if dropout:
    model.add(Dropout(dropout))
model.add(Dense(num_classes, activation='softmax'))
model.summary()

model.compile(loss='categorical_crossentropy', optimizer=RMSprop(), metrics=['accuracy'])
model.fit(x_train, y_train, batch_size=batch_size, epochs=epochs, verbose=2, validation_data=(x_test, y_test))

score = model.evaluate(x_test, y_test, batch_size=batch_size, verbose=0)
print('Test accuracy:', score[1])
print('Test loss: %r' % float(score[0]))
