"""Sessions of TensorFlow: scripts call them on any back end, to free models above all."""
import json

import cuda_on_cpu
import numpy as np
import pytest
from keras import backend as K
from keras.layers import Dense, Dropout, Input
from keras.models import Model
from support.standin import run


def test_sessions_of_tensorflow():
    """Ended with "module 'keras.backend' has no attribute 'clear_session'"."""
    from keras.backend import (
        clear_session,
        get_session,
        is_symbolic,
        manual_variable_initialization,
        set_session,
        theano_backend,
    )
    manual_variable_initialization(True)
    set_session(None)
    names, phase = [], K.learning_phase()
    for _ in range(2):
        x = Input((3,))
        layer = Dense(2)
        model = Model(x, Dropout(.5)(layer(x)))
        names.append(layer.name)
        K.set_learning_phase(0)
        assert theano_backend.learning_phase() == 0
        clear_session()
        assert K.learning_phase() is phase
    assert names[1] == 'dense_1'
    values = np.arange(6, dtype='float32').reshape(2, 3)
    with get_session().as_default() as session:
        found, = session.run([model.output], feed_dict={model.input: values, K.learning_phase(): 0})
        np.testing.assert_array_equal(found, model.predict(values))
        np.testing.assert_array_equal(session.run(layer.kernel), layer.get_weights()[0])
    session.close()
    assert is_symbolic(x) and not is_symbolic(values) and theano_backend.get_session is get_session


MODELS = '''
import json
mgpu.enable(always=True)
from keras import backend as K
from keras.layers import Dense
from keras.models import Sequential
from support.device_memory import peaks
x, y = np.random.rand(24, 64).astype('float32'), np.random.rand(24, 1)
for fold in range(FOLDS):
    model = Sequential([Dense(256, activation='relu', input_shape=(64,)), Dense(1)])
    model.compile('adam', 'mse')
    model.fit(x, y, batch_size=8, epochs=3, verbose=0)
    model.predict(x)
    del model
    K.clear_session()
    peaks(2)
    print(json.dumps(peaks(2)))  # of no time: the bytes in use
'''


@pytest.mark.slow
@pytest.mark.needs_compiler
@pytest.mark.skipif(cuda_on_cpu.unavailable() is not None, reason=cuda_on_cpu.unavailable() or '')
@pytest.mark.parametrize('folds', [7, 20])
def test_memory_of_devices_stays_the_same_from_model_to_model(folds):
    lines = run('FOLDS = %d\n' % folds + MODELS, 2, flags='contexts=dev0->cuda0;dev1->cuda1,gpuarray.preallocate=-1')
    used = [json.loads(line) for line in lines if line.startswith('[')]
    assert len(used) == folds and min(used[0]) > 0
    assert used[-1] == used[4], used
