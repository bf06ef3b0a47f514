"""Avocado: the README's fit, prediction, new cell types, save and load, on the first 600 positions of its own tracks.

Run in the checkout, which has the tracks in data/.
"""
import itertools
import os
import tempfile

import numpy as np
from avocado import Avocado
from show import show, show_sums

np.random.seed(1)
cells, assays = ['E003', 'E017', 'E065'], ['H3K4me3', 'H3K27me3', 'H3K36me3']
data = {}
for cell, assay in itertools.product(cells, assays):
    name = 'data/%s.%s.pilot.arcsinh.npz' % (cell, assay)
    if os.path.exists(name):
        data[cell, assay] = np.load(name)['arr_0'][:600].astype('float32')
model = Avocado(cells, assays, n_genomic_positions=600, n_layers=2, n_nodes=24, batch_size=51)
show('losses', model.fit(data, n_epochs=2, epoch_size=4, verbose=0, sampling='permuted').history['loss'])
track = model.predict('E065', 'H3K27me3')
show('track', [track.mean(), track.std(), *track[:4]])
show_sums('weights', model.model.get_weights())
np.random.seed(2)  # Keras's thread has drawn some batches ahead
model.fit_celltypes({('E999', 'H3K4me3'): data['E003', 'H3K4me3']}, n_epochs=2, epoch_size=5, verbose=0)
show_sums('cell types', [model.celltype_embedding])
with tempfile.TemporaryDirectory() as folder:
    model.save(os.path.join(folder, 'avocado'))
    show('loaded', Avocado.load(os.path.join(folder, 'avocado')).predict('E065', 'H3K27me3').mean())
