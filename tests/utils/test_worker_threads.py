"""Threads that wait for tasks: interrupts, signal handlers, forks and their end."""
import gc
import os
import signal
import threading
import time
import types
import weakref

from theano_mgpu.exchange import over_ranks as over_ranks_module
from theano_mgpu.utils import worker_threads as worker_threads_module
from theano_mgpu.utils.executors import make_executor
from theano_mgpu.utils.timeline import Timings
from theano_mgpu.utils.worker_threads import Task, WorkerThreads

import pytest
from support.interrupts import interrupted_at_each_line
from support.processes import python


@pytest.fixture
def handler():
    """Return a function that sets a function for SIGALRM to call."""
    previous = signal.getsignal(signal.SIGALRM)
    yield lambda function: signal.signal(signal.SIGALRM, lambda *signal_and_frame: function())
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous)


def test_a_task_runs_once_however_often_it_is_submitted():
    calls = []
    threads, task = WorkerThreads([calls.append], 'test'), Task(1)
    for _ in range(3):
        threads.submit(task)
    threads.finish([task])
    threads.close()
    assert calls == [1]


def test_a_cancelled_task_does_not_run():
    calls, going_on = [], threading.Event()
    threads = WorkerThreads([lambda argument: (going_on.wait(10), calls.append(argument))], 'test')
    first, second = threads.submit(Task(1)), threads.submit(Task(2))
    second.cancel()
    going_on.set()
    threads.finish([first])
    threads.close()
    assert calls == [1] and not second.done()


def test_a_signal_handler_may_run_tasks_within_a_run(handler):
    """A handler that evaluates a model, say, waited for threads that waited for the interrupted task."""
    executor, nested = make_executor('threads', 3), []

    def again():
        nested.append(executor.run([lambda i=i: 10 + i for i in range(3)]))
        signal.setitimer(signal.ITIMER_REAL, 0.0005)
    handler(again)
    signal.setitimer(signal.ITIMER_REAL, 0.0005)
    while len(nested) < 500:
        assert executor.run([lambda i=i: i for i in range(3)]) == [0, 1, 2]
    assert all(results == [10, 11, 12] for results in nested)


def test_a_signal_handler_may_wait_for_the_task_that_it_has_interrupted_the_wait_for(handler):
    going_on, found = threading.Event(), []
    threads = WorkerThreads([lambda: going_on.wait(10)], 'test')
    task = threads.submit(Task())
    threading.Timer(0.1, going_on.set).start()
    handler(lambda: found.append(task.result()))
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    assert task.result() and found == [True]
    threads.close()


def test_several_threads_may_wait_for_one_task():
    threads, found = WorkerThreads([lambda: time.sleep(0.05)], 'test'), []
    task = threads.submit(Task())
    waiting = [threading.Thread(target=lambda: found.append(task.result()), daemon=True) for _ in range(4)]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join(10)
    assert found == [None] * 4
    threads.close()


def test_ctrl_c_at_any_line_of_sums_over_ranks_leaves_none_under_way():
    """A thread added to memory that the next step used; or the next step waited for sums that nobody added."""
    added = []

    class Sums:
        by_host = True

        def add_over(self):
            time.sleep(0.001)
            added.append(self)

    ranks = types.SimpleNamespace(size=2, handshake=lambda activity: None)
    sums = [Sums(), Sums()]
    over_ranks = over_ranks_module.OverRanks(ranks, Timings(), overlaps=True)

    def step():
        added.clear()
        over_ranks.wait()
        try:
            for each in sums:
                over_ranks.start(each)
        finally:
            over_ranks.wait()

    def after(number):
        over_ranks.wait()  # as the next step does
        before = list(added)
        time.sleep(0.003)
        assert added == before == sums[:len(added)], 'line event %d' % number
    assert interrupted_at_each_line(step, [over_ranks_module, worker_threads_module], after) > 20
    assert added == sums


def test_a_forked_process_has_threads_of_its_own():
    """A function that was made before the fork waited for ever in the child."""
    executor = make_executor('threads', 2)
    for _ in range(2):  # before the parent has used it, and after
        child = os.fork()
        if child == 0:
            os._exit(executor.run([lambda: 20, lambda: 22]) != [20, 22])
        for _ in range(200):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            time.sleep(0.05)
        else:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert ended and status == 0
        assert executor.run([lambda: 1, lambda: 2]) == [1, 2]


@pytest.mark.slow
def test_threads_that_are_forgotten_end():
    threads = WorkerThreads([lambda: None] * 2, 'test')
    its = threads._threads
    del threads
    gc.collect()
    for thread in its:
        thread.join(10)
    assert not any(thread.is_alive() for thread in its)


def test_a_result_is_not_kept_by_the_thread_that_computed_it():
    class Result:
        pass
    threads = WorkerThreads([Result], 'test')
    task = threads.submit(Task())
    threads.finish([task])
    alive = weakref.ref(task.result())
    del task
    for _ in range(100):
        if alive() is None:
            break
        time.sleep(0.05)
    assert alive() is None
    threads.close()


def test_a_process_ends_while_a_thread_still_works():
    script = '''
import time
from theano_mgpu.utils.worker_threads import Task, WorkerThreads
threads = WorkerThreads([time.sleep], 'test')
threads.submit(Task(1000))
'''
    assert python('-W', 'ignore', '-c', script, flags='cxx=').stderr == ''
