"""Trains a model with two inputs and two outputs on made-up headlines: whether a headline is shared depends on its
words and on when and by whom it was posted. An auxiliary output sees the words only."""
import sys

import keras
import numpy as np
from keras.layers import LSTM, Dense, Dropout, Embedding, Input
from keras.models import Model

np.random.seed(1337)

dropout = float(sys.argv[1]) if len(sys.argv) > 1 else 0
vocabulary = 40
maxlen = 8
appeal = np.random.randn(vocabulary)  # of each word
influence = np.random.randn(5)  # of each entry of the auxiliary input


def make_headlines(samples):
    headlines = [np.random.randint(1, vocabulary, np.random.randint(3, maxlen + 1)) for _ in range(samples)]
    circumstances = np.random.randn(samples, 5).astype('float32')
    score = np.array([appeal[headline].sum() for headline in headlines])
    inputs = {'main_input': keras.preprocessing.sequence.pad_sequences(headlines, maxlen=maxlen),
              'aux_input': circumstances}
    outputs = {'main_output': (score + circumstances.dot(influence) > 0).astype('float32'),
               'aux_output': (score > 0).astype('float32')}
    return inputs, outputs


x_train, y_train = make_headlines(250)
x_test, y_test = make_headlines(70)

# the headline: a sequence of word numbers
main_input = Input(shape=(maxlen,), dtype='int32', name='main_input')
x = Embedding(output_dim=16, input_dim=vocabulary, input_length=maxlen)(main_input)
lstm_out = LSTM(12)(x)
aux_output = Dense(1, activation='sigmoid', name='aux_output')(lstm_out)

# the words, and the other features
aux_input = Input(shape=(5,), name='aux_input')
x = keras.layers.concatenate([lstm_out, aux_input])
for _ in range(2):
    x = Dense(24, activation='relu')(x)
    if dropout:
        x = Dropout(dropout)(x)
main_output = Dense(1, activation='sigmoid', name='main_output')(x)

model = Model(inputs=[main_input, aux_input], outputs=[main_output, aux_output])
model.compile(optimizer=keras.optimizers.RMSprop(lr=0.003),
              loss={'main_output': 'binary_crossentropy', 'aux_output': 'binary_crossentropy'},
              loss_weights={'main_output': 1.0, 'aux_output': 0.2},
              metrics=['accuracy'])
model.fit(x_train, y_train, epochs=2, batch_size=32, verbose=2)

scores = model.evaluate(x_test, y_test, batch_size=32, verbose=0)
for name, score in zip(model.metrics_names, scores):
    print('%s: %.4f' % (name, score))
print('Test loss: %r' % float(scores[0]))
