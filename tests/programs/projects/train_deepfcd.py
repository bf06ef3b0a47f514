"""deepFCD: its 3D CNN and its Monte Carlo dropout, on generated patches.

PYTHONPATH has the folder app of the checkout.
"""
import sys
import types

import numpy as np
from keras import backend as K
from show import show, show_sums

sys.modules['ants'] = types.ModuleType('ants')  # reads images; not installed
from config.experiment import options  # noqa: E402
from models.noel_models_keras import off_the_shelf_model  # noqa: E402
from utils.patch_dataloader import predict_uncertainty  # noqa: E402

np.random.seed(1)
K.set_image_dim_ordering('th')
K.set_image_data_format('channels_first')
options.update(base_filters=4, parallel_gpu=False)
model = off_the_shelf_model(options)[0]
x = np.random.RandomState(0).rand(37, 2, 16, 16, 16).astype('float32')
y = np.eye(2)[(x.mean(axis=(1, 2, 3, 4)) > .5).astype(int)]
history = model.fit(x, y, batch_size=12, epochs=1, verbose=0, validation_split=.25).history
for name in sorted(history):
    show(name, history[name])
show_sums('weights', model.get_weights())
mean, variance = predict_uncertainty(model, x[:11], 8, T=2)
show('uncertainty', [mean.sum(), variance.sum()])
show('probabilities', model.predict(x[:7])[:4])
