"""The pictures of the documentation: `python docs/pictures/draw.py` writes them beside this file.

The pictures are 480 pixels wide, so that their text is readable on a phone.
"""
import math
import re
from html import escape
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[2] / 'benchmarks' / 'RESULTS.md'
WIDTH = 480
INK, GREY, PAPER = '#1f2933', '#7b8794', '#ffffff'
BLUE, ORANGE, GREEN, PALE = '#cfe3f7', '#fbdcbc', '#cdebd3', '#eef1f4'
COLOURS = [BLUE, ORANGE]  # for dev0 and dev1
OF_NUMBER = ['#5aa0e0', '#6cc483', '#f0a04b']  # for 2, 4 and 8 GPUs


class Picture:
    """The elements of an SVG file, in pixels from the top left."""

    def __init__(self, height, title):
        self.height, self.title, self.elements = height, title, []

    def box(self, x, y, width, height, text='', fill=PALE, size=14, edge=GREY):
        """Add a box with centred lines of text."""
        self.elements.append('<rect x="%g" y="%g" width="%g" height="%g" rx="5" fill="%s" stroke="%s"/>'
                             % (x, y, width, height, fill, edge))
        lines = text.split('\n') if text else []
        for i, line in enumerate(lines):
            self.text(x + width / 2, y + height / 2 + (i - (len(lines) - 1) / 2) * (size + 4), line, size)

    def text(self, x, y, text, size=14, anchor='middle', colour=INK, weight='normal'):
        """Add a line of text with its middle at `y`. Text in backticks is code."""
        code = text.startswith('`')
        self.elements.append(
            '<text x="%g" y="%g" font-size="%g" text-anchor="%s" fill="%s" font-weight="%s"%s>%s</text>'
            % (x, y + size * 0.35, size, anchor, colour, weight,
               ' font-family="ui-monospace, Menlo, Consolas, \'DejaVu Sans Mono\', monospace"' * code,
               escape(text.strip('`'))))

    def label(self, x, y, text, size):
        """Add a line of text that begins at `x`, before a white ground that hides lines behind it."""
        self.elements.append('<rect x="%g" y="%g" width="%g" height="%g" fill="%s"/>'
                             % (x - 2, y - size * 0.7, len(text) * size * 0.56 + 4, size * 1.4, PAPER))
        self.text(x, y, text, size, 'start')

    def line(self, start, end, colour):
        """Add a straight line between two points."""
        self.elements.append('<line x1="%g" y1="%g" x2="%g" y2="%g" stroke="%s" stroke-width="1.5"/>'
                             % (*start, *end, colour))

    def dot(self, x, y, fill, edge=INK):
        """Add a small circle around a point."""
        self.elements.append('<circle cx="%g" cy="%g" r="4.5" fill="%s" stroke="%s"/>' % (x, y, fill, edge))

    def arrow(self, *points):
        """Add an arrow along some points."""
        self.elements.append('<polyline points="%s" fill="none" stroke="%s" stroke-width="1.5" marker-end="url(#tip)"/>'
                             % (' '.join('%g,%g' % point for point in points), INK))

    def svg(self):
        """Return the text of the file."""
        return '\n'.join([
            '<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" '
            'font-family="system-ui, -apple-system, \'Segoe UI\', \'DejaVu Sans\', sans-serif">'
            % (WIDTH, self.height, WIDTH, self.height),
            '<title>%s</title>' % escape(self.title),
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0,0 L8,4 L0,8 z" fill="%s"/></marker></defs>' % INK,
            '<rect width="%d" height="%d" rx="8" fill="%s"/>' % (WIDTH, self.height, PAPER),
        ] + self.elements + ['</svg>', ''])


def step():
    """Draw a training step over two contexts."""
    picture = Picture(470, 'A training step over two contexts')
    left, right, width = 120, 305, 160
    columns = [left, right]
    for y, name in [(104, 'scatter'), (174, 'forward,'), (192, 'backward'), (304, 'exchange'), (383, 'update')]:
        picture.text(14, y, name, anchor='start', weight='bold')
    picture.box(left, 18, right + width - left, 36, 'a batch of 32 samples', PALE)
    for number, x in enumerate(columns):
        colour, middle = COLOURS[number], x + width / 2
        picture.arrow((middle, 54), (middle, 86))
        picture.box(x, 86, width, 36, 'dev%d: 16 samples' % number, colour)
        picture.arrow((middle, 122), (middle, 156))
        picture.box(x, 156, width, 54, 'with its copy of\nthe parameters', colour)
        picture.arrow((middle, 210), (middle, 282))
        picture.text(middle + 8, 246, 'gradients', 13, 'start', GREY)
        picture.arrow((middle, 324), (middle, 356))
        picture.box(x, 356, width, 54, 'the same update\nof its copy', colour)
    picture.box(left, 284, right + width - left, 40, 'sum of the gradients of both', GREEN)
    picture.text(14, 442, 'After an error, no context keeps a new value.', 13, 'start', GREY)
    return picture


def pipeline():
    """Draw the clock cycles of a pipeline: two devices, four micro-batches."""
    n_slices, cell, top = 4, 66, 62
    picture = Picture(330, 'The clock cycles of a pipeline with two devices and four micro-batches')
    x0 = 72
    picture.text(14, 24, 'One batch in four slices, 0 to 3', weight='bold', anchor='start')
    for cycle in range(n_slices + 2):
        picture.text(x0 + cell * (cycle + 0.5), 48, str(cycle), 13, colour=GREY)
    picture.text(14, 48, 'cycle', 13, 'start', GREY)
    for device, name in enumerate(['dev0', 'dev1']):
        y = top + device * 100
        picture.text(14, y + 44, name, weight='bold', anchor='start')
        for cycle in range(n_slices + 2):
            x = x0 + cell * cycle
            picture.elements.append('<rect x="%g" y="%g" width="%g" height="88" rx="5" fill="none" stroke="#d5dae0"/>'
                                    % (x + 2, y, cell - 4))
            forward, backward = cycle - device, cycle - 2 + device
            if 0 <= forward < n_slices:
                picture.box(x + 6, y + 5, cell - 12, 36, 'forw. %d' % forward, BLUE, 13)
            if 0 <= backward < n_slices:
                picture.box(x + 6, y + 47, cell - 12, 36, 'back. %d' % backward, ORANGE, 13)
    picture.box(x0 + 6, 272, cell * (n_slices + 2) - 12, 36, 'then: sum of the gradients, update', GREEN)
    return picture


FINDINGS = [  # a finding of a run, the way that it takes then, and the flag or code that changes it
    ('calls are too short\nto divide', 'one device', '`--always`'),
    ('the devices differ\nin speed', 'shares by speed', '`mgpu.shares=3:1`'),
    ('a batch does not fit', 'slices', '`mgpu.micro_batches=4`'),
    ("the optimizer's state\ndoes not fit", 'sharded, or on the host', '`mgpu.update_on=host`'),
    ('the parameters\ndo not fit', 'a part on each device', "`with mgpu.device('dev1'):`"),
    ('a data set does not fit', 'batches are sent', ''),
    ('NCCL is installed', 'sums between devices', '`mgpu.collectives=host`'),
]


def automatic():
    """Draw the choices that the program makes."""
    row, top, left, width, right, answer = 66, 44, 12, 190, 256, 212
    picture = Picture(top + row * len(FINDINGS) + 4, 'What the program does for you')
    picture.text(left, 22, 'If a run finds that', weight='bold', anchor='start')
    picture.text(right, 22, 'it does this', weight='bold', anchor='start')
    picture.text(right + answer, 22, 'to change it', 12, 'end', GREY)
    for number, (finding, name, code) in enumerate(FINDINGS):
        y = top + row * number
        picture.box(left, y, width, 50, finding, PALE)
        picture.arrow((left + width, y + 25), (right, y + 25))
        picture.box(right, y, answer, 50, '%s\n' % name, GREEN)
        picture.text(right + answer / 2, y + 35, code, 11.5)
    return picture


def measured():
    """Return the rows of the first table of RESULTS.md: a name, the ratio as a text, its lowest and highest."""
    table = re.search(r'^\|.*\n\|[-|]+\n((?:\|.*\n)+)', RESULTS.read_text(encoding='utf-8'), re.MULTILINE).group(1)
    rows = []
    for line in table.splitlines():
        compared, ratio = (cell.strip() for cell in line.split('|')[1:3])
        number, lowest, highest = re.fullmatch(r'([\d.]+)(?: \(([\d.]+)–([\d.]+)\))?', ratio).groups()
        rows.append((compared.replace('`', ''), number, (float(lowest), float(highest)) if lowest else ()))
    return rows


def ratios():
    """Draw the first table of RESULTS.md: a bar from 1 to each ratio, on a logarithmic axis."""
    rows = measured()
    row, top, left, right = 44, 84, 14, 410
    picture = Picture(top + row * len(rows) + 26, 'Ratios of times, theano_mgpu / others, as in benchmarks/RESULTS.md')
    picture.text(left, 20, 'Our time / theirs: below 1, theano_mgpu is faster', weight='bold', anchor='start')
    values = [value for _, number, spread in rows for value in (float(number), *spread)] + [1]
    least, most = math.log(min(values) * 0.93), math.log(max(values) * 1.07)

    def place(value):
        return left + (right - left) * (math.log(value) - least) / (most - least)

    for value in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20):
        if not least < math.log(value) < most:
            continue
        picture.text(place(value), 66, '%g' % value, 13, colour=GREY)
        picture.line((place(value), 76), (place(value), picture.height - 28), '#d5dae0' if value != 1 else INK)
    picture.text(place(1) - 10, 44, '← faster', 13, 'end', GREY)
    picture.text(place(1) + 10, 44, 'slower →', 13, 'start', GREY)
    for index, (compared, number, spread) in enumerate(rows):
        y, ratio = top + row * index, float(number)
        picture.label(left, y + 9, compared, 13)
        ends = sorted((place(1), place(ratio)))
        picture.box(ends[0], y + 19, ends[1] - ends[0], 14, fill=GREEN if ratio <= 1 else ORANGE)
        if spread:
            picture.line((place(spread[0]), y + 26), (place(spread[1]), y + 26), INK)
        picture.text(WIDTH - left, y + 26, number, 14, 'end', weight='bold')
    picture.text(left, picture.height - 14, 'Thin lines: from the lowest round to the highest.', 13, 'start', GREY)
    return picture


def data_sets():
    """Draw the table of docs/guide/data_sets.md: calls a second of one process and of two."""
    page = (RESULTS.parents[1] / 'docs' / 'guide' / 'data_sets.md').read_text(encoding='utf-8')
    rows = re.findall(r'^\| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$', page, re.MULTILINE)
    row, top, left, width = 52, 44, 110, 270
    picture = Picture(top + row * len(rows) + 34, 'Calls a second, by rows and processes')
    picture.text(14, 20, 'Calls a second of a cost and its gradient', weight='bold', anchor='start')
    for index, (length, *calls) in enumerate(rows):
        y, numbers = top + row * index, [float(each.replace(',', '')) for each in calls]
        picture.text(left - 12, y + 18, length, 13, 'end')
        for i, (text, number) in enumerate(zip(calls, numbers)):
            picture.box(left, y + 20 * i, width * number / max(numbers), 16, fill=COLOURS[i])
            picture.text(left + width * number / max(numbers) + 8, y + 20 * i + 8, text, 13, 'start')
    picture.text(14, picture.height - 14, 'Blue: one process, orange: two. Each number of rows has its own scale.',
                 12, 'start', GREY)
    return picture


def predicted():
    """Draw the first table of docs/guide/predicted.md: the error of each prediction, in a row for each program."""
    page = (RESULTS.parents[1] / 'docs' / 'guide' / 'predicted.md').read_text(encoding='utf-8')
    programs = {}
    for program, *cells in re.findall(r'^\| ([^|]+) \| [^|]+, \d+ \| (.*) \| (.*) \| (.*) \|$',
                                      page.partition('## The errors')[0], re.MULTILINE):
        for index, cell in enumerate(cells):
            programs.setdefault(program, []).extend((index, int(error)) for error in re.findall(
                r'^\d.*\(([+-]\d+) %\)', cell))
    row, top, left, right, least, most = 56, 76, 24, 456, -30, 70
    picture = Picture(top + row * len(programs) + 40, 'Errors of predictions, by program and number of GPUs')
    picture.text(14, 20, 'Predicted images a second, against published', weight='bold', anchor='start')

    def place(error):
        return left + (right - left) * (error - least) / (most - least)

    picture.box(place(-15), 56, place(15) - place(-15), picture.height - 96, edge=PALE)
    for error in (-30, -15, 0, 15, 30, 45, 60):
        picture.text(place(error), 44, '%+d %%' % error if error else '0', 13, colour=GREY)
        picture.line((place(error), 56), (place(error), picture.height - 40), INK if not error else '#d5dae0')
    for index, (program, errors) in enumerate(programs.items()):
        picture.label(place(15) + 10, top + row * index, program, 12.5)
        for number, error in errors:
            picture.dot(place(error), top + row * index + 10 * number, OF_NUMBER[number])
    for number, text in enumerate(('2 GPUs', '4 GPUs', '8 GPUs')):
        picture.dot(30 + 90 * number, picture.height - 18, OF_NUMBER[number])
        picture.text(42 + 90 * number, picture.height - 18, text, 13, 'start')
    picture.text(300, picture.height - 18, 'grey: within 15 %', 13, 'start', GREY)
    return picture


def layers():
    """Draw the table of docs/guide/plans.md: the time of each layer, on one device and divided."""
    page = (RESULTS.parents[1] / 'docs' / 'guide' / 'plans.md').read_text(encoding='utf-8')
    head, *lines = re.search(r'^    LAYER .*\n(?:    .*\n)+', page, re.MULTILINE).group().splitlines()[:-1]
    ends = [0] + [match.end() for match in re.finditer(r'LAYER|FORWARD|BACKWARD|SHARE', head)]
    ends[1] = head.index('ONE')
    cells = [[line[start:end].strip() for start, end in zip(ends, ends[1:])] for line in lines]
    rows = [(name, [[float(each or 0) for each in pair] for pair in (numbers[:2], numbers[3:5])])
            for name, *numbers in cells]
    row, top, left, width = 52, 44, 92, 320
    picture = Picture(top + row * len(rows) + 34, 'The time of each layer, on one device and divided')
    picture.text(14, 20, 'Milliseconds of a call', weight='bold', anchor='start')
    longest = max(sum(pair) for _, pairs in rows for pair in pairs)
    for index, (name, pairs) in enumerate(rows):
        y = top + row * index
        picture.text(left - 12, y + 18, name, 13, 'end')
        for i, (forward, backward) in enumerate(pairs):
            ends = [left + width * part / longest for part in (0, forward, forward + backward)]
            for start, end, colour in zip(ends, ends[1:], COLOURS):
                if end > start:
                    picture.box(start, y + 20 * i, end - start, 16, fill=GREEN if name == 'exchange' else colour)
            if forward + backward:
                picture.text(ends[2] + 8, y + 20 * i + 8, '%.2f' % (forward + backward), 13, 'start')
    picture.text(14, picture.height - 14, 'Blue: forward, orange: backward; above on one device, below divided.',
                 12, 'start', GREY)
    return picture


PICTURES = {'data_sets.svg': data_sets, 'step.svg': step, 'pipeline.svg': pipeline, 'automatic.svg': automatic,
            'ratios.svg': ratios, 'predicted.svg': predicted, 'layers.svg': layers}

if __name__ == '__main__':
    for name, draw in PICTURES.items():
        (Path(__file__).resolve().parent / name).write_text(draw().svg(), encoding='utf-8')
