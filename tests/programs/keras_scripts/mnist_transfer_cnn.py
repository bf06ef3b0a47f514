"""Transfer learning: trains a small convolutional network on the digits 0 to 4, then freezes its feature layers and
trains the classification layers on the digits 5 to 9. The digits are made up."""
import sys

import keras
import numpy as np
from keras.layers import Activation, Conv2D, Dense, Dropout, Flatten, MaxPooling2D
from keras.models import Sequential

np.random.seed(1337)

dropout = float(sys.argv[1]) if len(sys.argv) > 1 else 0.25
batch_size = 32
num_classes = 5
epochs = 2
input_shape = (12, 12, 1)
prototypes = np.random.rand(2 * num_classes, *input_shape)


def make_digits(samples):
    labels = np.random.randint(0, 2 * num_classes, samples)
    images = prototypes[labels] + 0.2 * np.random.randn(samples, *input_shape)
    return images.astype('float32'), labels


def train_model(model, train, test):
    x_train, x_test = train[0], test[0]
    y_train = keras.utils.to_categorical(train[1], num_classes)
    y_test = keras.utils.to_categorical(test[1], num_classes)
    print(len(x_train), 'train samples,', len(x_test), 'test samples')
    model.compile(loss='categorical_crossentropy', optimizer='adadelta', metrics=['accuracy'])
    model.fit(x_train, y_train, batch_size=batch_size, epochs=epochs, verbose=2, validation_data=(x_test, y_test))
    score = model.evaluate(x_test, y_test, verbose=0)
    print('Test accuracy:', score[1])
    return score[0]


x_train, y_train = make_digits(300)
x_test, y_test = make_digits(100)
low, high = y_train < 5, y_train >= 5
low_test, high_test = y_test < 5, y_test >= 5

feature_layers = [
    Conv2D(8, 3, padding='valid', input_shape=input_shape),
    Activation('relu'),
    Conv2D(8, 3),
    Activation('relu'),
    MaxPooling2D(pool_size=2),
]
classification_layers = [Flatten(), Dense(24), Activation('relu'), Dense(num_classes), Activation('softmax')]
if dropout:
    feature_layers.append(Dropout(dropout))
    classification_layers.insert(3, Dropout(dropout))
model = Sequential(feature_layers + classification_layers)

train_model(model, (x_train[low], y_train[low]), (x_test[low_test], y_test[low_test]))

# freeze the features; compiling the model again makes it known
for layer in feature_layers:
    layer.trainable = False
loss = train_model(model, (x_train[high], y_train[high] - 5), (x_test[high_test], y_test[high_test] - 5))
print('Test loss: %r' % float(loss))
