"""The probes of `theano-mgpu report`, each in a process of its own: they print their measurements."""
from __future__ import annotations

import contextlib
import functools
import glob
import itertools
import json
import os
import platform
import re
import tempfile
import threading
import time
import timeit
from typing import Any, Callable, Mapping, Sequence, Tuple

from ...compat import cuda_libraries
from ...devices import cards
from ...devices.context_map import Context, default_map, describe
from ...devices.contexts import OPTION, choose_contexts, configured, contexts, init
from ...utils.installed import installed
from ...utils.tables import bytes_text, counted
from .. import limited
from ..bench.measure import numbers_to
from ..output import quietly

Found = Tuple[bool, str]  # whether all is well, and a text for the table
PACKAGES = 'Theano', 'numpy', 'pygpu', 'Keras', 'mpi4py', 'h5py', 'nvidia-ml-py'
FILES = {'IOMMU': '/sys/class/iommu/*', 'NUMA nodes': '/sys/devices/system/node/node[0-9]*',
         'container': '/.dockerenv', 'container (podman)': '/run/.containerenv'}
SMI = [['--query-gpu=index,name,pci.bus_id,driver_version,memory.total,memory.used,compute_mode,persistence_mode,'
        'mig.mode.current,ecc.mode.current,display_active,pcie.link.gen.max,pcie.link.width.current,utilization.gpu',
        '--format=csv'], ['topo', '-m'], ['topo', '-p2p', 'r']]
LINK = re.compile(r'\b(?:NV\d+|PIX|PXB|PHB|NODE|SYS)\b')  # as nvidia-smi writes how two cards are linked
MEGABYTES = 64
SIZES = 1 << 7, 1 << 15, 1 << 20, 1 << 25  # elements of sums, of two dtypes, on each card
STEPS, UNITS = 6, 256
ROUNDS = 7
TOLERANCE = 1e-4  # of the largest weight


def devices(chosen: str) -> Found:
    """Return the map of the contexts that options choose, or else the default; two of them share a single card."""
    chosen = json.loads(chosen)
    some = choose_contexts(chosen, OPTION) if chosen else configured()
    if [context.kind for context in some] == ['cuda']:
        return True, default_map([some[0].device] * 2)
    return True, describe(some)


def machine() -> Found:
    """Print the parts of the machine, and the links of its cards."""
    found = cards.cards()
    for card in found:
        print('%s: %s, %s, at %s' % (card.device, card.name, bytes_text(card.memory), card.bus_id))
    with contextlib.suppress(OSError):
        print(''.join(line for path in ('/etc/os-release', '/proc/driver/nvidia/version', '/proc/meminfo')
                      if os.path.exists(path) for line in open(path)
                      if line.startswith(('PRETTY_NAME', 'NVRM', 'MemTotal', 'MemAvailable'))))
    print('\n'.join('%s: %s' % (name, ' '.join(map(os.path.basename, sorted(glob.glob(pattern)))) or 'none')
                    for name, pattern in FILES.items()))
    print(', '.join('%s %s' % (name, installed(name) or 'none') for name in PACKAGES))
    texts = []
    for words in SMI if found else ():
        ended = limited.run(['nvidia-smi', *words], 10)
        texts.append(ended.text)
        print(ended.text)
        if ended.code == limited.MISSING:
            break
    links = dict.fromkeys(link for text in texts[1:2] for line in text.splitlines() if line.startswith('GPU')
                          for link in LINK.findall(line))
    kinds = ['%d x %s' % (len(list(alike)), name) for name, alike in itertools.groupby(
        sorted(card.name.strip() for card in found))]
    driver = cuda_libraries.survey().libraries.get('libcuda.so')
    what = kinds or [driver.problem if driver and driver.problem else 'no NVIDIA GPU']
    return True, ', '.join([*what, *['links ' + ' '.join(links)] * bool(links),
                            counted(os.cpu_count() or 1, 'core'), 'Linux ' + platform.release()])


def doctor() -> Found:
    """Run the checks of `theano-mgpu doctor`."""
    from ..doctor import as_text, diagnose, host_checks
    statuses: dict[str, list[str]] = {}
    for name, finding in diagnose(host_checks.Setup()):
        print(as_text(name, finding), flush=True)
        statuses.setdefault(finding.status, []).append(name)
    listed = ['%s: %s' % (status, ', '.join(statuses[status])) for status in ('fail', 'warn') if status in statuses]
    return 'fail' not in statuses, '; '.join(listed) or 'all is well'


def copies() -> Found:
    """Measure copies between the host and each card, of one card and of all at once, and between cards."""
    import numpy as np

    from ...devices import page_locked, peers
    from ...devices.contexts import gpu_context
    from ...devices.transfers import DeviceMemory
    opened, n = _opened(), MEGABYTES << 18
    there = [DeviceMemory(context).zeros((n,), 'float32') for context in opened]
    memories = {'other': [np.zeros(n, 'float32') for _ in opened],
                'page-locked': [page_locked.zeros(n, 'float32', [context]) for context in opened]}

    def rate(arrays: Sequence[int], way: str, memory: str) -> float:
        def copy() -> None:
            for i in arrays:
                getattr(there[i], way)(memories[memory][i])
            for i in arrays:
                there[i].sync()
        return len(arrays) * 4e-9 * n / _seconds(copy)
    for i, context in enumerate(opened):
        print(context.device, ', '.join('%s memory, %s: %.1f GB/s' % (memory, way, rate([i], way, memory))
                                        for memory in memories for way in ('write', 'read')))
    one, every = rate([0], 'write', 'page-locked'), rate(range(len(opened)), 'write', 'page-locked')
    text = 'to a card %.1f GB/s page-locked, %.1f other' % (one, rate([0], 'write', 'other'))
    wrong = []
    for a, b in itertools.combinations(range(len(opened)), 2):
        move = functools.partial(lambda a, b: there[a].transfer(gpu_context(opened[b])).sync(), a, b)
        before = _seconds(move)
        path = peers.path(gpu_context(opened[a]), gpu_context(opened[b]))
        pair = '%s and %s: copies go %s, %.1f GB/s (%.1f before access was asked for)' % (
            opened[a].device, opened[b].device, path, 4e-9 * n / _seconds(move), 4e-9 * n / before)
        print(pair)
        wrong += [pair] * (path == peers.WRONG)
        if (a, b) == (0, 1):
            text += ', to all at once %.1f; %s' % (every, pair)
    return not wrong, '; '.join(wrong) or text


def nccl() -> Found:
    """Connect 2, 4, ... cards by NCCL, and measure sums of several sizes, whose results are compared."""
    from ...comm.communicator import Communicator
    from ...devices import nccl as module
    from ...devices.contexts import card_of, gpu_context
    from ...devices.first_exchange import forget
    from ...devices.nccl_trial import Trial
    opened, text = _opened(), ''
    for n in numbers_to(len(opened))[1:]:
        some = opened[:n]
        forget([('', card_of(context)) for context in some])
        began, why_not = time.perf_counter(), module.reason_against(some, 'auto')
        failure = why_not or module.connect(some, Communicator())
        if failure:
            return bool(why_not), failure
        text = '%d cards: connected in %.1f s' % (n, time.perf_counter() - began)
        print(text)
        communicator, least = module.communicator_of(some, 1), min(gpu_context(each).total_gmem for each in some)
        for size in SIZES:
            trial = Trial(some, 0, n, least, [size])
            failure = trial.failure(communicator)
            if failure:
                return False, failure
            figure = 'sums of %s at %.2f GB/s' % (bytes_text(trial.bytes), trial.rate(communicator) / 1e9)
            print(figure)
        text += '; ' + figure
    return True, text


def abort() -> Found:
    """Leave out one card's part of an exchange, and compute a step once it was aborted."""
    import numpy as np

    from ...comm.communicator import Communicator
    from ...devices import nccl as module
    from ...devices.exchange_operations import MESSAGE, NO_COPIES, Collectives
    from ...devices.transfers import DeviceMemory
    from ...errors import ExchangeError
    opened = _opened()[:2]
    failure = module.reason_against(opened, 'auto') or module.connect(opened, Communicator())
    if failure:
        return False, failure
    place = DeviceMemory(opened[0]).zeros((8,), 'float32').gpudata
    nothing, one = np.zeros((2, 1), 'uint64'), np.ones(1, 'int32')
    received = np.array([[place], [0]], 'uint64')  # the first card waits for a message that is never sent
    began = time.perf_counter()
    try:
        module.communicator_of(opened, 1).exchange(NO_COPIES, Collectives(
            nothing, received, np.array([8], 'uint64'), 7 * one, MESSAGE * one, one, 0 * one), 5)
        module.communicator_of(opened, 1).wait()
    except ExchangeError as error:
        print('expected, as one of the cards stays away: %s' % error)
    else:
        return False, 'an exchange without one of its cards has ended'
    text = 'ended after %.1f s (limit 5 s)' % (time.perf_counter() - began)
    reference, after = (_train(contexts=[context.name for context in opened[:n]])[0] for n in (1, 2))
    return _difference(reference, after) < TOLERANCE, text + ', and then a step over two cards is right'


def equal() -> Found:
    """Compare a model after some steps, in each way to compute them, with its weights on one context."""
    opened = contexts()
    names = [context.name for context in opened]
    expected, _ = _train(contexts=names[:1])
    ways: dict[str, Callable[[], Any]] = {'all contexts': _train}
    ways['sums through the host'] = lambda: _train({'mgpu.collectives': 'host'})
    ways['sharded update'] = lambda: _train(update_on='sharded')
    ways['micro-batches'] = lambda: _train(micro_batches=2)
    if len(names) > 1:
        ways['placed on two contexts'] = lambda: _train(place=names[1])
    if opened[0].kind == 'cuda':
        ways['memory freed by a thread'] = lambda: _beside_frees(opened, _train)
        ways['other names'] = lambda: _train(contexts=init(describe(
            [context._replace(name='other%d' % i) for i, context in enumerate(opened)])))
    shards = {'mgpu.logical_shards': 8, 'mgpu.shares': 'equal'}
    numbers = numbers_to(len(names))
    bits = [_train(shards, contexts=names[:n])[0] for n in numbers]
    alike = all((a == b).all() for other in bits for a, b in zip(bits[0], other))
    said = 'the same bits' if alike else 'OTHER bits'
    print('8 logical shards on %s contexts: %s' % (', '.join(map(str, numbers)), said), flush=True)
    differences = {}
    for way, train in ways.items():
        values, seconds = train()
        differences[way] = _difference(expected, values)
        print('%s: the weights differ by %.1e of the largest weight, %.2f ms a step'
              % (way, differences[way], 1e3 * seconds), flush=True)
    worst = max(differences, key=differences.__getitem__)
    return alike and differences[worst] < TOLERANCE, 'as on one context, to %.1e (%s); logical shards: %s' % (
        differences[worst], worst, said)


def scaling(model: str) -> Found:
    """Measure a model over contexts, and over ranks where MPI is installed, in turns; `theano-mgpu bench` prints it."""
    from ...comm import mpi_library
    from .. import main
    from ..bench.synthetic_models import MODELS
    if not installed('keras'):
        return True, 'not measured: Keras is not installed'
    n = len(configured())
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, 'bench.json')
        has_mpi = installed('mpi4py') is not None and mpi_library.probe().returncode == 0
        batch = n * MODELS[model].batch_size  # each device has the usual number of samples
        if main(['bench', '--model', model, '--batch-size', str(batch), '--rounds', str(ROUNDS), '--json', path,
                 *['--ranks', str(n)] * has_mpi]):
            return False, 'bench has failed'
        with open(path) as file:
            rows = json.load(file)['rows']
    return True, '1 context %.1f ms a step; as many times as fast, by the median of the ratios of %s: %s' % (
        1e3 * rows['1 context']['seconds'], counted(ROUNDS, 'round'), ', '.join(
            '%s %.2f' % (title, row['speedup']) for title, row in rows.items() if title != '1 context'))


def _opened() -> list[Context]:
    """Open the contexts, and return one for each CUDA device."""
    with quietly():
        return list({context.device: context for context in contexts() if context.kind == 'cuda'}.values())


def _seconds(work: Callable[[], Any]) -> float:
    """Return the shortest time of three calls, after one that does not count."""
    return min(timeit.repeat(work, number=1, repeat=4)[1:])


def _train(flags: Mapping[str, Any] = {}, place: str | None = None, **options: Any) -> tuple[list[Any], float]:
    """Return the weights of an MLP with batch normalisation after some steps, and the seconds of the last step."""
    import numpy as np
    import theano
    import theano.tensor as T

    from ... import placement, training_function
    rng, x, t = np.random.RandomState(0), T.fmatrix('x'), T.ivector('t')
    params = [theano.shared((rng.randn(*size) / UNITS ** .5).astype('float32'))
              for size in ((32, UNITS), (UNITS, UNITS), (UNITS, 10))]
    gamma, beta = theano.shared(np.ones(UNITS, 'float32')), theano.shared(np.zeros(UNITS, 'float32'))
    hidden = T.nnet.bn.batch_normalization_train(T.tanh(T.dot(x, params[0])), gamma, beta, axes=(0,))[0]
    last = T.tanh(T.dot(hidden, params[1]))
    if place:
        placement.place(last, place)
    loss = T.nnet.categorical_crossentropy(T.nnet.softmax(T.dot(last, params[2])), t).mean()
    params += [gamma, beta]
    with theano.configparser.change_flags(**flags):
        step = training_function([x, t], loss, params, lambda gradients, params: [
            (param, param - np.float32(.1) * gradient) for param, gradient in zip(params, gradients)], **options)
        for i in range(STEPS):
            size = 61 - 7 * (i % 3)
            step(rng.randn(size, 32).astype('float32'), rng.randint(0, 10, size).astype('int32'))
    return [param.get_value() for param in params], step.seconds


def _difference(expected: Sequence[Any], values: Sequence[Any]) -> float:
    """Return the largest difference of weights, relative to the largest weight of each array."""
    return max(float(abs(a - b).max() / abs(a).max()) for a, b in zip(expected, values))


def _beside_frees(opened: Sequence[Context], train: Callable[[], Any]) -> Any:
    """Train while a thread takes and frees page-locked memory: a free waits for all cards."""
    from ...devices import page_locked
    over = threading.Event()

    def free() -> None:
        while not over.wait(1e-3):
            page_locked.zeros(1 << 18, 'float32', opened)
    thread = threading.Thread(target=free, daemon=True)
    thread.start()
    try:
        return train()
    finally:
        over.set()
        thread.join()
