""".ci/test-gpu, which `make test-gpu` runs on a machine with GPUs."""
import subprocess
import sys
from pathlib import Path

import cuda_on_cpu
import pytest

CHECK = Path(__file__).parents[2] / '.ci' / 'test-gpu'


@pytest.mark.slow_with('1--dev0->cuda0;dev1->cuda0')
@pytest.mark.skipif(cuda_on_cpu.unavailable() is not None, reason=cuda_on_cpu.unavailable() or '')
@pytest.mark.parametrize('devices, flags, contexts', [(1, '', 'dev0->cuda0;dev1->cuda0'),
                                                      (2, 'contexts=a->cuda1;b->cuda1', 'a->cuda1;b->cuda1')])
def test_two_contexts_share_one_device(devices, flags, contexts, tmp_path):
    """NCCL, which refused them, counted as a step that has failed; one context alone showed nothing of the package."""
    report = tmp_path / 'report.txt'
    done = subprocess.run([sys.executable, str(CHECK), '--only', 'machine', 'collectives', '--report', str(report)],
                          env=dict(cuda_on_cpu.environment(devices), THEANO_FLAGS=flags), capture_output=True,
                          text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    text = report.read_text()
    assert '\ncontexts %s\n' % contexts in text and sys.executable not in text
    machine, collectives = [line.split() for line in text.splitlines() if line.startswith(('machine ', 'collectives '))]
    assert machine[:2] == ['machine', 'ok'] and 'stand-in,' in machine
    assert collectives[:3] == ['collectives', 'left', 'out'] and 'share' in collectives
