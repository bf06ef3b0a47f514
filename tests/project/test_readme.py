"""The documents are right: their code runs, and the commands, files and sections that they name exist."""
import argparse
import ast
import doctest
import itertools
import json
import os
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

from theano_mgpu.cli import COMMANDS, make_parser
from theano_mgpu.cli.output import add_command
from theano_mgpu.utils.flag_text import OWN_FLAGS

import pytest
from support.parameters import slow_but
from support.processes import python

ROOT = Path(__file__).resolve().parents[2]
GUIDE = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob('docs/guide/*.md')) + [
    'docs/coming_from.md', 'docs/questions.md']
DOCUMENTS = ['README.md', 'ARCHITECTURE.md', 'CONTRIBUTING.md', 'CHANGELOG.md', 'docs/cuda.md',
             'docs/tests.md', 'docs/upstream_tests.md', 'examples/README.md', 'benchmarks/RESULTS.md'] + GUIDE
SITE = ['docs/index.md'] + sorted(str(path.relative_to(ROOT)) for path in ROOT.glob('docs/reference/*.md'))
SAME = 'same answer: the largest difference is'
QUICK = 'floatX=float32,mode=FAST_COMPILE'  # compiling would take most of the time


def text_of(document):
    return (ROOT / document).read_text(encoding='utf-8')


def python_blocks(document):
    return re.findall(r'```python\n(.*?)```', text_of(document), flags=re.DOTALL)


def commands(document):
    """Return a document's indented command lines without comments, joined where one ends with a backslash."""
    lines = re.findall(r'^    (.*)$', text_of(document).replace('\\\n', ''), flags=re.MULTILINE)
    return [line.split(' #')[0].strip() for line in lines]


def parsers():
    """Return the parser of each command of theano-mgpu, by its name."""
    sub = argparse.ArgumentParser(prog='theano-mgpu').add_subparsers()
    for command in COMMANDS:
        add_command(sub, command)
    return sub.choices


def prose(document):
    """Return a document without its code blocks."""
    return re.sub(r'```.*?```', '', text_of(document), flags=re.DOTALL)


def anchors(document):
    """Return the sections of a document as GitHub names them in links."""
    titles = re.findall(r'^#+ (.*)$', prose(document), flags=re.MULTILINE)
    return {re.sub(r'[^\w\- ]', '', title.lower()).replace(' ', '-') for title in titles}


# Runs each block with names of its own, as a reader who copies it does; all of them in one process, which is quicker.
RUN_BLOCKS = """
import json, sys
from importlib.util import find_spec
for document, blocks in json.load(sys.stdin):
    print('document', document)
    for block in blocks:
        if 'import optuna' in block and not find_spec('optuna'):
            continue  # tests/cli/test_children.py says so
        exec(compile(block, document, 'exec'), {'__name__': '__main__'})
"""


def run_blocks(documents, folder, flags):
    """Run the Python blocks of documents; return their output: a dict of str to str."""
    blocks = json.dumps([(document, python_blocks(document)) for document in documents])
    out = python('-c', RUN_BLOCKS, input=blocks, folder=folder, flags=flags).stdout
    parts = re.split(r'^document (.*)\n', out, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


def is_trained(out):
    """Return whether the weights that are printed, one a line, are close to 1, 1, 1."""
    return [round(float(value), 2) for value in re.findall(r'\[+ *([\d.]+) *\]', out)] == [1, 1, 1]


def test_python_blocks_run(tmp_path):
    """The blocks of README and of the guide run on two contexts."""
    out = run_blocks(['README.md'] + GUIDE, tmp_path, 'contexts=dev0->cpu;dev1->cpu,' + QUICK)
    assert is_trained(out['README.md']) and is_trained(out['docs/guide/theano.md'].partition('(7, 2)')[0])
    for document in ('README.md', 'docs/guide/theano.md', 'docs/guide/keras.md'):
        assert SAME in out[document]
    assert 'dev0 cpu cpu' in out['docs/guide/contexts.md'] and '(1000, 3)' in out['docs/guide/prediction.md']
    distances = dict(re.findall(r'^(.*): (\de-\d\d)$', out['docs/coming_from.md'], re.MULTILINE))
    assert len(distances) == 4 and float(distances.pop('theano_mgpu')) < 1e-6
    assert all('| %s | %s |' % each in text_of('docs/coming_from.md') for each in distances.items())


WAYS = {'run': ['run'], 'one': ['run', '--one'], 'launch': ['launch', '-n', '2', 'run']}
PLACED = 'give each one 2 contexts (launch --gpus-per-process 2)'  # the advice for a model on two devices
VERIFIED = 'verify compares one device with the contexts of one process'


def fits(block, way):
    """Return whether a block can be run in a way: with several processes, threads cannot predict at the same time."""
    return way != 'launch' or 'ThreadPoolExecutor' not in block


def keras_blocks():
    """Return the blocks with Keras, by their page and number."""
    return {'%s %d' % (document, number): block for document in ['README.md'] + GUIDE
            for number, block in enumerate(python_blocks(document))
            if re.search(r'^(from|import) (theano_mgpu\.)?keras', block, re.MULTILINE)}


@pytest.mark.mpi
@pytest.mark.parametrize('case', slow_but([('README.md 1', 'run'), ('docs/guide/keras.md 2', 'one')],
                                          [(name, way) for (name, block), way in itertools.product(
                                              keras_blocks().items(), WAYS) if fits(block, way)]), ids='-'.join)
def test_keras_blocks_run_under_run(case, tmp_path):
    """They ended in a circular import. Then the contexts that a block had chosen were replaced by others."""
    name, way = case
    block = keras_blocks()[name]
    if 'import optuna' in block and not find_spec('optuna'):
        pytest.skip('optuna is not installed; tests/cli/test_children.py says so')
    errors = [text for part, text in (('verify(', VERIFIED), ('mgpu.device(', PLACED))
              if part in block and way == 'launch']
    (tmp_path / 'block.py').write_text(block)
    done = python('-m', 'theano_mgpu', *WAYS[way], 'block.py', folder=tmp_path, flags=QUICK, expected=len(errors))
    assert all(text in done.stderr for text in errors), done.stderr
    assert ('nothing was divided' in done.stderr) == ('Dense' not in block), done.stderr
    if errors == [PLACED]:
        python('-m', 'theano_mgpu', 'launch', '-n', '2', '--gpus-per-process', '2', 'run', 'block.py', folder=tmp_path,
               flags=QUICK)


def test_python_blocks_run_on_the_contexts_of_the_machine(tmp_path):
    """The flags have no map of contexts."""
    on_cuda = any(name.startswith('CUDA_ON_CPU') for name in os.environ)  # GPUs need compiled functions
    flags = QUICK.replace('mode=FAST_COMPILE', 'optimizer=fast_compile') if on_cuda else QUICK
    out, = run_blocks(['docs/guide/theano.md'], tmp_path, flags).values()
    assert is_trained(out.partition('(7, 2)')[0]) and SAME in out


def imported(code):
    """Return the packages that code imports, in order."""
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    return [name.partition('.')[0] for node in sorted(nodes, key=lambda node: node.lineno)
            for name in ([each.name for each in node.names] if isinstance(node, ast.Import) else [node.module or ''])]


def examples_in_docstrings():
    for path in sorted((ROOT / 'theano_mgpu').rglob('*.py')):
        for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)):
                steps = doctest.DocTestParser().get_examples(ast.get_docstring(node) or '')
                yield path.name, ''.join(step.source for step in steps)


def test_no_example_imports_keras_or_theano_first():
    """Such an example ends with "No module named 'tensorflow'" in a new process; here Keras is imported already."""
    blocks = [(page, block) for page in ['README.md'] + GUIDE for block in python_blocks(page)]
    for place, code in blocks + [each for each in examples_in_docstrings() if 'keras' in imported(each[1])]:
        first = next((name for name in imported(code) if name in ('keras', 'theano', 'theano_mgpu')), None)
        assert first == 'theano_mgpu', '%s:\n%s' % (place, code)


def test_every_python_block_is_found():
    """A block in another form would not be run."""
    for document in ['README.md'] + GUIDE:
        text = text_of(document)
        others = text.count('```text plan=')  # tests/plan/test_plan.py makes these
        assert text.count('```') == 2 * (len(python_blocks(document)) + others) and '    import ' not in text, document


def test_lines_of_this_package_are_run():
    """Each line that the page of other programs gives is in one of its blocks, or is a command or a flag."""
    n_found = 0
    blocks = ''.join(python_blocks('docs/coming_from.md'))
    for section in re.split(r'^## ', text_of('docs/coming_from.md'), flags=re.MULTILINE)[1:]:
        title, *rows = [line for line in section.splitlines() if line.startswith('| ')] or ['']
        if '| here |' not in title:
            continue
        column = title.split('|').index(' here ')
        for code in re.findall('`([^`]+)`', ' '.join(row.split('|')[column] for row in rows)):
            flag, _, value = code.partition('=')
            assert code in blocks or parse_command(code) or flag in OWN_FLAGS and value, (title, code)
            n_found += 1
    assert n_found > 20


def test_short_pages_are_short():
    """README fits in a few screens, and an answer in five lines, its code aside."""
    assert len(text_of('README.md').splitlines()) <= 150
    answers = re.split('^## .*$', prose('docs/questions.md'), flags=re.MULTILINE)[1:]
    assert len(answers) == 16
    for answer in answers:
        assert 1 <= len([line for line in answer.splitlines() if line]) <= 5, answer


def test_the_table_of_flags_is_complete():
    """mgpu.shares and mgpu.tf32 were missing. The page that a row links to says something of the flag."""
    rows = re.findall(r'^\| `(mgpu\.\w+)` \|.*\]\(([^)#]+)', text_of('docs/guide/contexts.md'), re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(OWN_FLAGS)
    for name, page in rows:
        assert name.partition('.')[2] in text_of('docs/guide/' + page), name


def parse_command(line):
    """Parse the arguments of a line that calls theano-mgpu; exit for an unknown command or option."""
    found = re.search(r'(?:^| )(?:\.venv/bin/)?theano-mgpu (.*?)(?: > .*|   .*)?$', line)
    if found:
        make_parser().parse_args(shlex.split(found.group(1)))
    return bool(found)


@pytest.mark.parametrize('document', DOCUMENTS + SITE)
def test_commands_exist(document):
    targets = re.findall(r'^([a-z-]+):', (ROOT / 'Makefile').read_text(), flags=re.MULTILINE)
    for line in commands(document):
        parse_command(line)
        if line.startswith('make '):
            assert line.split()[1] in targets, line
    if document != 'CONTRIBUTING.md':  # whose example is a command that does not exist
        assert set(re.findall(r'`theano-mgpu ([a-z]+)', text_of(document))) <= set(parsers())
    for target in re.findall(r'`(?:\w+=\S+ )*make ([a-z-]+)', text_of(document)):
        assert target in targets, target


def test_examples_in_help_texts_exist():
    n_parsed = 0
    for name, parser in parsers().items():
        lines = re.findall(r'^  (.*theano-mgpu .*)$', parser.format_help().partition('examples:')[2], re.MULTILINE)
        assert lines, name
        n_parsed += sum(map(parse_command, lines))
    assert n_parsed > 20


@pytest.mark.parametrize('document', DOCUMENTS + SITE)
def test_links_lead_somewhere(document):
    for target, anchor in re.findall(r'\]\(([^)#\s]*)(?:#([^)\s]+))?\)', prose(document)):
        if target.startswith('http'):
            continue
        path = (ROOT / document).parent / target if target else ROOT / document
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(os.path.relpath(str(path), str(ROOT))), '%s#%s' % (target, anchor)


@pytest.mark.parametrize('document', DOCUMENTS + SITE)
def test_files_named_exist(document):
    """The files are paths from the root, such as `theano_mgpu/training.py`; in commands, too."""
    folders = r'(?<![\w/.-])((?:theano_mgpu|tests|benchmarks|examples|docs|\.ci)/[\w./-]*\w)'
    for name in set(re.findall(folders, text_of(document))):
        assert (ROOT / name).exists(), name


def test_each_page_is_listed_in_readme():
    for document in DOCUMENTS[1:]:
        assert '](%s)' % document in text_of('README.md'), document
