"""The duties of any communicator: cases ``case(ranks)``, which every rank runs at the same time.

Each case knows every rank's input, and so every rank's result, for any number of ranks.
"""
import functools
import json
import os
import tempfile
import threading
import time
import traceback
import zlib

import theano_mgpu as mgpu
from theano_mgpu.comm import collectives, rank_0
from theano_mgpu.comm.activities import ADD, AGREE, CALL, GATHER, READ, SHARE, describe
from theano_mgpu.comm.communicator import WIDTH
from theano_mgpu.comm.compilation import first_compiler
from theano_mgpu.comm.mpi import mpi_communicator
from theano_mgpu.comm.rank_errors import common_error, failing_together, raise_error
from theano_mgpu.exchange.whole import exchanged
from theano_mgpu.graph.analysis import SUM

import numpy as np
import scipy.sparse
import theano

from support.comparison import has_text, note_of

FLOATS = 'float16', 'float32', 'float64'
SUMMED = FLOATS + ('complex64', 'complex128', 'int8', 'int16', 'int32', 'int64', 'uint8', 'uint64')
DTYPES = SUMMED + ('bool', 'uint16', 'uint32')
SHAPES = [(), (0,), (1,), (7,), (3, 0), (3, 5), (2, 3, 4), (70001,)]
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def give(rank, shape, dtype):
    """Return an array of a rank: small whole numbers, whose sums no dtype rounds."""
    rng = np.random.RandomState(17 + rank)
    return np.asarray(rng.randint(0, 2 if dtype == 'bool' else 9, size=shape), dtype)


def given(ranks, shape, dtype):
    return [give(rank, shape, dtype) for rank in range(ranks.size)]


def check_same(ours, expected):
    """Check that arrays, or None in their place, have the same dtypes, shapes and bits."""
    assert len(ours) == len(expected)
    for one, other in zip(ours, expected):
        assert (one is None) == (other is None)
        if one is not None:
            assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


def check_same_on_each_rank(ranks, arrays):
    checksum = zlib.crc32(b''.join(array.tobytes() for array in arrays))
    assert len(set(collectives.all_gather_int(ranks, checksum))) == 1


def raised_by(act):
    """Return the exception that a function raises."""
    try:
        act()
    except BaseException as error:
        return error
    raise AssertionError('no error')


def fail(error):
    raise error


# --------------------------------------------------------------------------------------------------------- handshakes


@case
def identity(ranks):
    assert 0 <= ranks.rank < ranks.size == len(ranks.hosts)
    assert ranks.on_one_host and ranks.lost is None
    assert ranks.name(ranks.size - 1).startswith('rank %d' % (ranks.size - 1))
    assert collectives.all_gather_int(ranks, ranks.rank) == list(range(ranks.size))
    assert ranks.add_function('a') == 0 and ranks.add_function(None) == 1
    assert describe((CALL, 1), ranks.functions) == 'in call 1 of a function (number 1)'
    assert describe((CALL, 2, 4), ranks.functions) == 'in call 5 of a function unknown here (number 2)'


@case
def handshakes_give_the_integers_of_each_rank(ranks):
    before = ranks.n_handshakes
    for integers in ([], [True], [-2 ** 63, 2 ** 63 - 1], list(range(WIDTH))):
        each = ranks.handshake((CALL, 1, 5), [number if ranks.rank % 2 == 0 else 0 for number in integers])
        assert each.shape == (ranks.size, len(integers)) and each.dtype == 'int64'
        for rank, row in enumerate(each):
            assert row.tolist() == [number if rank % 2 == 0 else 0 for number in integers]
        each[...] = 3  # a copy, not the buffer for the next one
    assert len(set(collectives.all_gather_int(ranks, ranks.n_handshakes))) == 1
    assert ranks.size == 1 or ranks.n_handshakes == before + 5


@case
def ranks_that_do_different_things(ranks):
    if ranks.size == 1:
        return
    for _ in range(2):  # the second time shows that they are in step again
        error = raised_by(lambda: ranks.handshake((CALL, 0, 2) if ranks.rank == 0 else (GATHER,)))
        assert type(error) is mgpu.RankError
        assert 'in call 3 of a (number 0); rank 1' in str(error) and 'gathering the rows of a batch' in str(error)
    assert collectives.all_gather_int(ranks, 4) == [4] * ranks.size


# -------------------------------------------------------------------------------------------------------- collectives


@case
def sums(ranks):
    for dtype in SUMMED:
        arrays = [give(ranks.rank, n, dtype) for n in (7, 0, 1, 70001)]
        ranks.handshake((ADD,))
        assert ranks.all_reduce(arrays) is None
        check_same(arrays, [sum(given(ranks, n, dtype)).astype(dtype) for n in (7, 0, 1, 70001)])
    ranks.handshake((ADD,))
    ranks.all_reduce([])


@case
def rounded_sums_have_the_same_bits_on_each_rank(ranks):
    arrays = [np.random.RandomState(ranks.rank).randn(1000).astype(dtype) for dtype in FLOATS]
    ranks.handshake((ADD,))
    ranks.all_reduce(arrays)
    check_same_on_each_rank(ranks, arrays)


def summed(ranks, arrays):
    """Return the sums of arrays over the ranks."""
    return exchanged([[each] for each in arrays], [SUM] * len(arrays), [1] * ranks.size, ranks)


@case
def sums_of_small_arrays(ranks):
    shaped = [(shape, dtype) for shape in SHAPES[:-1] for dtype in SUMMED]
    arrays = [give(ranks.rank, *each) for each in shaped]
    added = summed(ranks, arrays)
    check_same(added, [np.asarray(sum(given(ranks, *each)), each[1]) for each in shaped])
    check_same(arrays, [give(ranks.rank, *each) for each in shaped])
    assert summed(ranks, []) == []


@case
def sums_of_which_each_rank_owns_some(ranks):
    for dtype in FLOATS:
        for shift in range(ranks.size):
            owners = [(i + shift) % ranks.size for i in range(len(SHAPES))]
            arrays = [give(ranks.rank, shape, dtype) for shape in SHAPES]
            ranks.handshake((ADD,))
            owned = ranks.reduce_scatter(arrays, owners)
            check_same(arrays, [give(ranks.rank, shape, dtype) for shape in SHAPES])
            check_same(owned, [np.asarray(sum(given(ranks, shape, dtype)), dtype) if owner == ranks.rank else None
                               for shape, owner in zip(SHAPES, owners)])


@case
def rows_of_all_ranks(ranks):
    for lengths in ([3] * ranks.size, list(range(ranks.size)), [0] * ranks.size):  # rank 0 has none; nobody has any
        for dtype in DTYPES:
            for row in [(), (4,), (2, 3), (0,)]:
                own = give(ranks.rank, (lengths[ranks.rank],) + row, dtype)
                whole = np.full((sum(lengths),) + row, 1, dtype)
                ranks.handshake((GATHER,))
                assert ranks.all_gather(own, whole, lengths) is None
                check_same([whole], [np.concatenate([give(rank, (length,) + row, dtype)
                                                     for rank, length in enumerate(lengths)])])


@case
def values_of_which_each_rank_owns_some(ranks):
    for dtype in DTYPES:
        owners = [(i + 1) % ranks.size for i in range(len(SHAPES))]
        arrays = [give(ranks.rank, shape, dtype) for shape in SHAPES]
        ranks.handshake((GATHER,))
        gathered = ranks.all_gather_owned(arrays, owners)
        check_same(gathered, [None if owner == ranks.rank else give(owner, shape, dtype)
                              for shape, owner in zip(SHAPES, owners)])
        assert all(array.flags.writeable for array in gathered if array is not None)
    turned = np.asfortranarray(give(ranks.rank, (3, 5), 'float32')), give(ranks.rank, (8, 6), 'float32')[::2, 1::2]
    ranks.handshake((GATHER,))
    gathered = ranks.all_gather_owned(turned, [0, ranks.size - 1])
    check_same(gathered, [
        None if ranks.rank == 0 else give(0, (3, 5), 'float32'),
        None if ranks.rank == ranks.size - 1 else give(ranks.size - 1, (8, 6), 'float32')[::2, 1::2].copy()])


@case
def messages_to_each_rank(ranks):
    for dtype in DTYPES:
        for n in (0, 1, 500):
            messages = [give(ranks.rank + 10 * to, n + ranks.rank * to, dtype) for to in range(ranks.size)]
            ranks.handshake((GATHER,))
            received = ranks.all_to_all(messages, [n + rank * ranks.rank for rank in range(ranks.size)])
            check_same(received, [give(rank + 10 * ranks.rank, n + rank * ranks.rank, dtype)
                                  for rank in range(ranks.size)])


@case
def arrays_of_a_root(ranks):
    for root in range(ranks.size):
        arrays = [give(ranks.rank, shape, dtype) for dtype in DTYPES for shape in SHAPES]
        for array in arrays:
            array.flags.writeable = ranks.rank != root
        ranks.handshake((SHARE,))
        assert ranks.broadcast(arrays, root) is None
        check_same(arrays, [give(root, shape, dtype) for dtype in DTYPES for shape in SHAPES])


# ------------------------------------------------------------------------- collectives that begin with a handshake


@case
def rows_of_ranks_without_samples(ranks):
    lengths = [2 * rank for rank in range(ranks.size)]
    if ranks.size == 1:
        lengths = [3]
    row = (4,) if lengths[ranks.rank] else (1,)  # rank 0 has an example, of another shape
    rows = give(ranks.rank, (max(1, lengths[ranks.rank]),) + row, 'float32')
    whole = collectives.all_gather_rows(ranks, rows, lengths)
    check_same([whole], [np.concatenate([give(rank, (length, 4), 'float32') for rank, length in enumerate(lengths)])])


@case
def rows_of_different_shapes(ranks):
    if ranks.size == 1:
        return
    error = raised_by(lambda: collectives.all_gather_rows(ranks, np.ones((2, 4 + (ranks.rank > 0))), [2] * ranks.size))
    assert type(error) is mgpu.BatchError and 'different shapes, (4,) and (5,)' in str(error)


@case
def objects_of_each_rank(ranks):
    for make in (lambda rank: rank, lambda rank: 'x' * rank, lambda rank: {'a': [None, (rank, 1.5)]},
                 lambda rank: scipy.sparse.eye(rank + 1)):
        each = collectives.all_gather_object(ranks, make(ranks.rank))
        assert [str(value) for value in each] == [str(make(rank)) for rank in range(ranks.size)]
    arrays = collectives.all_gather_object(ranks, give(ranks.rank, (ranks.rank, 3), 'float16'))
    check_same(arrays, [give(rank, (rank, 3), 'float16') for rank in range(ranks.size)])


@case
def values_of_rank_0(ranks):
    def values(rank):
        return [give(rank, (3, 5), 'float16').T, np.array(rank), np.array([None, rank], object), rank,
                give(rank, (0, 2), 'bool'), scipy.sparse.eye(rank + 2)]
    shared = collectives.broadcast_object(ranks, values(ranks.rank))
    for ours, expected in zip(shared, values(0)):
        assert type(ours) is type(expected) and str(ours) == str(expected)
    assert all(value.flags.writeable for value in shared if isinstance(value, np.ndarray))


@case
def objects_of_a_root(ranks):
    for root in range(ranks.size):
        values = [None, 3, 'text', {'x': [np.arange(5)]}, [np.zeros((0, 3)), np.arange(4.0)], np.array(2.5),
                  [np.full(3, i) for i in range(2 * WIDTH)], np.array([None, 'a'], object), scipy.sparse.eye(3),
                  np.arange(12.0).reshape(3, 4).T, np.arange(9)[::2]]
        for value in values:
            ours = collectives.broadcast_object(ranks, value if ranks.rank == root else None, root)
            assert str(ours) == str(value) and type(ours) is type(value)


# ------------------------------------------------------------------------------------------------------------- errors


class Unlike(LookupError):
    """An error that other processes cannot copy."""

    def __init__(self, one, other):
        super().__init__('%s, %s' % (one, other))

    def __reduce__(self):
        return fail, (TypeError('not here'),)


@case
def an_error_of_one_rank_is_one_of_all(ranks):
    for root in range(ranks.size):
        for error, kind, text in [(ValueError('bad data'), ValueError, 'bad data'), (KeyError('k'), KeyError, "'k'"),
                                  (SystemExit(3), SystemExit, '3'), (mgpu.BatchError('b'), mgpu.BatchError, 'b'),
                                  (Unlike('a', 'b'), LookupError, 'a, b')]:
            def block(error=error, root=root):
                with failing_together(ranks):
                    if ranks.rank == root:
                        raise error
                    ranks.handshake((AGREE,))
            raised = raised_by(block)
            assert isinstance(raised, kind) and has_text(raised, text)
            assert ranks.size == 1 or raised.known_to_all and not raised.of_step
            assert ranks.rank == root or kind is SystemExit or 'rank %d' % root in note_of(raised)
            assert common_error(ranks, raised) is raised or ranks.size == 1  # known already: no handshake
        assert collectives.all_gather_int(ranks, root) == [root] * ranks.size


@case
def of_several_errors_all_ranks_raise_the_first(ranks):
    def step(text):
        try:
            raise ValueError(text)
        except ValueError as error:
            raise_error(common_error(ranks, error, of_step=True), error)
    raised = raised_by(lambda: step('rank %d' % ranks.rank))
    assert type(raised) is ValueError and has_text(raised, 'rank 0')
    assert ranks.size == 1 or raised.known_to_all and raised.of_step
    assert has_text(raised_by(lambda: step('the same')), 'the same')


@case
def an_error_that_a_rank_meets_in_any_collective(ranks):
    if ranks.size == 1:
        return
    rows, lengths = np.ones((1, 2)), [1] * ranks.size
    for call in (collectives.all_gather_int, collectives.all_gather_object, collectives.broadcast_object,
                 functools.partial(rank_0.on_rank_0, act=lambda: 1),
                 lambda ranks, value: summed(ranks, [rows]),
                 lambda ranks, value: collectives.all_gather_rows(ranks, rows, lengths)):
        arguments = () if isinstance(call, functools.partial) else (1,)

        def block(call=call, arguments=arguments):
            with failing_together(ranks):
                if ranks.rank == ranks.size - 1:
                    raise MemoryError('no memory left')
                call(ranks, *arguments)
        raised = raised_by(block)
        assert type(raised) is MemoryError and has_text(raised, 'no memory left')
    assert collectives.all_gather_int(ranks, 1) == lengths


# ------------------------------------------------------------------------------------------ work of one rank first


@case
def rank_0_acts_alone(ranks):
    acted = []
    assert rank_0.on_rank_0(ranks, lambda: acted.append(ranks.rank) or [ranks.rank, np.arange(3)])[0] == 0
    assert acted == [0] * (ranks.rank == 0)
    error = raised_by(lambda: rank_0.on_rank_0(ranks, lambda: fail(OSError(28, 'disk full'))))
    assert type(error) is OSError and 'disk full' in str(error) and getattr(error, 'known_to_all', ranks.size == 1)
    assert rank_0.done_by_rank_0(ranks, 'count', lambda: 5 + ranks.rank) == 5
    assert collectives.all_gather_int(ranks, 1) == [1] * ranks.size


@case
def rank_0_writes_a_file(ranks):
    folder = rank_0.on_rank_0(ranks, tempfile.mkdtemp)

    def write(name):
        with open(os.path.join(folder, name), 'a') as file:
            file.write(str(ranks.rank))

    def read(name):
        with open(os.path.join(folder, name)) as file:
            return file.read()
    rank_0.write_on_rank_0(ranks, 'one', functools.partial(write, 'one'))
    assert read('one') == '0'
    if ranks.rank == 0:  # the others neither write it nor wait
        rank_0.write_on_rank_0(ranks, 'two', functools.partial(write, 'two'))
    collectives.all_gather_int(ranks, 0)
    assert read('two') == '0'
    if ranks.rank:  # rank 0 goes on: each writes its own
        rank_0.write_on_rank_0(ranks, 'three', functools.partial(write, 'three%d' % ranks.rank))
        assert read('three%d' % ranks.rank) == str(ranks.rank)
    collectives.all_gather_int(ranks, 0)
    error = raised_by(lambda: rank_0.write_on_rank_0(ranks, 'four', lambda: fail(OSError('disk full'))))
    assert type(error) is OSError and has_text(error, 'disk full')
    assert collectives.all_gather_int(ranks, 1) == [1] * ranks.size


@case
def one_rank_compiles_first(ranks):
    with first_compiler(ranks):
        began = time.monotonic()
        time.sleep(0.05)
        ended = time.monotonic()
    spans = collectives.all_gather_object(ranks, (began, ended))
    assert sum(any(start >= end for _, end in spans) for start, _ in spans) == ranks.size - 1
    for failing in (0, ranks.size - 1):
        def block(failing=failing):
            with first_compiler(ranks):
                if ranks.rank == failing:
                    raise ValueError('no compiler')
        error = raised_by(block)
        assert type(error) is ValueError and has_text(error, 'no compiler')


@case
def states_that_are_divided(ranks):
    gathered = []

    def gather(name):
        ranks.handshake((READ,))
        gathered.append(name)
        ranks.divided.pop(gathers[name], None)
    gathers = {name: functools.partial(gather, name) for name in 'ab'}
    for name in 'aba':
        ranks.divided[gathers[name]] = None
    ranks.consolidate()
    assert gathered == ['a', 'b']
    ranks.divided[gathers['b']] = None
    rank_0.on_rank_0(ranks, lambda: gathered.append('act'))
    assert gathered == ['a', 'b', 'b'] + ['act'] * (ranks.rank == 0)


@case
def messages_beside_the_collectives(ranks):
    if ranks.mailbox is None:
        return
    for to in range(ranks.size):
        if to != ranks.rank:
            for number in range(2):
                ranks.mailbox.post(to, (ranks.rank, number, np.arange(number * 10 ** 5)))
    assert collectives.all_gather_int(ranks, 1) == [1] * ranks.size  # messages are not taken for a handshake's
    taken = []
    while len(taken) < 2 * (ranks.size - 1):
        message = ranks.mailbox.take()
        if message:
            sender, (rank, number, array) = message
            assert sender == rank and len(array) == number * 10 ** 5
            taken.append((rank, number))
    for rank in range(ranks.size):
        assert [number for sender, number in taken if sender == rank] == ([] if rank == ranks.rank else [0, 1])


# ------------------------------------------------------------------------------------------------------------ threads


def in_thread(act):
    """Run a function in a thread of its own, and return its exception, or None."""
    raised = []

    def run():
        try:
            act()
        except BaseException as error:
            raised.append(error)
    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


@case
def a_second_thread(ranks):
    with ranks.single_thread:
        with ranks.single_thread:  # the same thread may enter again
            pass
        if ranks.size > 1:
            for act in (lambda: ranks.handshake((SHARE,)), lambda: collectives.broadcast_object(ranks, 1),
                        lambda: ranks.announce_failure(ValueError(), False), lambda: ranks.mailbox.take()):
                thread, raised = in_thread(act)
                thread.join()
                assert isinstance(raised[0], mgpu.MgpuError) and 'two threads of rank' in str(raised[0])
    thread, raised = in_thread(lambda: collectives.all_gather_int(ranks, 1))  # one after the other they may
    thread.join()
    assert not raised


@case
def sums_on_a_thread_of_their_own(ranks):
    assert ranks.takes_threads
    rounds = [[give(ranks.rank + number, 10 ** 5, 'float32')] for number in range(4)]
    for number, arrays in enumerate(rounds):
        ranks.handshake((ADD,))  # while the thread may still be adding the arrays before
        if number:
            thread.join()  # noqa: F821  of the round before
        thread, raised = in_thread(functools.partial(ranks.all_reduce, arrays))
    thread.join()
    assert not raised
    for number, arrays in enumerate(rounds):
        check_same(arrays, [sum(give(rank + number, 10 ** 5, 'float32') for rank in range(ranks.size))])


# ----------------------------------------------------------------------------------------------------------- MPI jobs


def conformance(path):
    """Run all cases on the ranks of an MPI job, and a handshake that times out; each rank records the failed cases."""
    mgpu.init('a->cpu')
    ranks, failed = mpi_communicator(), []
    for name, run in CASES.items():
        try:
            run(ranks)
        except BaseException:
            failed.append('rank %d, %s: %s' % (ranks.rank, name, traceback.format_exc()))
            break  # the others are at another case
    is_late = ranks.rank == ranks.size - 1
    if not failed and not is_late:
        theano.config.mgpu.timeout = 1
        error = raised_by(lambda: ranks.handshake((AGREE,)))
        again = raised_by(lambda: ranks.handshake((AGREE,)))
        for each, text in ((error, 'at the end of a step, has waited 1 s for rank %d' % (ranks.size - 1)),
                           (again, 'this process has lost the other ranks of its job')):
            if type(each) is not mgpu.RankError or text not in str(each):
                failed.append('rank %d, after a time-out: %s' % (ranks.rank, each))
    with open('%s.%d' % (path, ranks.rank), 'w') as file:
        json.dump(failed, file)
    end = time.monotonic() + 10
    while not all(os.path.exists('%s.%d' % (path, rank)) for rank in range(ranks.size)) and time.monotonic() < end:
        time.sleep(.02)  # the first rank that ends has the job end
    if is_late and not failed:
        time.sleep(30)  # the others end the job
