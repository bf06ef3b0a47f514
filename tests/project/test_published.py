"""Predictions for machines whose speeds others have published: docs/guide/predicted.md has the computed tables."""
import re
from pathlib import Path

import published
import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / 'docs' / 'guide' / 'predicted.md').read_text(encoding='utf-8')


def test_the_page_has_the_computed_tables():
    for text in (published.summary(), *published.tables()):
        assert text in PAGE, 'docs/guide/predicted.md: replace a table by this one\n%s' % text


def test_each_large_error_has_a_reason():
    """The page on CUDA says, too, that they are of eight GPUs."""
    reasons = PAGE.partition('## The errors')[2].partition('\n## ')[0].replace('`', '')
    for line in published.lines():
        large = [n for n in line.published for pair in line.pairs(n) if abs(published.error(*pair)) > 0.15]
        assert large in ([], [8])
        program, *others = line.table.split(', ')
        data = [each for each in others if each in ('ImageNet', 'synthetic')]
        assert not large or re.search(r'- \*\*%s,[^*]*%s[^*]* GPUs\.\*\*' % (
            program, '' if program == 'tensorpack' else (data or [line.model])[0]), reasons), line


@pytest.mark.parametrize('document', ['docs/cuda.md', 'benchmarks/RESULTS.md'])
def test_others_name_the_same_error(document):
    number, median, within = re.search(r'the model \| (\d+) \| (\d+) % \| (\d+)', published.summary()).groups()
    text = ' '.join((ROOT / document).read_text(encoding='utf-8').split())
    assert '%s %% in the median; %s of %s' % (median, within, number) in text
    of_v100 = [100 * published.error(*pair) for line in published.lines() if line.table == 'tensorpack, V100, NCCL'
               for pair in line.pairs(8)]
    assert document != 'docs/cuda.md' or 'V100 by NCCL are %.0f and %.0f %% too fast' % tuple(of_v100) in text


def test_a_row_that_gave_a_rate_is_not_counted():
    row, = [line for line in published.lines() if (line.table, line.model) == ('Theano-MPI, K80, NCCL', 'AlexNet')]
    assert row.pairs(2) == [] and row.exchange[8][0] == pytest.approx(row.exchange[8][1])


def test_a_prediction_by_hand():
    """ResNet-50 on eight V100 by NCCL: 14 messages of an eighth over NVLink, but for the hidden seven eighths."""
    row, = [line for line in published.lines() if (line.table, line.model) == ('tensorpack, V100, NCCL', 'ResNet-50')]
    exchange = 14 * (5e-6 + 4 * 25_557_032 / 8 / 100e9)
    assert row.predicted[8] == pytest.approx(8 * 32 / (32 / 318 + exchange / 8))
