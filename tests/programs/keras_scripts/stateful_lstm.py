"""Trains a stateful LSTM to predict the moving average of noisy waves. Each batch holds the next steps of the same 24
series, so that the state at its end is the one that the next batch starts from."""
import sys

import numpy as np
from keras.layers import LSTM, Dense, Dropout
from keras.models import Sequential

np.random.seed(1337)

dropout = float(sys.argv[1]) if len(sys.argv) > 1 else 0
batch_size = 24  # series, one a row of each batch
timesteps = 4  # of each series in a batch
epochs = 3


def make_series(batches):
    """Return series; samples i, i + 24, i + 48... are parts of series i, one after the other."""
    length = batches * timesteps
    phase, pace = np.random.uniform(0, 2 * np.pi, (batch_size, 1)), np.random.uniform(0.2, 0.5, (batch_size, 1))
    series = np.sin(phase + pace * np.arange(-4, length)) + 0.1 * np.random.randn(batch_size, length + 4)
    # the mean of the last five values, which reaches back into the batch before
    average = np.stack([series[:, i:i + length] for i in range(5)]).mean(axis=0)
    x = series[:, 4:].reshape(batch_size, batches, timesteps, 1)
    y = average.reshape(batch_size, batches, timesteps)[:, :, -1:]
    x, y = x.swapaxes(0, 1), y.swapaxes(0, 1)
    return x.reshape(-1, timesteps, 1).astype('float32'), y.reshape(-1, 1).astype('float32')


x_train, y_train = make_series(5)
x_test, y_test = make_series(3)
print('x_train shape:', x_train.shape)
print('x_test shape:', x_test.shape)

model = Sequential()
model.add(LSTM(12, batch_input_shape=(batch_size, timesteps, 1), stateful=True))
if dropout:
    model.add(Dropout(dropout))
model.add(Dense(1))
model.compile(loss='mse', optimizer='rmsprop')

for epoch in range(1, epochs + 1):
    print('Epoch', epoch, '/', epochs)
    # the order of the samples matters, and a new epoch starts from the beginning of the series
    model.fit(x_train, y_train, batch_size=batch_size, epochs=1, verbose=2, shuffle=False)
    model.reset_states()

predicted = model.predict(x_test, batch_size=batch_size)
print('correlation:', np.corrcoef(predicted[:, 0], y_test[:, 0])[0, 1])
model.reset_states()
loss = model.evaluate(x_test, y_test, batch_size=batch_size, verbose=0)
print('Test loss: %r' % float(loss))
