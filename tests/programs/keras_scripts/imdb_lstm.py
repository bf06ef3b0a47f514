"""Trains an LSTM to tell good reviews from bad ones, by the words that occur in them. The reviews are made up."""
import sys

import numpy as np
from keras.layers import LSTM, Dense, Embedding, SpatialDropout1D
from keras.models import Sequential
from keras.optimizers import Adam
from keras.preprocessing import sequence

np.random.seed(1337)

dropout = float(sys.argv[1]) if len(sys.argv) > 1 else 0.2
max_features = 40  # words in the vocabulary; 0 stands for padding
maxlen = 8
batch_size = 32
epochs = 2


def make_reviews(samples):
    """Make reviews of words from 10 on, which mean nothing, and one to three of praise (1 to 4) or blame (5 to 8)."""
    reviews, labels = [], np.random.randint(0, 2, samples)
    for label in labels:
        words = np.random.randint(10, max_features, np.random.randint(2, 8))
        verdict = np.random.randint(1, 5, np.random.randint(1, 4)) + (0 if label else 4)
        reviews.append(np.random.permutation(np.concatenate([words, verdict])).tolist())
    return reviews, labels


x_train, y_train = make_reviews(270)
x_test, y_test = make_reviews(85)
print(len(x_train), 'train sequences')
print(len(x_test), 'test sequences')

print('Pad sequences (samples x time)')
x_train = sequence.pad_sequences(x_train, maxlen=maxlen)
x_test = sequence.pad_sequences(x_test, maxlen=maxlen)
print('x_train shape:', x_train.shape)
print('x_test shape:', x_test.shape)

print('Build model...')
model = Sequential()
model.add(Embedding(max_features, 12))
if dropout:
    model.add(SpatialDropout1D(dropout))
model.add(LSTM(12))
model.add(Dense(1, activation='sigmoid'))

model.compile(loss='binary_crossentropy', optimizer=Adam(lr=0.01), metrics=['accuracy'])

print('Train...')
model.fit(x_train, y_train,
          batch_size=batch_size,
          epochs=epochs,
          verbose=2,
          validation_data=(x_test, y_test))

loss, accuracy = model.evaluate(x_test, y_test, batch_size=batch_size, verbose=0)
print('Test accuracy:', accuracy)
print('Test loss: %r' % float(loss))
