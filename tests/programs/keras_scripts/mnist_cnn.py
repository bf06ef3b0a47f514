"""Trains a small convolutional network on made-up digits."""
import sys

import keras
import numpy as np
from keras.layers import Conv2D, Dense, Dropout, Flatten, MaxPooling2D
from keras.models import Sequential

np.random.seed(1337)

dropout = float(sys.argv[1]) if len(sys.argv) > 1 else 0.25
batch_size = 32
num_classes = 10
epochs = 2
img_rows, img_cols = 12, 12
input_shape = (img_rows, img_cols, 1)

# The digits: ten fixed images, one a class, under noise.
prototypes = np.random.rand(num_classes, *input_shape)


def make_digits(samples):
    labels = np.random.randint(0, num_classes, samples)
    images = prototypes[labels] + 0.2 * np.random.randn(samples, *input_shape)
    return images.astype('float32'), keras.utils.to_categorical(labels, num_classes)


x_train, y_train = make_digits(230)
x_test, y_test = make_digits(70)
print('x_train shape:', x_train.shape)
print(x_train.shape[0], 'train samples')
print(x_test.shape[0], 'test samples')

model = Sequential()
model.add(Conv2D(8, kernel_size=(3, 3), activation='relu', input_shape=input_shape))
model.add(Conv2D(12, (3, 3), activation='relu'))
model.add(MaxPooling2D(pool_size=(2, 2)))
if dropout:
    model.add(Dropout(dropout))
model.add(Flatten())
model.add(Dense(32, activation='relu'))
if dropout:
    model.add(Dropout(dropout))
model.add(Dense(num_classes, activation='softmax'))

model.compile(loss=keras.losses.categorical_crossentropy,
              optimizer=keras.optimizers.Adadelta(),
              metrics=['accuracy'])
model.fit(x_train, y_train,
          batch_size=batch_size,
          epochs=epochs,
          verbose=2,
          validation_data=(x_test, y_test))

score = model.evaluate(x_test, y_test, verbose=0)
print('Test accuracy:', score[1])
print('Test loss: %r' % float(score[0]))
