from regrow.slices import Epoch


def test_ranks_are_the_order_of_the_hosts() -> None:
    epoch = Epoch(3, ((0, 1), (2, 4)))
    assert epoch.hosts == (0, 2)
    assert [epoch.rank(host) for host in epoch.hosts] == [0, 1]


def test_a_member_is_a_host_in_one_incarnation() -> None:
    epoch = Epoch(3, ((0, 1), (2, 4)))
    assert epoch.has(2, 4)
    assert not epoch.has(2, 5)
    assert not epoch.has(1, 1)
