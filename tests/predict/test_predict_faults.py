"""`mgpu.Predictor`: batches and readers that fail, and the end of a predictor."""
import gc
import itertools
import threading
import weakref

from theano_mgpu.errors import BatchError, MgpuError, PredictionError

import numpy as np
import pytest
from support.prediction import rows, sums


def faulty(n, bad):
    return (rows(2, i) if i != bad else np.ones((2, 4, 4)) for i in range(n))


def test_a_failing_batch_raises_with_its_index(contexts, kind):
    contexts(kind, 2)
    with sums(contexts)[0] as predictor:
        outputs = predictor.map(faulty(20, bad=7))
        found = list(itertools.islice(outputs, 7))
        assert [float(output[0]) for output in found] == [3.0 * i for i in range(7)]
        with pytest.raises(PredictionError, match='batch 7 failed on context .*->.*: BatchError: input x') as told:
            next(outputs)
        assert told.value.index == 7 and isinstance(told.value.__cause__, BatchError)
        assert told.value.context in predictor.contexts
        with pytest.raises(StopIteration):
            next(outputs)
        assert len(predictor.predict(rows(5))) == 5


def test_a_failing_batch_in_its_place(contexts, kind):
    contexts(kind, 2)
    with sums(contexts)[0] as predictor:
        found = list(predictor.map(faulty(20, bad=7), on_error='yield'))
        assert isinstance(found[7], PredictionError) and found[7].index == 7
        assert [float(found[i][0]) for i in range(20) if i != 7] == [3.0 * i for i in range(20) if i != 7]


def test_a_batch_of_too_many_arrays(cpu2):
    with sums(cpu2)[0] as predictor:
        found = list(predictor.map([rows(1), [rows(1), rows(1)], {'y': rows(1)}, rows(1)], on_error='yield'))
        assert [isinstance(output, PredictionError) for output in found] == [False, True, True, False]
        assert "2 arrays were given for the inputs ['x']" in str(found[1])
        assert "arrays for ['y'] were given" in str(found[2])
        assert found[1].context is None and isinstance(found[1].__cause__, BatchError)


def test_a_reader_that_fails(cpu2):
    """Batches that the reader gave before are computed and yielded first."""
    def batches():
        yield rows(1)
        yield rows(1, 2)
        raise OSError('disk')

    found = []
    with sums(cpu2)[0] as predictor, pytest.raises(OSError, match='disk'):
        for output in predictor.map(batches()):
            found.append(float(output[0]))
    assert found == [3, 6]


@pytest.mark.slow_with('cpu')
def test_close_gives_everything_back(contexts, kind):
    contexts(kind, 2)
    before = set(threading.enumerate())
    predictor, _ = sums(contexts)
    with predictor:
        predictor.predict(rows(100))
        gone = [weakref.ref(function) for function in predictor._function.functions]
    gc.collect()
    assert set(threading.enumerate()) <= before and not any(ref() for ref in gone)
    for use in (lambda: predictor.predict(rows(1)), lambda: predictor.map([])):
        with pytest.raises(MgpuError, match='this Predictor is closed'):
            use()
    predictor.close()


def test_a_map_that_is_continued_after_close(cpu2):
    """The map waited for ever: no thread takes another batch."""
    predictor, _ = sums(cpu2)
    with predictor:
        outputs = predictor.map(rows(3) for _ in iter(int, 1))
        next(outputs)
    with pytest.raises(MgpuError, match='this Predictor is closed'):
        next(outputs)
