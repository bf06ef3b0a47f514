"""`theano-mgpu devices`: a list of the contexts and their devices, with memory and utilisation.

BUSY is an NVIDIA device's utilisation, if nvidia-ml-py is installed. OpenCL does not report free
memory: for its devices FREE is the largest single array that fits. A device without a context is a
CPU that OpenCL offers: `cpu` is faster, so it is used only if a context is mapped to it.
The exit code is 1 if a device cannot be opened.

examples:
  theano-mgpu devices
  theano-mgpu devices --contexts 'dev0->cuda0;dev1->cuda1'
  THEANO_FLAGS='contexts=dev0->opencl0:0' theano-mgpu devices --json
"""
from __future__ import annotations

import argparse
import sys
from typing import Any

from ..devices import discovery as hardware
from ..devices.context_map import Context, describe, parse_context_map
from ..devices.contexts import configured, flagged, gpu_context, init
from ..errors import MgpuError
from ..utils.tables import table
from .output import human_bytes, print_json, quietly

HEADER = ['CONTEXT', 'DEVICE', 'KIND', 'TYPE', 'NAME', 'FREE', 'TOTAL', 'BUSY']
NUMBERS = {HEADER.index(title) for title in ('FREE', 'TOTAL', 'BUSY')}


def add_parser(sub: Any) -> None:
    """Add the command to argparse's sub-parsers."""
    parser = sub.add_parser('devices', help='list contexts: device, name, memory, utilisation',
                            epilog=(__doc__ or '').partition('\n\n')[2],
                            description='List the contexts of THEANO_FLAGS or .theanorc; if there are none, '
                                        "this machine's devices.",
                            formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--contexts', metavar='MAP', type=context_map,
                        help="list these instead, e.g. 'dev0->cuda0;dev1->cuda1' (quoted: > and ; are the shell's)")
    parser.add_argument('--json', action='store_true', help='print JSON: bytes, percent, and null for what is unknown')
    parser.set_defaults(run=run)


def context_map(text: str) -> list[Context]:
    """Parse a context map that is an argument; argparse needs an error of its own type for a malformed one."""
    try:
        return parse_context_map(text)
    except MgpuError as error:
        raise argparse.ArgumentTypeError(error) from error


def run(args: argparse.Namespace) -> int:
    """Print the table, or JSON; return 1 if a device could not be opened, else 0."""
    entries = [look_at(context) for context in args.contexts or configured()]
    if not args.contexts and not flagged():
        entries += [dict(look_at(Context('unused%d' % i, device, 'opencl')), context=None)
                    for i, device in enumerate(hardware.opencl_cpus())]
    if args.json:
        print_json([{key: value for key, value in entry.items() if key != 'reason'} for entry in entries])
    else:
        print(table([HEADER] + [row(entry) for entry in entries], right=NUMBERS))
    failed = [entry['error'] for entry in entries if entry['error']]
    sys.stdout.flush()
    for error in failed:
        print('theano-mgpu: error: %s' % error, file=sys.stderr)
    return 1 if failed else 0


def look_at(context: Context) -> dict[str, Any]:
    """Open a context and read its device's status.

    Returns
    -------
    dict
        Bytes and percent; ``error`` is the whole message and ``reason`` its short form, both None
        if the device opened.
    """
    entry: dict[str, Any] = dict(
        context=context.name, device=context.device, kind=context.kind, type=None, name=None, free_bytes=None,
        total_bytes=None, utilisation_percent=None, error=None, reason=None)
    try:
        with quietly():
            init(describe([context]))
            status = hardware.status(context.device, gpu_context(context))
    # Drivers fail in many ways (GpuArrayException, NVMLError ...); the other devices are still shown.
    except Exception as error:
        entry.update(error=hardware.reason(error), reason=hardware.reason(error.__cause__ or error))
    else:
        entry.update(type=hardware.type_of(context.device), name=status.name, free_bytes=status.free_bytes,
                     total_bytes=status.total_bytes, utilisation_percent=status.utilisation)
    return entry


def row(entry: dict[str, Any]) -> list[str]:
    """Return one line of the table, as cells."""
    cells = [entry['context'] or '-', entry['device'], entry['kind'], entry['type'] or '-']
    if entry['error']:
        return cells + ['cannot be opened: %s' % entry['reason']]
    busy = entry['utilisation_percent']
    return cells + [entry['name'], human_bytes(entry['free_bytes']), human_bytes(entry['total_bytes']),
                    '-' if busy is None else '%d %%' % busy]
