"""sloika: its networks for events and for raw signals, by its bin/train_network.py, on generated chunks.

PYTHONPATH has the checkout.
"""
import os
import runpy
import sys
import tempfile

import h5py
import numpy as np
import sloika
from show import show, show_sums

checkout = os.path.dirname(os.path.dirname(os.path.abspath(sloika.__file__)))
os.chdir(tempfile.mkdtemp())
r = np.random.RandomState(0)
for command, n_samples, stride, n_features, model in (('events', 40, 1, 4, 'tiny_gru'),
                                                      ('raw', 120, 5, 1, 'raw_0.98_rgrgr')):
    labels = r.randint(1, 17, (61, n_samples // stride)).astype('i')
    with h5py.File('generated.hdf5', 'w') as file:
        file['chunks'] = (np.repeat(labels, stride, axis=1)[:, :, np.newaxis] / 16
                          + .1 * r.randn(61, n_samples, n_features)).astype('f')
        file['labels'] = labels
        file['bad'] = r.rand(*labels.shape) < .1
        file['weights'] = r.rand(61)
        file.attrs['kmer'], file.attrs['alphabet'] = 2, np.bytes_(b'ACGT')
    sys.argv = ['train_network.py', command, '--seed', '1', '--niteration', '8', '--batch_size', '23', '--drop', '3',
                '--l2', '1e-4', '--ilf', '--quiet', '--overwrite',
                os.path.join(checkout, 'models', model + '.py'), 'generated', 'generated.hdf5']
    state = runpy.run_path(os.path.join(checkout, 'bin', 'train_network.py'), run_name='__main__')
    show('loss, accuracy', [state['score_smoothed'].value, state['acc_smoothed'].value])
    show('last loss', state['fval'])
    show_sums('weights', [each.get_value() for each in state['network'].params()])
    posterior = state['network'].compile()(np.ascontiguousarray(state['all_chunks'][:7].transpose((1, 0, 2))))
    show_sums('posterior', [posterior ** 2])
