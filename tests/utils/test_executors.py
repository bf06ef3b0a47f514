"""One suite for all executors."""
import signal
import threading
import time

from theano_mgpu.errors import MgpuError
from theano_mgpu.utils.executors import TaskError, make_executor

import pytest


@pytest.fixture(params=['serial', 'threads'])
def executor(request):
    return make_executor(request.param, 4)


@pytest.mark.slow_with('serial-4')
@pytest.mark.parametrize('n', [1, 2, 4])
def test_results_come_in_replica_order(executor, n):
    tasks = [lambda i=i: (time.sleep(0.02 * (n - i)), i)[1] for i in range(n)]
    assert executor.run(tasks) == list(range(n))


def test_every_task_ends_before_the_first_failure_is_raised(executor):
    done = []

    def failing(i):
        raise ZeroDivisionError('task %d' % i)

    tasks = [lambda: done.append(0), lambda: failing(1), lambda: (time.sleep(0.05), failing(2)), lambda: done.append(3)]
    with pytest.raises(TaskError) as caught:
        executor.run(tasks)
    assert caught.value.index == 1
    assert isinstance(caught.value.__cause__, ZeroDivisionError) and str(caught.value.__cause__) == 'task 1'
    assert sorted(done) == [0, 3]
    assert executor.run([lambda: 'again']) == ['again']


def test_threads_run_at_once():
    """Each task waits for the others: one after the other they would never end."""
    barrier = threading.Barrier(3, timeout=10)
    assert make_executor('threads', 3).run([barrier.wait] * 3) is not None


def test_an_interrupt_waits_for_the_threads():
    begun, ended = threading.Event(), []

    def interrupted():
        begun.wait(10)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_executor('threads', 2).run([interrupted, lambda: (begun.set(), time.sleep(0.1), ended.append(1))])
    assert ended == [1]


def test_an_interrupt_in_the_wait_for_a_thread_has_the_next_run_wait():
    """After Ctrl-C twice, no other thread may call a function that a thread still computes."""
    begun, going_on, ended = threading.Event(), threading.Event(), []
    executor = make_executor('threads', 2)

    def interrupted():
        begun.wait(10)
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            executor.run([interrupted, lambda: (begun.set(), going_on.wait(10), ended.append('first'))])
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert not ended
    threading.Timer(0.1, going_on.set).start()
    executor.run([lambda: ended.append('second'), lambda: None])
    assert ended == ['first', 'second']


def test_an_unknown_executor():
    with pytest.raises(MgpuError, match="executor 'fast' is none of auto, serial, threads"):
        make_executor('fast', 2)
