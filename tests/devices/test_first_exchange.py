"""The outcome of a first exchange by NCCL, which is kept for later processes."""
from theano_mgpu.devices import first_exchange


def test_an_outcome_is_of_some_cards_and_one_start_of_the_machine(tmp_path, monkeypatch):
    """Settings of the BIOS change no earlier."""
    boot, devices = tmp_path / 'boot_id', [('host', '0000:01:00.0'), ('host', '0000:02:00.0')]
    boot.write_text('one')
    monkeypatch.setattr(first_exchange, 'BOOT', str(boot))
    monkeypatch.setattr(first_exchange, 'folder', lambda: str(tmp_path))
    first_exchange.keep(devices, 'NCCL has not ended')
    assert 'NCCL has not ended' in first_exchange.outcome(devices) and not first_exchange.outcome(devices[:1])
    boot.write_text('two')
    assert first_exchange.outcome(devices) == ''
