"""The picture of `theano-mgpu bench`: speedup against ideal."""
import importlib.util

from ...errors import MissingError
from ...utils.files import whole_file
from .costs import NUMBERS
from .links import SCHEMES
from .report import SCHEME_TITLES
from .scaling import speedup

STYLES = dict(zip(SCHEMES, ('-', '--', ':')))
MARKERS = {'contexts': ('o', 'black', 'measured: contexts of one process'),
           'ranks': ('s', 'tab:red', 'measured: ranks, one context each')}


def check_matplotlib():
    """Raise a MissingError unless matplotlib is installed."""
    if importlib.util.find_spec('matplotlib') is None:
        raise MissingError('--plot needs matplotlib, which is not installed: pip install "theano_mgpu[bench]", or omit '
                           '--plot')


def draw(path, title, rows, costs, batch_size, networks, weak):
    """Draw measured points, predicted curves, and the ideal.

    Parameters
    ----------
    path : str
        Of a .png file.
    title : str
    rows : list of dict
        As `Findings.rows` has them.
    costs : Costs
    batch_size : int
    networks : dict of str to Network
    weak : bool
        Whether the curves are those of weak scaling.
    """
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    numbers = [1] + NUMBERS
    figure, axis = plt.subplots(figsize=(9.5, 5.2), constrained_layout=True)
    axis.plot(numbers, numbers, color='grey', linewidth=1, label='ideal')
    for colour, network in zip(plt.get_cmap('tab10').colors, networks.values()):
        for scheme, style in STYLES.items():
            axis.plot(numbers, [speedup(costs, n, batch_size, network, scheme, weak=weak) for n in numbers], style,
                      color=colour, label='predicted: %s, %s' % (network.name, SCHEME_TITLES[scheme]))
    for kind, (marker, colour, name) in MARKERS.items():
        points = [(row['n'], row['speedup']) for row in rows if row['kind'] == kind]
        if points:
            axis.plot(*zip(*points), marker, color=colour, markersize=7, label=name, zorder=5)
    lowest = min([0.6] + [row['speedup'] for row in rows])
    axis.set(xlabel='devices', ylabel='speedup over one device')
    axis.set_xscale('log', base=2)
    axis.set_yscale('log', base=2)
    axis.set_ylim(0.8 * lowest, 1.2 * NUMBERS[-1])
    axis.set_xticks(numbers)
    axis.set_yticks([0.5] * (lowest <= 0.6) + numbers)
    axis.minorticks_off()
    for each in (axis.xaxis, axis.yaxis):
        each.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: '%g' % value))
    axis.grid(alpha=0.3)
    axis.set_title(title, fontsize=10)
    axis.legend(loc='upper left', bbox_to_anchor=(1.01, 1), borderaxespad=0, frameon=False, fontsize=8)
    with whole_file(path) as unfinished:
        figure.savefig(unfinished, dpi=150, format='png')
    plt.close(figure)
