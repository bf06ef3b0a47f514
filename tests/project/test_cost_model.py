"""The model of scaling: against values computed by hand, at its limits, and where it has no answer."""
import math

from theano_mgpu.errors import MgpuError
from theano_mgpu.exchange.tree_devices import order_of
from theano_mgpu.plan import Machine, Shares

import cost_model
import predict_scaling
import pytest
from cost_model import LINKS, MEMORY, CostModel, Link, Network, parse_network

SLOW, FAST = Link('slow', 1e-3, 1e9), Link('fast', 1e-6, 1e11)
HOSTS = Network(FAST, SLOW, 4)
COSTS = CostModel(fixed_s=0.002, sample_s=0.001, update_s=0.003, n_bytes=8e6, input_s=1e-6, host_s=0.0005,
                  launch_s=1e-4, reduce_bytes_per_s=1e10)


def all_reduce(scheme, n, n_bytes, network, rate=math.inf):
    return CostModel(0, 0, 0, n_bytes, reduce_bytes_per_s=rate, network=network, scheme=scheme).all_reduce(n)


def over_hosts(model=COSTS, **others):
    return model._replace(network=HOSTS, **others)


# --- all_reduce ----------------------------------------------------------------------------------

def test_ring_by_hand():
    # 4 devices: 6 messages of a quarter of 8 MB: 6 * (1 ms + 2 ms)
    assert cost_model.ring_all_reduce(4, 8e6, SLOW) == pytest.approx(0.018)
    # and three quarters of 8 MB are added at 1 GB/s
    assert cost_model.ring_all_reduce(4, 8e6, SLOW, 1e9) == pytest.approx(0.024)
    assert cost_model.ring_all_reduce(1, 8e6, SLOW) == 0


def test_flat_ring_goes_at_the_speed_of_its_slowest_link():
    assert all_reduce('ring', 4, 8e6, HOSTS) == cost_model.ring_all_reduce(4, 8e6, FAST)
    assert all_reduce('ring', 8, 8e6, HOSTS) == cost_model.ring_all_reduce(8, 8e6, SLOW)


def test_hierarchical_by_hand():
    # Each host takes 3 hops and 8 MB at 100 GB/s, twice; two hosts take 2 ms and 8 MB at 1 GB/s.
    assert all_reduce('hierarchical', 8, 8e6, HOSTS) == pytest.approx(2 * (3e-6 + 8e-5) + 0.002 + 0.008)
    assert all_reduce('hierarchical', 1, 8e6, HOSTS) == 0
    one_each = Network(FAST, SLOW, 1)
    assert all_reduce('hierarchical', 8, 8e6, one_each) == cost_model.ring_all_reduce(8, 8e6, SLOW)


def test_through_the_host_by_hand():
    # Two devices: fetch and send back 8 MB each, and read 16 MB at 10 GB/s.
    assert all_reduce('host', 2, 8e6, HOSTS, 1e10) == pytest.approx(2 * 2 * (1e-6 + 8e-5) + 0.0016)
    # One device's gradients go to the host and back, too; nothing is added.
    assert all_reduce('host', 1, 8e6, HOSTS, 1e10) == pytest.approx(2 * (1e-6 + 8e-5))
    # Eight on two hosts: as four on each, and a ring of two hosts, each of which adds half of its data.
    assert all_reduce('host', 8, 8e6, HOSTS, 1e10) == pytest.approx(
        4 * 2 * (1e-6 + 8e-5) + 0.0032 + 0.002 + 0.008 + 0.0004)
    assert all_reduce('host', 2, 8e6, Network(MEMORY, None, 8), math.inf) == 0


def test_nvlink_does_not_reach_the_host():
    nvlink, pcie = parse_network('nvlink3'), parse_network('pcie4')
    assert all_reduce('host', 4, 8e6, nvlink) == all_reduce('host', 4, 8e6, pcie)
    assert all_reduce('ring', 4, 8e6, nvlink) < all_reduce('ring', 4, 8e6, pcie)


@pytest.mark.parametrize('scheme', sorted(cost_model.SCHEMES))
def test_more_devices_or_bytes_never_exchange_faster(scheme):
    numbers = [2 ** power for power in range(11)]
    for sizes in ([1e3] * 11, [1e8] * 11, [10.0 ** power for power in range(11)]):
        for n in (numbers, [16] * 11):
            seconds = [all_reduce(scheme, devices, size, HOSTS, 1e10) for devices, size in zip(n, sizes)]
            assert seconds == sorted(seconds)


def test_many_devices_are_bound_by_bandwidth_or_latency():
    """One of a ring's two terms stays below twice the buffer, the other grows with the devices."""
    ideal = Link('no latency', 0, 1e9)
    assert cost_model.ring_all_reduce(10 ** 6, 8e6, ideal) == pytest.approx(2 * 8e6 / 1e9, rel=1e-5)
    assert cost_model.ring_all_reduce(1024, 8, SLOW) == pytest.approx(2 * 1023 * 1e-3, rel=1e-5)


# --- links as text -------------------------------------------------------------------------------

def test_links_by_name_and_by_figures():
    network = parse_network('nvlink2+100gbe', 4)
    assert (network.inner, network.outer, network.per_host) == (LINKS['nvlink2'], LINKS['100gbe'], 4)
    assert network.name == 'NVLink 2 + 100 Gb Ethernet'
    assert network.divided(9) == (3, 4) and network.divided(3) == (1, 3)
    figures = parse_network('5:12.5').inner
    assert (figures.latency_s, figures.bytes_per_s) == (pytest.approx(5e-6), 12.5e9)
    assert parse_network('pcie4').divided(1024) == (1, 1024)


@pytest.mark.parametrize('text', ['isdn', 'pcie4+', 'pcie4+isdn', '5', '5:0', '-1:3', '1:nan', 'inf:1', ''])
def test_a_link_that_is_none(text):
    with pytest.raises(MgpuError, match='is not a link: give one of pcie3, .*10gbe.* e.g. 5:12;'):
        parse_network(text)


# --- the line ------------------------------------------------------------------------------------

def test_a_line_through_exact_times():
    assert cost_model.fit_line([32, 64, 128], [0.5 + 0.01 * n for n in (32, 64, 128)]) == pytest.approx((0.5, 0.01))


@pytest.mark.parametrize('seconds,expected', [([2.0, 1.0], (None, 0)), ([1.0, 3.0], (0, None))])
def test_a_line_has_no_negative_part(seconds, expected):
    fixed, each = cost_model.fit_line([1, 2], seconds)
    assert fixed >= 0 and each >= 0
    for got, wanted in zip((fixed, each), expected):
        assert wanted is None or got == wanted


# --- a step --------------------------------------------------------------------------------------

def test_step_by_hand():
    parts = over_hosts(COSTS).parts(2, 101)
    assert parts == {'input': pytest.approx(101e-6), 'dispatch': pytest.approx(0.0005 + 0.0001 + 0.002),
                     'compute': pytest.approx(0.051),  # the larger sub-batch has 51 samples
                     'exchange': all_reduce('host', 2, 8e6, HOSTS, 1e10), 'update': 0.003}
    assert tuple(parts) == cost_model.PARTS
    eight = over_hosts(COSTS).parts(8, 800)
    assert eight['input'] == pytest.approx(400e-6)         # each of two hosts cuts up its own half
    assert eight['dispatch'] == pytest.approx(0.0028)      # four launches on each


def test_devices_that_share_hardware_take_turns():
    own, shared = COSTS.parts(2, 100), COSTS._replace(sharing=2).parts(2, 100)
    assert shared['compute'] == 2 * own['compute'] and shared['update'] == 2 * own['update']
    assert shared['dispatch'] == pytest.approx(own['dispatch'] + COSTS.fixed_s)
    assert COSTS._replace(sharing=2).speedup(2, 100) < 1


def test_an_update_is_divided_among_all_devices():
    divided = COSTS._replace(divides_update=True)
    for n in (1, 2, 8):
        assert over_hosts(divided).parts(n, 800) == dict(
            over_hosts(COSTS).parts(n, 800), update=pytest.approx(COSTS.update_s / n))


def test_overlap_hides_what_the_backward_pass_can_hide():
    pieces = COSTS._replace(pieces=4)
    for batch in (8, 80, 8000):  # the exchange is longer than the backward pass, or shorter
        expected = over_hosts(COSTS).parts(8, batch)
        hidden = .75 * min(expected['exchange'], 2 / 3 * expected['compute'])
        assert over_hosts(pieces).parts(8, batch) == dict(
            expected, exchange=pytest.approx(expected['exchange'] - hidden))
    shared = over_hosts(COSTS, sharing=2).parts(8, 80)
    assert over_hosts(pieces, sharing=2).parts(8, 80) == shared


def test_speedup():
    assert COSTS.speedup(1, 100) == COSTS.speedup(1, 100, weak=True) == 1
    only_compute = CostModel(0, 0.001, 0, 1e9)
    assert only_compute.speedup(8, 64) == pytest.approx(8)
    assert only_compute.speedup(8, 64, weak=True) == pytest.approx(8)
    # An update of half of one device's step: never more than twice as fast.
    amdahl = CostModel(0, 0.001, 0.064, 0)
    assert amdahl.speedup(64, 64) == pytest.approx(0.128 / 0.065)
    assert amdahl.speedup(1024, 64, weak=True) == pytest.approx(1024)
    # 4 samples feed 4 devices.
    assert only_compute.speedup(1024, 4) == pytest.approx(4)


@pytest.mark.parametrize('scheme', sorted(cost_model.SCHEMES))
def test_a_better_link_is_never_slower(scheme):
    better = Network(FAST, Link('better', 1e-4, 1e10), 4)
    for n in (1, 2, 8, 64, 1024):
        model = COSTS._replace(network=better, scheme=scheme)
        assert sum(model.parts(n, 128).values()) <= sum(over_hosts(model).parts(n, 128).values())
        assert model.speedup(n, 128) <= n


def test_what_limits():
    assert cost_model.limit(COSTS.parts(1, 100)) == 'compute'
    assert cost_model.limit(over_hosts(COSTS).parts(1024, 100)) == 'exchange'
    assert cost_model.limit(COSTS._replace(update_s=1).parts(4, 100)) == 'update'
    assert cost_model.limit(COSTS._replace(host_s=1).parts(4, 100)) == 'dispatch'
    assert cost_model.limit(COSTS._replace(input_s=1).parts(4, 100)) == 'input'


@pytest.mark.parametrize('n', [2, 4, 64])
@pytest.mark.parametrize('efficiency', [0.5, cost_model.PAYS])
@pytest.mark.parametrize('costs', [COSTS, COSTS._replace(pieces=4)])
def test_the_batch_that_pays_is_the_smallest(n, efficiency, costs):
    batch = over_hosts(costs).batch_that_pays(n, efficiency=efficiency)
    assert batch % n == 0
    assert over_hosts(costs).speedup(n, batch) >= efficiency * n
    assert batch == n or over_hosts(costs).speedup(n, batch - n) < efficiency * n


def test_no_batch_pays_where_hardware_is_shared():
    assert COSTS._replace(sharing=2).batch_that_pays(2) is None
    assert CostModel(0, 0.001, 0, 0).batch_that_pays(8) == 8
    # Samples that the host cuts up for all devices are a limit that no batch lifts.
    assert CostModel(0, 0.001, 0, 0, input_s=0.001).batch_that_pays(8) is None


def test_as_fast_as_one():
    """Efficiency 1/n asks for a batch from which n devices are not slower than one."""
    batch = over_hosts(COSTS).batch_that_pays(8, efficiency=1 / 8)
    assert over_hosts(COSTS).speedup(8, batch) >= 1
    assert batch < over_hosts(COSTS).batch_that_pays(8)

# --- Logical shards --------------------------------------------------------------------------------

OF_SHARDS = CostModel(0, 0.001, 0, 8e6, network=parse_network('1000:1'), scheme='blocks', logical_shards=8)


def shards_over(n, **others):
    return OF_SHARDS._replace(**others).parts(n, 48)


def test_blocks_by_hand():
    for n in 2, 4, 8:  # each device sends and receives (n - 1) / n of 8 MB twice, over 1 GB/s, as in a ring
        assert shards_over(n)['exchange'] == pytest.approx(2 * (n - 1) * (0.001 + 0.008 / n))
    # 3 + 3 + 2 shards leave 2 + 2 + 1 sums: a device sends two thirds of 5/3 of 8 MB; then the total of a third
    assert shards_over(3)['exchange'] == pytest.approx(4 * 0.001 + 2 / 3 * (5 / 3 + 1) * 0.008)
    assert shards_over(1)['exchange'] == 0
    slow = shards_over(8, network=HOSTS)['exchange']
    assert slow == pytest.approx(2 * 7 * (0.001 + 0.008 / 8))  # between the hosts


def test_blocks_are_what_the_devices_send():
    """The plan's own shares and tree say how many sums each device sends."""
    for n in 2, 3, 4, 5, 7, 8, 12:
        shares = Shares(Machine(replicas=(n,)), logical_shards=8)
        devices, _ = order_of(shares.shards_of_replicas([48]))
        sent = len(devices) / n * (n - 1) / n + (n - 1) / n  # by each device, on average
        assert shards_over(n)['exchange'] == pytest.approx(2 * (n - 1) * 0.001 + sent * 0.008)


def test_logical_shards_through_the_host():
    wire = parse_network('0:1')
    assert shards_over(3, scheme='host', network=wire, reduce_bytes_per_s=1e9)['exchange'] == pytest.approx(
        5 * 0.008 + 3 * 0.008 + 5 * 0.008)  # five sums come and are added, and one goes to each device


def test_devices_beyond_the_number_of_logical_shards_have_nothing_to_do():
    assert [round(shards_over(n)['compute'], 9) for n in (1, 2, 3, 8, 16)] == [0.048, 0.024, 0.018, 0.006, 0.006]
    assert [round(shards_over(n, fixed_s=0.008)['dispatch'], 9) for n in (1, 2, 3, 16)] == [0.008, 0.004, 0.003, 0.001]
    # Its host launches eight shards, whatever the number of devices: one device's are within its fixed time.
    assert [round(shards_over(n, fixed_s=0.008, launch_s=0.008)['dispatch'], 9) for n in (1, 2, 3, 16)] == [0.008] * 4


def test_the_answer_is_of_the_planned_exchange():
    """A host of four adds by NCCL here, and hosts by MPI: 8 devices are on two hosts."""
    networks = {'pcie4': parse_network('pcie4'), 'hosts': parse_network('pcie4+10gbe', 4)}
    predicted = cost_model.predictions(COSTS, 128, networks, ('ring', 'host'))
    one, several = predict_scaling.predicted_answer(128, networks, predicted)
    assert 'with sums by NCCL' in one and 'with sums through the host' in several
    assert {(key[1], key[3]) for key, row in predicted.items() if row['planned'] and key[0] == 'hosts'} == {
        ('ring' if n <= 4 else 'host', n) for n in cost_model.NUMBERS}


def test_a_prediction_with_logical_shards_has_blocks_in_place_of_the_ring():
    for number, scheme in ((0, 'ring'), (8, 'blocks')):
        networks = {'pcie4': parse_network('pcie4')}
        predicted = cost_model.predictions(COSTS._replace(logical_shards=number), 128, networks, (scheme, 'host'))
        assert {key[1] for key in predicted} == {'host', 'hierarchical', scheme}
        table = predict_scaling.prediction_table(predicted, networks, 'strong')
        assert ('blocks (NCCL)' in table, 'ring (NCCL)' in table) == (number == 8, number == 0)
        sentence, = predict_scaling.predicted_answer(128, networks, predicted)
        assert 'with sums by NCCL' in sentence and ' *' in table
