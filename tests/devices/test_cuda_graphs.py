"""CUDA graphs: one launch in place of one for each op, and the same bits; each case in a process on the stand-in."""
import json

import cuda_on_cpu
import pytest
from support.standin import launched, run

pytest.importorskip('pygpu', reason='CUDA contexts need pygpu')
pytestmark = [pytest.mark.needs_compiler, pytest.mark.skipif(cuda_on_cpu.unavailable() is not None,
                                                             reason=cuda_on_cpu.unavailable() or '')]
OFF = 'mgpu.cuda_graphs=off,mgpu.shares=equal'
ON = 'mgpu.shares=equal'

STEPS = '''
import hashlib, json
import models
from cuda_on_cpu import driver
model, shape = {'mlp': (lambda: models.mlp(sizes=(8, 16, 16, 4)), (8,)), 'cnn': (lambda: models.cnn(filters=4, size=8,
                classes=4), (1, 8, 8)), 'lstm': (lambda: models.lstm(n_in=4, units=6, classes=4), (5, 4))}[NAME]
model, random = model(), np.random.RandomState(0)
step = mgpu.training_function(model.inputs, model.loss, model.params, models.adam, contexts=mgpu.init())
for number in range(18):
    n = 6 if number % 3 == 2 else 12
    x, labels = random.rand(n, *shape).astype('float32'), random.randint(0, 4, n).astype('int32')
    [driver.calls(i) for i in range(N)]
    loss = step(x, labels)
    calls = [driver.calls(i) for i in range(N)]
    print(json.dumps([float(loss).hex(), n, [[each.launches, each.graph_launches] for each in calls]]))
print(json.dumps(hashlib.sha256(b''.join(each.get_value().tobytes() for each in model.params)).hexdigest()))
print(json.dumps([choice.chosen for choice in step.executable.changes()] if N else 0))
'''


def steps(name, devices, flags, **settings):
    """Return losses and calls of a model's training steps, the digest of its weights, and what its parts have chosen.
    """
    *found, digest, chosen = map(json.loads, run('NAME, N = %r, %d\n' % (name, devices) + STEPS, devices, flags=flags,
                                                 quiet=1, **settings))
    return found, digest, chosen


@pytest.mark.parametrize('devices', [1, 2])
@pytest.mark.parametrize('name', ['mlp', pytest.param('cnn', marks=pytest.mark.slow),
                                  pytest.param('lstm', marks=pytest.mark.slow)])
def test_a_step_is_few_launches(name, devices):
    """One launch for each part of a step, and bits as without graphs, with batches of two lengths."""
    found, digest, chosen = steps(name, devices, ON, delay_us=50)
    plain, plain_digest, none = steps(name, devices, OFF)
    assert [loss for loss, *_ in found] == [loss for loss, *_ in plain] and digest == plain_digest
    assert all(graphs == 0 and launches > 20 for _, _, calls in plain for launches, graphs in calls)
    assert {(n, *call) for _, n, calls in found[-3:] for call in calls} == {(12, 0, devices), (6, 0, devices)}
    assert chosen == ['%d of %d part%s in one launch each' % (devices ** 2, devices ** 2, 's' * (devices > 1))]
    assert none == []
