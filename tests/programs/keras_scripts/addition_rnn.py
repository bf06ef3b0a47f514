"""Trains a sequence to sequence network to add two numbers that are written as characters: '12+7' to '19'."""
import sys

import numpy as np
from keras.layers import LSTM, Dense, Dropout, RepeatVector, TimeDistributed
from keras.models import Sequential
from keras.optimizers import Adam

np.random.seed(1337)

dropout = float(sys.argv[1]) if len(sys.argv) > 1 else 0
TRAINING_SIZE = 280
DIGITS = 2
MAXLEN = DIGITS + 1 + DIGITS
HIDDEN_SIZE = 12
BATCH_SIZE = 32


class CharacterTable:
    """A code of strings: one row of zeros and a one for each character."""

    def __init__(self, chars):
        self.chars = sorted(set(chars))
        self.indices = {char: index for index, char in enumerate(self.chars)}

    def encode(self, text, rows):
        x = np.zeros((rows, len(self.chars)), dtype='float32')
        for row, char in enumerate(text):
            x[row, self.indices[char]] = 1
        return x

    def decode(self, x):
        return ''.join(self.chars[index] for index in x.argmax(axis=-1))


table = CharacterTable('0123456789+ ')
numbers = np.random.randint(0, 10 ** DIGITS, (TRAINING_SIZE, 2))
# questions are padded to the full length and reversed, answers are padded
questions = [('%d+%d' % (a, b)).ljust(MAXLEN)[::-1] for a, b in numbers]
answers = [str(a + b).ljust(DIGITS + 1) for a, b in numbers]
x = np.array([table.encode(question, MAXLEN) for question in questions])
y = np.array([table.encode(answer, DIGITS + 1) for answer in answers])

# a tenth of the questions is kept for validation
split_at = len(x) - len(x) // 10
x_train, x_val, y_train, y_val = x[:split_at], x[split_at:], y[:split_at], y[split_at:]

model = Sequential()
# the encoder reads the question, the decoder gets its result once for each character of the answer
model.add(LSTM(HIDDEN_SIZE, input_shape=(MAXLEN, len(table.chars))))
if dropout:
    model.add(Dropout(dropout))
model.add(RepeatVector(DIGITS + 1))
model.add(LSTM(HIDDEN_SIZE, return_sequences=True))
model.add(TimeDistributed(Dense(len(table.chars), activation='softmax')))
model.compile(loss='categorical_crossentropy', optimizer=Adam(lr=0.01), metrics=['accuracy'])
model.summary()

for iteration in range(1, 3):
    print('Iteration', iteration)
    model.fit(x_train, y_train, batch_size=BATCH_SIZE, epochs=1, verbose=2, validation_data=(x_val, y_val))
    index = np.random.randint(0, len(x_val))
    guess = table.decode(model.predict(x_val[index:index + 1], verbose=0)[0])
    print('Q', questions[split_at + index][::-1], 'T', answers[split_at + index], 'guess', guess)

loss, accuracy = model.evaluate(x_val, y_val, verbose=0)
print('Test accuracy:', accuracy)
print('Test loss: %r' % float(loss))
