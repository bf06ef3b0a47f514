"""dl4mt-tutorial: its translation model with attention, as session2/train_nmt.py trains it, on generated sentences.

PYTHONPATH has the folder session2 of the checkout.
"""
import os
import pickle
import random
import sys
import tempfile
import types

import numpy as np
from show import show, show_sums

sys.modules['ipdb'] = types.ModuleType('ipdb')  # a debugger; not installed
import nmt  # noqa: E402

np.random.seed(1)
random.seed(1)
os.chdir(tempfile.mkdtemp())
words = ['w%d' % number for number in range(40)]
for name, count in (('train', 203), ('valid', 37)):
    source = [random.choices(words, k=random.randint(3, 9)) for _ in range(count)]
    for language, sentences in (('en', source), ('fr', [['f' + word for word in each[::-1]] for each in source])):
        with open('%s.%s' % (name, language), 'w') as file:
            file.writelines(' '.join(each) + '\n' for each in sentences)
for language, prefix in (('en', ''), ('fr', 'f')):
    with open(language + '.pkl', 'wb') as file:
        pickle.dump(dict({'eos': 0, 'UNK': 1}, **{prefix + word: 2 + place for place, word in enumerate(words)}), file)
print('error %.7g' % nmt.train(
    dim_word=8, dim=16, n_words=50, n_words_src=50, decay_c=1e-4, alpha_c=.01, clip_c=1., lrate=.01,
    optimizer='adadelta', patience=1000, maxlen=50, batch_size=33, valid_batch_size=32, validFreq=5, dispFreq=1,
    saveFreq=100, sampleFreq=10, finish_after=20, datasets=['train.en', 'train.fr'],
    valid_datasets=['valid.en', 'valid.fr'], dictionaries=['en.pkl', 'fr.pkl'], use_dropout=True, saveto='model.npz'))
weights = np.load('model.npz', allow_pickle=True)
show_sums('weights', [weights[name] for name in sorted(set(weights) - {'zipped_params', 'history_errs', 'uidx'})])
show('validation', weights['history_errs'])
