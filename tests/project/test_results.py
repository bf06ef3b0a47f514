"""The results fit on a page, their picture shows the table, their commands exist; all suites of tests are listed."""
import html
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / 'benchmarks' / 'RESULTS.md').read_text(encoding='utf-8')
TABLE = re.findall(r'^\|.*', PAGE.partition('![')[0], re.MULTILINE)[2:]  # the first one, without its head


def cells(line):
    return [cell.strip() for cell in line.strip('|').split('|')]


def test_the_page_is_short():
    assert len(PAGE.split()) <= 2500 and 0 < len(TABLE) <= 15


def test_a_row_says_how_it_was_measured():
    for compared, ratio, command, source in map(cells, TABLE):
        assert ' / ' in compared and len(compared) <= 60, '%s: a longer text leaves the picture' % compared
        assert re.fullmatch(r'\d+\.\d+( \(\d+\.\d+–\d+\.\d+\))?', ratio), ratio
        assert command == 'the same' or 'benchmarks/' in command, command
        assert re.fullmatch(r'[\w-]+(, quiet|, busy)?, \d{4}-\d\d-\d\d, [0-9a-f]{7,}', source), source


def test_the_picture_shows_the_table():
    """Read the rows back from the picture; tests/project/test_docs.py draws it anew and compares."""
    picture = html.unescape((ROOT / 'docs' / 'pictures' / 'ratios.svg').read_text(encoding='utf-8'))
    texts = re.findall(r'<text [^>]*>([^<]*)</text>', picture.partition('slower →')[2])
    rows = [(compared.replace('`', ''), ratio.split()[0]) for compared, ratio, *_ in map(cells, TABLE)]
    assert list(zip(texts[0:-1:2], texts[1::2])) == rows
    assert '](../docs/pictures/ratios.svg)' in PAGE


def test_commands_of_the_page_exist():
    """Each script of a command is there, and so is each option, in the script or in a module that makes its parser."""
    bench = (ROOT / 'theano_mgpu' / 'cli' / 'bench' / '__init__.py').read_text(encoding='utf-8')
    lines = re.findall(r'^    (.*)$', PAGE.replace('\\\n', ''), re.MULTILINE)
    commands = [line for line in lines + [cells(row)[2].strip('`') for row in TABLE] if 'benchmarks/' in line]
    assert len(commands) > 20
    for command in commands:
        _, name, options = re.fullmatch(r'(.*?)benchmarks/(\w+\.py)(.*)', command).groups()
        text = bench + ''.join((ROOT / 'benchmarks' / each).read_text(encoding='utf-8')
                       for each in {name, 'contest.py', 'turns.py'})
        for option in re.findall(r'--[a-z-]+', re.sub(r"'[^']*'", '', options)):
            assert "'%s'" % option in text, '%s: %s' % (name, option)


def test_the_page_of_tests_has_every_suite():
    targets = re.findall(r'^(test(?!-all)[a-z-]*|docs):', (ROOT / 'Makefile').read_text(encoding='utf-8'), re.MULTILINE)
    rows = re.findall(r'^\| `make ([a-z-]+)', (ROOT / 'docs' / 'tests.md').read_text(encoding='utf-8'), re.MULTILINE)
    assert len(targets) > 10 and sorted(rows) == sorted(targets)
