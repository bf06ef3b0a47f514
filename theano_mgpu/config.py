"""The flags of theano_mgpu for several devices; `utils.flag_text` reads them, and Theano's own."""
from __future__ import annotations

from typing import Any, Callable, Mapping

from .errors import GraphError
from .utils.flag_text import GONE, OWN_FLAGS, Number, Ratio, own_flag

OWN_FLAGS.update({
    'mgpu.executor': ('auto', ('auto', 'serial', 'threads', 'mpi'),
                      'How replicas run: one after the other in one thread (serial), each in a thread (threads), or in '
                      'the processes that mpirun started (mpi). auto chooses mpi if there are several processes, else '
                      'according to the functions. With serial or threads each of several processes works by itself.'),
    'mgpu.data': ('whole', ('whole', 'sharded'),
                  'With several processes: each is given the whole batch and takes its part (whole), or each is '
                  'given its own part (sharded).'),
    'mgpu.gpus_per_process': (0, Number('contexts', 0),
                              'With several processes on a host: the contexts that each one takes; 0 divides all '
                              'of them equally.'),
    'mgpu.timeout': (600, Number('seconds', 0),
                     'With several processes: seconds that one waits for another in a step before it fails; ten '
                     'times as long where others may compile or read a file. Also the seconds in which devices have to '
                     'end an exchange by NCCL. 0 means no limit.'),
    'mgpu.update_on': ('auto', ('auto', 'device', 'sharded', 'host'),
                       'Where new parameters are computed: on each context (device); each on one of the contexts, '
                       'which sends it to the others (sharded); or once on the host, which then sends them '
                       '(host). The last two are for devices that are short of memory for the state of the optimizer. '
                       'auto is host where all contexts are on the CPU, else device; sharded or host if a device has '
                       'too little memory.'),
    'mgpu.collectives': ('auto', ('auto', 'host', 'nccl'),
                         'How devices exchange sums, such as gradients: through the host (host); directly, by NCCL, or '
                         'else it is an error (nccl); or by NCCL where all replicas are on different CUDA devices and '
                         'NCCL is installed (auto).'),
    'mgpu.overlap': ('auto', ('auto', 'False', 'True'),
                     'Whether the backward pass is cut into pieces, so that the gradients of one are exchanged while '
                     'the next is computed. auto does so for NCCL and for several hosts, once the exchange has taken a '
                     'noticeable part of the first steps.'),
    'mgpu.micro_batches': ('auto', Number('slices', 1, 'auto'),
                           'Slices that each batch of a replica is computed in, one after the other, where a call '
                           'does not say: on a model that is placed on several contexts they are a pipeline. auto is '
                           'one slice, and twice as many each time that a device has too little memory. Where slices '
                           'do not help, auto lets the program take other ways, too: see "What the program does for '
                           'you".'),
    'mgpu.shares': ('auto', Ratio(('auto', 'equal')),
                    'The samples of a batch that each device gets: as many for each (equal); by weights for the '
                    'contexts of all processes, in their order (3:1); or equal at first, then in proportion to the '
                    'measured speeds once these differ by more than 15 % (auto). The result is the same, to rounding.'),
    'mgpu.logical_shards': (0, Number('logical shards', 0),
                            'Parts that each batch is divided into, whatever computes them: 1, 2 or 8 devices, one '
                            'process or several then give the same bits. 8 is a good number; 0 divides a batch by the '
                            'devices, whose number rounding then depends on. See "The same bits on any number of '
                            'devices".'),
    'mgpu.cuda_graphs': ('auto', ('auto', 'off'),
                         'Whether the work of a CUDA device in a step is recorded, and then launched as a whole '
                         '(auto), or op by op (off), for those who look for a fault. The results have the same bits.'),
    'mgpu.recompute': ('False', ('False', 'True'),
                       'Whether, on a model that is placed on several contexts, the backward pass of each computes its '
                       'forward pass again, to save memory, where a call does not say.'),
    'mgpu.verify': ('False', ('False', 'True'),
                    'Whether the first batch of each function is computed on one device, too, and a difference beyond '
                    'rounding is an error.'),
    'mgpu.ledger': ('', 'the path of a file',
                    'File for a ledger of the run, which "theano-mgpu compare" compares with another one: digests of '
                    'the weights and the state after every k-th step; none by default.'),
    'mgpu.ledger_every': (100, Number('steps', 1), 'Steps from one line of the ledger to the next.'),
    'mgpu.check': (0, Number('steps', 0),
                   'Every k steps, replicas and processes compare checksums of the values that have to be the same, '
                   'and new values that are infinite or not a number are an error, which names the op and the samples. '
                   'So is such a loss in any step. 0 checks nothing.'),
    'mgpu.timeline': ('', 'the path of a .json file',
                      'File for a timeline of the whole script, written at its end, for https://ui.perfetto.dev; none '
                      'by default.'),
})

GONE.update({
    'mgpu.exchange': ('float32', 'gradients of 11 bits changed the answer; on slow networks, gradients are '
                                 'exchanged while others are computed'),
    'mgpu.batch_statistics': ('exact', 'statistics of a part of the batch changed the answer; those of the whole batch '
                                       'take one more exchange for each layer and direction'),
    'mgpu.random': ('exact', 'random numbers of each device changed the answer'),
})
SLICED_SHARDS = '%s and mgpu.logical_shards=%d: each logical shard is computed by itself, which takes the place of ' \
    'micro-batches. Leave out one of the two'


def check_together(value: Callable[[str], Any] = own_flag) -> None:
    """Raise a GraphError for flags, as `value` returns them, that exclude each other."""
    logical_shards, slices = int(value('mgpu.logical_shards')), str(value('mgpu.micro_batches'))
    if logical_shards and slices.isdigit() and int(slices) > 1:
        raise GraphError(SLICED_SHARDS % ('mgpu.micro_batches=' + slices, logical_shards))


def theanorc_text(contexts: str, floatx: str = 'float32', executor: str = 'auto', more: Mapping[str, str] = {}) -> str:
    """Return the text of a .theanorc for a context map, with more flags, by their names.

    >>> theanorc_text('dev0->cuda0;dev1->cuda1').splitlines()[:4]
    ['[global]', 'device = cpu', 'floatX = float32', 'contexts = dev0->cuda0;dev1->cuda1']
    """
    map_ = 'contexts = ' + contexts if contexts else '# contexts: without a map, each GPU is one, or else each core.'
    sections = {'global': ['device = cpu', 'floatX = ' + floatx, map_],
                'mgpu': ['# ' + OWN_FLAGS['mgpu.executor'][2], 'executor = ' + executor]}
    for name, value in more.items():
        section, _, option = name.rpartition('.')
        sections.setdefault(section or 'global', []).append('%s = %s' % (option, value))
    return '\n'.join('[%s]\n%s\n' % (section, '\n'.join(line.replace('\n', '\n\t') for line in lines))
                     for section, lines in sections.items())
