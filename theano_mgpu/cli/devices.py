"""`theano-mgpu devices`: list contexts, with device, name, memory and utilisation.

The contexts come from THEANO_FLAGS or .theanorc; if there are none, this machine's devices are listed.
CUDA devices are left out, with a note, if other users compute on them, as far as nvidia-ml-py tells; if
they have less than a quarter of the largest one's memory, or half of it and a display; or if no library
supports them. --contexts takes them.
BUSY is an NVIDIA device's utilisation, if nvidia-ml-py is installed. OpenCL does not report free
memory: for its devices FREE is the largest single array that fits. A device without a context is a
CPU that OpenCL offers: `cpu` is faster, so it is used only if a context is mapped to it.
SMI and PCI BUS are nvidia-smi's number and the address of a CUDA device. They are shown where nvidia-smi
counts in another order than CUDA. With --watch, USED BY names the contexts that your processes have open
on each device, with rank and process id; nvidia-ml-py saves opening the devices to read their memory.
The exit code is 1 if a device cannot be opened.

examples:
  theano-mgpu devices
  theano-mgpu devices --watch
  theano-mgpu devices --contexts 'dev0->cuda0;dev1->cuda1'
  THEANO_FLAGS='contexts=dev0->opencl0:0' theano-mgpu devices --json
"""
from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from typing import Any, Sequence

from ..devices import cards, leases, nvml
from ..devices import discovery as hardware
from ..devices.context_map import Context, describe
from ..devices.contexts import configured, flagged, gpu_context, init
from ..utils.tables import bytes_text, table
from .output import note, print_json, quietly, tell
from .shared_arguments import add_contexts, selected

HEADER = ['CONTEXT', 'DEVICE', 'KIND', 'TYPE', 'NAME', 'FREE', 'TOTAL', 'BUSY']
NUMBERS = {HEADER.index(title) for title in ('FREE', 'TOTAL', 'BUSY')}
IN_SMI = ['SMI', 'PCI BUS']
WATCHED = ['DEVICE', 'NAME', 'USED', 'TOTAL', 'BUSY', 'USED BY']
CLEAR = '\x1b[H\x1b[J'  # to the first line, and clear the screen below


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    add_contexts(parser)
    parser.add_argument('--watch', metavar='SECONDS', type=seconds, nargs='?', const=1.0,
                        help='refresh the table each second, or after so many seconds, until Ctrl-C: memory and '
                        'utilisation of each device, and the contexts and ranks on it')
    parser.add_argument('--json', action='store_true', help='print JSON: bytes, percent, and null for what is unknown')


def seconds(text: str) -> float:
    """Return a number of seconds above 0 that is an argument.

    Examples
    --------
    >>> seconds('.5')
    0.5
    """
    with contextlib.suppress(ValueError):
        if 0 < float(text) < 86400:
            return float(text)
    raise argparse.ArgumentTypeError('%r is not a number of seconds above 0' % text)


def run(args: argparse.Namespace) -> int:
    """Print the table, or JSON; return 1 if a device could not be opened, else 0."""
    chosen = selected(args)
    contexts = chosen or configured()
    if args.watch:
        return watch(contexts, args.watch)
    all_cards = cards_of(contexts)
    entries = [look_at(context, all_cards.get(context.device)) for context in contexts]
    if not chosen and not flagged():
        entries += [dict(look_at(Context('unused%d' % i, device, 'opencl')), context=None)
                    for i, device in enumerate(hardware.opencl_cpus())]
    if args.json:
        print_json([{key: value for key, value in entry.items() if key != 'reason'} for entry in entries])
    else:
        in_smi = cards.differ(list(all_cards.values()))
        print(table([HEADER + IN_SMI * in_smi] + [row(entry, in_smi) for entry in entries], right=NUMBERS))
    failed = [entry['error'] for entry in entries if entry['error']]
    sys.stdout.flush()
    for error in failed:
        tell('error: %s' % error)
    note(cards.order_note(list(all_cards.values())))
    return 1 if failed else 0


def cards_of(contexts: Sequence[Context]) -> dict[str, cards.Card]:
    """Return the cards of this machine, by their devices; none if no context is on one."""
    return {card.device: card for card in cards.cards()} if any(c.kind == 'cuda' for c in contexts) else {}


def look_at(context: Context, card: cards.Card | None = None, by_nvml: bool = False) -> dict[str, Any]:
    """Read the status of a context's device, in bytes and percent: `by_nvml`, or else once the context is open.

    ``error`` is the whole message and ``reason`` its short form, both None if the device opened.
    """
    entry: dict[str, Any] = dict(
        context=context.name, device=context.device, kind=context.kind, type=None, name=None, free_bytes=None,
        total_bytes=None, utilisation_percent=None, error=None, reason=None)
    if card:
        entry.update(pci_bus_id=card.bus_id, nvidia_smi_number=card.smi_number)
    try:
        use = nvml.use(card.bus_id) if card and by_nvml else None
        if card and use:
            status = hardware.DeviceStatus(card.name, *use)
        else:
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


def row(entry: dict[str, Any], in_smi: bool) -> list[str]:
    """Return one line of the table, as cells; with the columns `IN_SMI`, if `in_smi` says so."""
    cells = [entry['context'] or '-', entry['device'], entry['kind'], entry['type'] or '-']
    if entry['error']:
        return cells + ['cannot be opened: %s' % entry['reason']]
    return cells + [entry['name'], bytes_text(entry['free_bytes']), bytes_text(entry['total_bytes']),
                    text_of(entry['utilisation_percent'], '%d %%')] + [
                        text_of(entry.get('nvidia_smi_number')), text_of(entry.get('pci_bus_id'))] * in_smi


def text_of(value: Any, form: str = '%s') -> str:
    """Return a cell for a value; a dash for None."""
    return '-' if value is None else form % value


def watch(contexts: Sequence[Context], interval: float) -> int:
    """Print a table of devices, of their used memory and of the contexts on them, again and again until Ctrl-C."""
    on_terminal = sys.stdout.isatty()
    try:
        while True:
            text = table(watched_rows(contexts), right={WATCHED.index(title) for title in ('USED', 'TOTAL', 'BUSY')})
            print(CLEAR + text if on_terminal else text + '\n', flush=True)
            time.sleep(interval)
    except KeyboardInterrupt:
        return 0


def watched_rows(contexts: Sequence[Context]) -> list[list[str]]:
    """Return the lines of the table of `watch`, as cells: one for each device."""
    all_cards = cards_of(contexts)
    others = [occupant for occupant in leases.occupants() if occupant.pid != os.getpid()]
    in_smi = cards.differ(list(all_cards.values()))
    rows = [['SMI'] * in_smi + WATCHED]
    for context in {context.device: context for context in contexts}.values():
        card = all_cards.get(context.device)
        entry = look_at(context, card, by_nvml=True)
        free, total = entry['free_bytes'], entry['total_bytes']
        rows.append([text_of(entry.get('nvidia_smi_number'))] * in_smi + [
            context.device, entry['name'] or 'cannot be opened: %s' % entry['reason'],
            bytes_text(None if free is None or total is None else total - free), bytes_text(total),
            text_of(entry['utilisation_percent'], '%d %%'),
            used_by(others, card.place if card else context.device)])
    return rows


def used_by(occupants: Sequence[leases.Lease], place: str) -> str:
    """Return the contexts on a device, with the ranks and processes that have them open, as text.

    Examples
    --------
    >>> lease = leases.Lease('lease-x', -1)
    >>> lease.pid, lease.contexts = 71, [leases.Held('dev0', 'cuda0', '0000:01:00.0')]
    >>> used_by([lease], '0000:01:00.0')
    'dev0 (process 71)'
    """
    return ', '.join('%s%s (process %d)' % (name, ' of rank %d' % occupant.rank if occupant.size > 1 else '',
                                            occupant.pid)
                     for occupant in occupants for name, *held in occupant.contexts if place in held) or '-'
