"""keras-contrib: its CRF as in examples/conll2000_chunking_crf.py, and with BiLSTM, on generated sentences."""
import numpy as np
from keras.layers import LSTM, Bidirectional, Embedding
from keras.models import Sequential
from keras_contrib.layers import CRF
from keras_contrib.losses import crf_loss
from keras_contrib.metrics import crf_viterbi_accuracy
from show import show, show_sums

np.random.seed(1)
r = np.random.RandomState(0)
x = r.randint(1, 30, (61, 9))
x[:, 6:] *= r.randint(0, 2, (61, 1))
y = (x % 4)[:, :, None]
for recurrent in (False, True):
    model = Sequential()
    model.add(Embedding(30, 12, mask_zero=True))
    if recurrent:
        model.add(Bidirectional(LSTM(5, return_sequences=True)))
    model.add(CRF(4, sparse_target=True))
    model.compile('adam', loss=crf_loss, metrics=[crf_viterbi_accuracy])
    history = model.fit(x, y, epochs=2, batch_size=20, validation_data=[x[:21], y[:21]], verbose=0).history
    for name in sorted(history):
        show(name, history[name])
    show('tags', model.predict(x).argmax(axis=-1).sum())
    show_sums('weights', model.get_weights())
