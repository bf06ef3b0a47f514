"""The cards behind CUDA's device numbers: name, PCI bus id, and the number by which nvidia-smi knows each one.

CUDA counts the fastest card first, and only the cards of CUDA_VISIBLE_DEVICES. nvidia-smi counts all cards by their PCI
bus ids.
"""
from __future__ import annotations

import ctypes
import os
import re
from typing import NamedTuple, Optional, Sequence, Tuple

from ..compat import cuda_libraries
from .discovery import decoded, nvml

PROC = '/proc/driver/nvidia/gpus'  # a folder for each card, named by its PCI bus id
SAME_ORDER = 'CUDA_DEVICE_ORDER=PCI_BUS_ID'


class Card(NamedTuple):
    """One CUDA device: its `device` (``'cuda0'``), name, PCI bus id, and nvidia-smi's number, None if unknown."""

    device: str
    name: str
    bus_id: str
    smi_number: Optional[int]


def cards() -> list[Card]:
    """Return the card of each CUDA device, in CUDA's order; no device is opened."""
    survey = cuda_libraries.survey()
    if not survey.capabilities:
        return []
    driver = ctypes.CDLL(survey.libraries['libcuda.so'].path)
    named = []
    for number in range(len(survey.capabilities)):
        name, bus_id = ctypes.create_string_buffer(256), ctypes.create_string_buffer(32)
        driver.cuDeviceGetName(name, len(name), number)
        driver.cuDeviceGetPCIBusId(bus_id, len(bus_id), number)
        named.append((name.value.decode('utf8', 'replace'), bus_id.value.decode()))
    # Where nothing tells of all cards, those that CUDA sees are all, if it is not told to hide some.
    seen = [] if 'CUDA_VISIBLE_DEVICES' in os.environ else [bus_id for _, bus_id in named]
    everywhere = sorted(map(bus_address, _bus_ids() or seen))
    return [Card('cuda%d' % number, name, bus_id,
                 everywhere.index(bus_address(bus_id)) if bus_address(bus_id) in everywhere else None)
            for number, (name, bus_id) in enumerate(named)]


def bus_address(bus_id: str) -> Tuple[int, ...]:
    """Return a PCI bus id as numbers: NVML writes eight digits of the domain, CUDA four.

    >>> bus_address('0000:0A:00.0') == bus_address('00000000:0a:00.0')
    True
    """
    return tuple(int(part, 16) for part in re.split('[:.]', bus_id))


def _bus_ids():
    """Return the PCI bus ids of all cards of this machine; none where neither NVML nor the driver's files tell."""
    with nvml() as library:
        if library is not None:
            handles = map(library.nvmlDeviceGetHandleByIndex, range(library.nvmlDeviceGetCount()))
            return [decoded(library.nvmlDeviceGetPciInfo(handle).busId) for handle in handles]
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
