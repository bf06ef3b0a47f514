"""biaxial-rnn-music-composition: its model with smaller layers, on generated pieces instead of MIDI files."""
import random
import sys
import types

import numpy as np
from show import show, show_sums

sys.modules['midi'] = types.ModuleType('midi')  # reads and writes files; not installed
import midi_to_statematrix  # noqa: E402
import model as of_music  # noqa: E402
import multi_training  # noqa: E402

random.seed(1)
np.random.seed(1)
multi_training.batch_width, multi_training.batch_len = 7, 16


def piece():
    """Return the notes of 64 steps: which are played, and which of these are struck anew."""
    notes = (np.random.rand(64, midi_to_statematrix.upperBound - midi_to_statematrix.lowerBound, 2) < .1).astype(int)
    notes[:, :, 1] &= notes[:, :, 0]
    return notes.tolist()


pieces = {number: piece() for number in range(3)}
model = of_music.Model([24, 20], [12, 8], dropout=.5)
show('errors', [model.update_fun(*multi_training.getPieceBatch(pieces)) for _ in range(6)])
show_sums('thoughts', model.update_thought_fun(*multi_training.getPieceBatch(pieces)))
show_sums('weights', [each.get_value() for each in model.params])
start = np.array(multi_training.getPieceSegment(pieces)[0])
show_sums('predictions', [model.predict_fun(5, 1, start[0])])
model.start_slow_walk(start[0].astype('int8'))
for _ in range(3):
    show_sums('walk', model.slow_walk_fun(1.))
