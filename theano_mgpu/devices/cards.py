"""The cards behind CUDA's device numbers: name, PCI bus id, number of nvidia-smi; and which are left out by default.

CUDA counts the fastest card first, and only the cards of CUDA_VISIBLE_DEVICES. nvidia-smi counts all cards by their PCI
bus ids.
"""
from __future__ import annotations

import ctypes
import functools
import os
import re
from typing import Collection, Dict, NamedTuple, Optional, Sequence, Tuple

from ..compat import cuda_libraries
from ..utils.tables import bytes_text
from . import nvml

PROC = '/proc/driver/nvidia/gpus'  # a folder for each card, named by its PCI bus id
SAME_ORDER = 'CUDA_DEVICE_ORDER=PCI_BUS_ID'
# A card has little memory if the largest one has more than so many times as much; if it drives a display, half of that.
LITTLE = 4
SERVER = 'nvidia-cuda-mps'  # the beginning of the name of the process through which CUDA's MPS computes for all users


class Card(NamedTuple):
    """One CUDA device: its `device` (``'cuda0'``), name, PCI bus id, nvidia-smi's number, None if unknown, and memory.

    The memory is in bytes. A slice of a card (MIG) has the UUID `of_slice`: all slices have the bus id of the card.
    """

    device: str
    name: str
    bus_id: str
    smi_number: Optional[int]
    memory: int = 0
    of_slice: str = ''

    @property
    def place(self) -> str:
        """The place for which processes are counted: the PCI bus id, or the UUID of a slice."""
        return self.of_slice or self.bus_id


def cards() -> list[Card]:
    """Return the card of each CUDA device, in CUDA's order; no device is opened."""
    survey = cuda_libraries.survey()
    if not survey.capabilities:
        return []
    driver = ctypes.CDLL(survey.libraries['libcuda.so'].path)
    named = []
    for number in range(len(survey.capabilities)):
        name, bus_id = ctypes.create_string_buffer(256), ctypes.create_string_buffer(32)
        memory, uuid, of_slice = ctypes.c_size_t(), ctypes.create_string_buffer(16), ''
        driver.cuDeviceGetName(name, len(name), number)
        driver.cuDeviceGetPCIBusId(bus_id, len(bus_id), number)
        driver.cuDeviceTotalMem_v2(ctypes.byref(memory), number)
        title = name.value.decode('utf8', 'replace')
        if ' MIG ' in title:
            driver.cuDeviceGetUuid_v2(uuid, number)  # the first version gives the card's
            of_slice = uuid.raw.hex()
        named.append((title, bus_id.value.decode(), memory.value, of_slice))
    # Where nothing tells of all cards, those that CUDA sees are all, if it is not told to hide some.
    seen = [] if 'CUDA_VISIBLE_DEVICES' in os.environ else [bus_id for _, bus_id, *_ in named]
    everywhere = sorted(map(bus_address, nvml.bus_ids() or _in_proc() or seen))
    return [Card('cuda%d' % number, name, bus_id,
                 everywhere.index(bus_address(bus_id)) if bus_address(bus_id) in everywhere else None, memory, of_slice)
            for number, (name, bus_id, memory, of_slice) in enumerate(named)]


@functools.lru_cache(maxsize=None)
def left_out(devices: Tuple[str, ...], for_good: bool) -> Dict[str, str]:
    """Return the devices that are to be named if they are to be taken, each with the reason, the least bad ones first.

    A card is left out if a library does not support it, it has little memory, or other users compute on it; with
    `for_good`, what others do now does not count. Of cards that CUDA_VISIBLE_DEVICES names, or a scheduler by it, only
    those without a library are left out. All devices may be.
    """
    there = [card for card in cards() if card.device in devices]
    if len(there) < 2:
        return {}
    little, busy, unsupported = {}, {}, {card.device: cuda_libraries.why_not(card.device) for card in there}
    usable = sorted((card for card in there if not unsupported[card.device]), key=lambda card: -card.memory)
    uses = [] if 'CUDA_VISIBLE_DEVICES' in os.environ else nvml.uses(card.bus_id for card in usable)
    for card, (processes, display) in zip(usable, uses):
        others = [] if for_good else list(filter(is_of_another_user, processes))
        if card.memory * LITTLE < usable[0].memory * (1 + display):
            little[card.device] = 'it has %s of memory%s, and %s has %s' % (
                bytes_text(card.memory), ' and drives a display' * display, usable[0].device,
                bytes_text(usable[0].memory))
        elif others:
            busy[card.device] = 'other users compute on it, pid ' + ', '.join(map(str, others))
    return {device: why for reasons in (little, busy, unsupported) for device, why in reasons.items() if why}


def is_of_another_user(process: int) -> bool:
    """Return whether a process is known to be another user's."""
    try:
        if os.stat('/proc/%d' % process).st_uid == os.getuid():
            return False
        with open('/proc/%d/comm' % process) as file:
            return not file.read().startswith(SERVER)
    except OSError:
        return nvml.exists(process)  # there is one, which /proc hides


def left_out_note(out: Dict[str, str], taken: Collection[str], every: str) -> str:
    """Return a note about the cards of `left_out`; '' if there are none.

    `taken` has the cards that are taken all the same; `every` is the map of all devices.
    """
    said = ', '.join('%s is %s (%s)' % (device, 'taken all the same' if device in taken else 'left out', out[device])
                     for device in out)
    return said and "%s. Cards that you name are taken: --contexts '%s', or mgpu.init('...'), or the flag contexts" \
        % (said, every)


def bus_address(bus_id: str) -> Tuple[int, ...]:
    """Return a PCI bus id as numbers: NVML writes eight digits of the domain, CUDA four.

    >>> bus_address('0000:0A:00.0') == bus_address('00000000:0a:00.0')
    True
    """
    return tuple(int(part, 16) for part in re.split('[:.]', bus_id))


def _in_proc():
    return os.listdir(PROC) if os.path.isdir(PROC) else []


def differ(all_cards: Sequence[Card]) -> bool:
    """Return whether nvidia-smi has another number for a card than CUDA."""
    return any(card.smi_number is not None and card.device != 'cuda%d' % card.smi_number for card in all_cards)


def order_note(all_cards: Sequence[Card]) -> str:
    """Return a sentence about cards that nvidia-smi counts in another order; '' if there are none.

    >>> print(order_note([Card('cuda0', 'A100', '0000:81:00.0', 1), Card('cuda1', 'T4', '0000:01:00.0', 0)]))
    nvidia-smi counts cards by PCI bus, and CUDA by speed: cuda0 is GPU 1 of nvidia-smi (A100, 0000:81:00.0), cuda1 is
    GPU 0 of nvidia-smi (T4, 0000:01:00.0). CUDA_DEVICE_ORDER=PCI_BUS_ID in the environment gives both one order
    >>> order_note([Card('cuda0', 'A100', '0000:81:00.0', 3)])  # CUDA_VISIBLE_DEVICES=3
    ''
    """
    numbers = [card.smi_number for card in all_cards if card.smi_number is not None]
    if numbers == sorted(numbers):
        return ''
    return ('nvidia-smi counts cards by PCI bus, and CUDA by speed: %s. %s in the environment gives both one order'
            % (', '.join('%s is %s' % (card.device, in_smi(card)) for card in all_cards), SAME_ORDER))


def in_smi(card: Card) -> str:
    """Return a card as nvidia-smi shows it: ``'GPU 1 of nvidia-smi (A100, 0000:81:00.0)'``."""
    number = 'unknown to nvidia-smi' if card.smi_number is None else 'GPU %d of nvidia-smi' % card.smi_number
    return '%s (%s, %s)' % (number, card.name, card.bus_id)
