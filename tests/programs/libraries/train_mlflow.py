"""MLflow's autologging of Keras: one run with the losses of `fit`, however many processes train."""
import os

import mlflow
import mlflow.keras
import numpy as np
from data import show
from keras.layers import Dense
from keras.models import Sequential

np.random.seed(1)
uri = 'file:' + os.path.abspath('runs')
mlflow.set_tracking_uri(uri)
mlflow.keras.autolog(log_models=False)
model = Sequential([Dense(8, activation='tanh', input_shape=(6,)), Dense(1)])
model.compile('adam', 'mse')
x, y = np.random.rand(50, 6), np.random.rand(50, 1)
history = model.fit(x, y, batch_size=16, epochs=3, validation_split=.2, verbose=0)
show('losses', history.history['loss'] + history.history['val_loss'])
runs = mlflow.tracking.MlflowClient(uri).list_run_infos('0')
print('runs', len(runs))
for name in 'loss', 'val_loss':
    show(name, [each.value for each in mlflow.tracking.MlflowClient(uri).get_metric_history(runs[0].run_id, name)])
