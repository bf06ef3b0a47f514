"""`theano-mgpu config`: print a .theanorc that maps contexts dev0, dev1, ... to devices.

The devices are this machine's; with --kind the file can be for another machine. If there are
more contexts than devices, the others get the next numbers (cuda2, cuda3), with a note on stderr;
`cpu` contexts all share the host. On a machine without a GPU, the file has no map: each core is a context.

With --from FILE, flags of an old .theanorc stay, as Theano 1.0 knows them: lib.cnmem is gpuarray.preallocate now, for
example. Notes say which ones are left out, and why. A device, such as gpu0, is left to the contexts.

examples:
  theano-mgpu config > ~/.theanorc         a new file; add the lines to one that you have
  theano-mgpu config --from ~/.theanorc > new && mv new ~/.theanorc      one of Theano 0.x, as it reads today
  theano-mgpu config -n 4 --kind cuda > theanorc.cluster
  THEANORC=theanorc.cluster theano-mgpu doctor
"""
from __future__ import annotations

import argparse
from typing import Sequence

from .. import config
from ..compat import old_flags
from ..devices import cards, discovery
from ..devices.context_map import default_map
from ..parsing import MOST, MOST_DEVICES, shown, whole_number
from ..utils.flags import OWN_FLAGS, read_theanorc
from .output import note


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.add_argument('-n', '--contexts', dest='n', type=devices, metavar='N',
                        help="number of contexts (default: one for each GPU)")
    parser.add_argument('--kind', choices=discovery.KINDS,
                        help='kind of device (default: cuda if there is one here, else opencl if that is not the '
                        'CPU, else cpu)')
    parser.add_argument('--from', dest='old', metavar='FILE',
                        help='convert an old .theanorc: keep its flags, as Theano 1.0 knows them')
    parser.add_argument('--floatx', choices=('float16', 'float32', 'float64'),
                        help="Theano's floatX (default: float32, or as in the old file)")
    parser.add_argument('--executor', choices=OWN_FLAGS['mgpu.executor'][1], default='auto',
                        help='how replicas are run (default: %(default)s)')
    parser.set_defaults(works_without_theano=True)


def positive(text: str, most: int = MOST) -> int:
    """Return a whole number of at least 1 that is an argument.

    Examples
    --------
    >>> positive('4')
    4
    """
    number = whole_number(text, 1, most)
    if number is None:
        raise argparse.ArgumentTypeError('%s is not a whole number of at least 1, and at most %d' % (shown(text), most))
    return number


def devices(text: str) -> int:
    """Return a number of contexts or processes that is an argument.

    Examples
    --------
    >>> devices('4')
    4
    """
    return positive(text, MOST_DEVICES)


def run(args: argparse.Namespace) -> int:
    """Print the .theanorc to stdout; a note on stderr names devices that are not on this machine."""
    existing = discovery.discover(args.kind)[0] if args.kind else discovery.discover_best()
    chosen = choose_devices(args.kind or str(discovery.kind_of(existing[0])), existing, args.n or len(existing) or 1)
    absent = [device for device in chosen if device not in existing]
    if absent:
        note('not on this machine: %s' % ', '.join(absent))
    order = cards.order_note(cards.cards()) if 'cuda0' in existing else ''
    if order:
        note(order)
    kept = converted(args.old) if args.old else {'floatX': 'float32'}
    contexts = kept.pop('contexts', '')
    if args.n or args.kind or not contexts and chosen != ['cpu']:
        contexts = default_map(chosen)
    floatx, device = kept.pop('floatX', 'float64'), kept.pop('device', 'cpu')
    if device != 'cpu':
        note('device = %s is left to the contexts, which are %s' % (device, contexts or 'the cores of the CPU'))
    executor = kept.pop('mgpu.executor', args.executor)
    print(config.theanorc_text(contexts, args.floatx or floatx, executor, kept), end='')
    return 0


def converted(path: str) -> dict[str, str]:
    """Return the flags of an old .theanorc that Theano 1.0 knows; notes name the others, and say why."""
    from theano.configparser import _config_var_list
    open(path).close()  # an error where there is no such file
    known = {flag.fullname.lower(): flag for flag in _config_var_list}
    old = read_theanorc(path)
    new, said = old_flags.today(old)
    kept = {}
    if said:
        note(said)
    for name, value in new.items():
        try:
            flag = known[name.lower()]
            (flag.filter or str)(value)
            kept[flag.fullname] = value
        except KeyError:
            note('%s = %s is left out: Theano has no such flag' % (name, value))
        except Exception as error:  # of many kinds
            note('%s = %s is left out: %s' % (name, value, error))
    return {name: kept[name] for name in kept if kept[name] or not old.get(name)}


def choose_devices(kind: str, existing: Sequence[str], n: int) -> list[str]:
    """Return devices for `n` contexts: the existing ones, then the next numbers; ``cpu`` is shared by all contexts.

    Examples
    --------
    >>> choose_devices('cuda', ['cuda0'], 3)
    ['cuda0', 'cuda1', 'cuda2']
    >>> choose_devices('opencl', ['opencl0:0', 'opencl1:0'], 3)
    ['opencl0:0', 'opencl1:0', 'opencl0:1']
    >>> choose_devices('cpu', ['cpu'], 2)
    ['cpu', 'cpu']
    """
    if kind == 'cpu':
        return ['cpu'] * n
    numbered = [{'cuda': 'cuda%d', 'opencl': 'opencl0:%d'}[kind] % i for i in range(n)]
    return [*existing, *(device for device in numbered if device not in existing)][:n]
