"""`theano-mgpu config`: print or write a .theanorc that maps contexts dev0, dev1, ... to devices.

The devices are this machine's; with --kind the file can be for another machine. If there are
more contexts than devices, the others get the next numbers (cuda2, cuda3), with a note on stderr;
`cpu` contexts all share the host. On a machine without a GPU, the file has no map: each core is a context.

With --from FILE, flags of an old .theanorc stay, as Theano 1.0 knows them: lib.cnmem is gpuarray.preallocate now, for
example. Notes say which ones are left out, and why. A device, such as gpu0, is left to the contexts.

examples:
  theano-mgpu config                                    look at it
  theano-mgpu config --write                            a new ~/.theanorc
  theano-mgpu config --from ~/.theanorc --write         one of Theano 0.x, as it reads today
  theano-mgpu config -n 4 --kind cuda > theanorc.cluster
  THEANORC=theanorc.cluster theano-mgpu doctor
"""
from __future__ import annotations

import argparse
import os
import shutil
import time

from .. import config
from ..compat import old_flags
from ..devices import cards, discovery
from ..devices.context_map import choose_devices, default_map, describe, parse_context_map
from ..utils.files import whole_text
from ..utils.flag_text import OWN_FLAGS, read_theanorc, theanorc_files
from .output import note
from .shared_arguments import add_contexts, selected


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    add_contexts(parser, '-n')
    parser.add_argument('--kind', choices=discovery.KINDS,
                        help='kind of device (default: cuda if there is one here, else opencl if that is not the '
                        'CPU, else cpu)')
    parser.add_argument('--from', dest='old', metavar='FILE',
                        help='convert an old .theanorc: keep its flags, as Theano 1.0 knows them')
    parser.add_argument('--write', action='store_true',
                        help='write ~/.theanorc, or the file that THEANORC names, and keep a copy of the old one')
    parser.add_argument('--floatx', choices=('float16', 'float32', 'float64'),
                        help="Theano's floatX (default: float32, or as in the old file)")
    parser.add_argument('--executor', choices=OWN_FLAGS['mgpu.executor'][1], default='auto',
                        help='how replicas are run (default: %(default)s)')
    parser.set_defaults(works_without_theano=True)


def run(args: argparse.Namespace) -> int:
    """Print or write the .theanorc; a note on stderr names devices that are not on this machine."""
    existing = discovery.discover(args.kind)[0] if args.kind else discovery.discover_best()
    out = cards.left_out(tuple(existing), for_good=True)
    note(cards.left_out_note(out, [], default_map(existing)))
    existing = [device for device in existing if device not in out] or existing
    if isinstance(args.contexts, (str, list)):
        map_ = describe(selected(args) or ())
    else:
        map_ = default_map(choose_devices(args.kind or str(discovery.kind_of(existing[0])), existing,
                                          args.contexts or len(existing) or 1))
    absent = [context.device for context in parse_context_map(map_)
              if context.device not in discovery.discover(context.kind)[0]]
    if absent:
        note('not on this machine: %s' % ', '.join(absent))
    note(cards.order_note(cards.cards()) if 'cuda0' in existing else '')
    kept = converted(args.old) if args.old else {'floatX': 'float32'}
    contexts = kept.pop('contexts', '')
    if args.contexts or args.kind or not contexts and existing != ['cpu']:
        contexts = map_
    floatx, device = kept.pop('floatX', 'float64'), kept.pop('device', 'cpu')
    if device != 'cpu':
        note('device = %s is left to the contexts, which are %s' % (device, contexts or 'the cores of the CPU'))
    executor = kept.pop('mgpu.executor', args.executor)
    text = config.theanorc_text(contexts, args.floatx or floatx, executor, kept)
    if args.write:
        write(theanorc_files()[-1], text)
    else:
        print(text, end='')
    return 0


def write(path: str, text: str) -> None:
    """Write a .theanorc, and keep a copy of the file that is there, whose name has the time."""
    copy = path + time.strftime('.%Y%m%d-%H%M%S')
    is_there = os.path.exists(path)
    if is_there:
        shutil.copy2(path, copy)
    with whole_text(path) as file:
        file.write(text)
    note('%s is written%s' % (path, '; %s is a copy of the old file, whose flags --from %s keeps' % (copy, copy)
                              if is_there else ''))


def converted(path: str) -> dict[str, str]:
    """Return the flags of an old .theanorc that Theano 1.0 knows; notes name the others, and say why."""
    from theano.configparser import _config_var_list
    open(path).close()  # an error where there is no such file
    known = {flag.fullname.lower(): flag for flag in _config_var_list}
    old = read_theanorc(path)
    new, said = old_flags.today(old)
    kept = {}
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
