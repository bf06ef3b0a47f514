"""Trains a small convolutional network on made-up images of three shapes, with augmentation in real time: each batch is
turned, shifted and flipped at random by an ImageDataGenerator."""
import sys

import keras
import numpy as np
from keras.layers import Conv2D, Dense, Dropout, Flatten, MaxPooling2D
from keras.models import Sequential
from keras.preprocessing.image import ImageDataGenerator

np.random.seed(1337)

dropout = float(sys.argv[1]) if len(sys.argv) > 1 else 0
batch_size = 32
num_classes = 3
epochs = 2

rows, cols = np.mgrid[-5.5:6, -5.5:6]
radius = np.hypot(rows, cols)
# a disc, a ring and a cross
shapes = np.stack([radius < 3.5, (radius > 2.5) & (radius < 4.5), np.minimum(abs(rows), abs(cols)) < 1])


def make_images(samples):
    labels = np.random.randint(0, num_classes, samples)
    images = 0.8 * shapes[labels] + 0.1 * np.random.randn(samples, 12, 12)
    return images[..., np.newaxis].astype('float32'), keras.utils.to_categorical(labels, num_classes)


x_train, y_train = make_images(210)
x_test, y_test = make_images(75)
print('x_train shape:', x_train.shape)

model = Sequential()
model.add(Conv2D(8, (3, 3), padding='same', activation='relu', input_shape=x_train.shape[1:]))
model.add(MaxPooling2D(pool_size=(2, 2)))
model.add(Conv2D(12, (3, 3), activation='relu'))
model.add(MaxPooling2D(pool_size=(2, 2)))
if dropout:
    model.add(Dropout(dropout))
model.add(Flatten())
model.add(Dense(24, activation='relu'))
if dropout:
    model.add(Dropout(dropout))
model.add(Dense(num_classes, activation='softmax'))

model.compile(loss='categorical_crossentropy',
              optimizer=keras.optimizers.SGD(lr=0.05, momentum=0.9, nesterov=True),
              metrics=['accuracy'])

datagen = ImageDataGenerator(rotation_range=15, width_shift_range=0.1, height_shift_range=0.1, horizontal_flip=True)
# with a seed the images do not depend on other draws from NumPy's generator
batches = datagen.flow(x_train, y_train, batch_size=batch_size, seed=1337)
# it shuffles the images; the order of the batches, which Python's generator would shuffle, stays
model.fit_generator(batches,
                    steps_per_epoch=len(batches),
                    epochs=epochs,
                    verbose=2,
                    shuffle=False,
                    validation_data=(x_test, y_test))

score = model.evaluate(x_test, y_test, batch_size=batch_size, verbose=0)
print('Test accuracy:', score[1])
print('Test loss: %r' % float(score[0]))
