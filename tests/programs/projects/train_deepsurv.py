"""DeepSurv: its simulated survival data, a network with dropout and batch normalisation, the concordance."""
import sys
import types

import lasagne
import numpy as np
from show import show, show_sums

logger = types.ModuleType('tensorboard_logger')  # not installed
logger.Logger = type('Logger', (), {'__init__': lambda *_: None, 'log_value': lambda *_: None})
sys.modules['tensorboard_logger'] = logger
import deepsurv  # noqa: E402

np.random.seed(1)
lasagne.random.set_rng(np.random.RandomState(2))
simulated = deepsurv.datasets.SimulatedData(5, num_features=9, treatment_group=True)
train, valid = simulated.generate_data(603), simulated.generate_data(200)
network = deepsurv.DeepSurv(n_in=10, learning_rate=1e-3, hidden_layers_sizes=[12, 8], dropout=.2, batch_norm=True,
                            L2_reg=1e-3)
network.train(train, valid, n_epochs=12, validation_frequency=6)
show('concordance', [network.get_concordance_index(**data) for data in (train, valid)])
show_sums('weights', [each.get_value() for each in network.params])
