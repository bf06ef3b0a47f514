"""`mgpu.Predictor`: the time at which each batch is read and computed."""
import itertools
import os
import time
import weakref

import numpy as np
import pytest
from support.devices import context_map
from support.prediction import rows, slow_down, sums
from support.processes import python


@pytest.mark.slow_but_with('cpu-3')
@pytest.mark.parametrize('prefetch', [0, 3])
def test_back_pressure(contexts, kind, prefetch):
    """Two batches at most are alive that wait for others: they are copied to be computed together."""
    alive, most = [0], [0]

    def gone():
        alive[0] -= 1

    class Counted(np.ndarray):
        def __deepcopy__(self, memo):
            """Count the copy, which is computed in place of the array."""
            batch = np.array(self)
            alive[0] += 1
            most[0] = max(most[0], alive[0])
            weakref.finalize(batch, gone)
            return batch

    def batches():
        for i in range(30):
            yield rows(2, i).view(Counted)

    contexts(kind, 2)
    with sums(contexts, prefetch=prefetch)[0] as predictor:
        slow_down(predictor, 0.01)
        for number, output in enumerate(predictor.map(batches())):
            time.sleep(0.002)
            assert output[0] == 3 * number
    assert most[0] == 2


TEN_GB = '''
import sys
import theano_mgpu as mgpu
import numpy as np
import theano.tensor as T
mgpu.init(sys.argv[1])
x = T.fmatrix('x')
MB = 1 << 20

def peak():
    with open('/proc/self/status') as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith('VmHWM'))

def batches(n):
    for i in range(n):
        yield np.full((8192, 1024), i % 7, 'float32')  # 32 MB

with mgpu.Predictor([x], x[:, 5], prefetch=2) as predictor:
    list(predictor.map(batches(len(predictor.replicas))))
    before = peak()
    for i, outputs in enumerate(predictor.map(batches(320))):
        assert outputs[0] == i % 7 and len(outputs) == 8192
    print(i + 1, (peak() - before) // MB)
'''


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists('/proc/self/status'), reason='reads /proc')
def test_ten_gigabytes_pass_through(kind):
    """Two batches of 32 MB are computed, and two are read ahead and put together; on PoCL each is there twice.

    Shares are equal: pygpu keeps freed memory, and shares by measured speeds leave it parts of several sizes.
    """
    flags = 'floatX=float32,mgpu.shares=equal'
    n, megabytes = map(int, python('-c', TEN_GB, context_map(kind, 2), flags=flags).stdout.split())
    assert n == 320 and megabytes <= 10 * 32


def test_an_endless_reader_that_is_given_up(cpu2):
    read = itertools.count()
    with sums(cpu2)[0] as predictor:
        outputs = predictor.map(rows(1, i) for i in read)
        assert [float(next(outputs)[0]) for _ in range(5)] == [0, 3, 6, 9, 12]
        outputs.close()
        assert next(read) <= 5 + 4
        assert len(predictor.predict(rows(100))) == 100


def test_batches_that_nobody_waits_for_are_not_computed(cpu2):
    with sums(cpu2, prefetch=10)[0] as predictor:
        outputs = predictor.map(rows(1) for _ in range(100))
        next(outputs)
        outputs.close()
        assert predictor._function.calls == 1


@pytest.mark.slow
def test_outputs_do_not_wait_for_the_reader(cpu2):
    """A finished batch is yielded before the next one is read."""
    times = []

    def batches():
        for _ in range(4):
            yield rows(1)
            time.sleep(0.2)
            times.append(time.monotonic())

    with sums(cpu2)[0] as predictor:
        predictor.predict(rows(1))
        for number, _ in enumerate(predictor.map(batches())):
            if number == 0:
                assert len(times) <= 1
