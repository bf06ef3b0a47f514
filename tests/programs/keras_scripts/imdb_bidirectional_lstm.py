"""Trains a bidirectional LSTM on the sentiment of made-up reviews, which depends on the words that occur in them."""
import sys

import numpy as np
from keras.layers import LSTM, Bidirectional, Dense, Dropout, Embedding
from keras.models import Sequential
from keras.preprocessing import sequence

np.random.seed(1337)

dropout = float(sys.argv[1]) if len(sys.argv) > 1 else 0.5
max_features = 50
maxlen = 7
batch_size = 32

# Each word of the vocabulary has a sentiment, a review has the sign of the sum over its words.
sentiment = np.random.randn(max_features)


def make_reviews(samples):
    reviews = [np.random.randint(1, max_features, np.random.randint(2, 10)) for _ in range(samples)]
    labels = [int(sentiment[review[-maxlen:]].sum() > 0) for review in reviews]
    return reviews, np.array(labels)


print('Loading data...')
x_train, y_train = make_reviews(250)
x_test, y_test = make_reviews(90)
print(len(x_train), 'train sequences')
print(len(x_test), 'test sequences')

x_train = sequence.pad_sequences(x_train, maxlen=maxlen)
x_test = sequence.pad_sequences(x_test, maxlen=maxlen)
print('x_train shape:', x_train.shape)
print('x_test shape:', x_test.shape)

model = Sequential()
model.add(Embedding(max_features, 16, input_length=maxlen))
model.add(Bidirectional(LSTM(8)))
if dropout:
    model.add(Dropout(dropout))
model.add(Dense(1, activation='sigmoid'))

# several optimizers will do here
model.compile('adam', 'binary_crossentropy', metrics=['accuracy'])

print('Train...')
model.fit(x_train, y_train, batch_size=batch_size, epochs=2, verbose=2, validation_data=[x_test, y_test])

loss, accuracy = model.evaluate(x_test, y_test, batch_size=batch_size, verbose=0)
print('Test accuracy:', accuracy)
print('Test loss: %r' % float(loss))
