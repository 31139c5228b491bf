"""Launchers meet at one address: threads stand for the nodes, each with its own connection to the store."""

import socket
import threading
import time

import pytest

from fitune.errors import FituneError, HardwareError, NodeFailed, RecipeError
from fitune.launch.nodes import OneNode, meeting
from fitune.launch.place import Place, interface_towards, place_of
from fitune.launch.torchrun import Ended
from fitune.session.program import job_end
from several import kept_port


@pytest.fixture
def port():
    with kept_port() as port:
        yield port


@pytest.fixture(autouse=True)
def asked_often(monkeypatch):
    """A node that comes before the first one asks again soon, as do all for what others say."""
    monkeypatch.setattr("fitune.launch.nodes._ASKING_SECONDS", 0.05)
    monkeypatch.setattr("fitune.launch.nodes._LOOK_SECONDS", 0.01)


@pytest.fixture
def together(port):
    """What each part returns or raises, one for each node."""

    def run(*parts, nodes=()):
        ends = [None] * len(parts)

        def node(number):
            count = nodes[number] if nodes else len(parts)
            place = Place(node=number, nodes=count, host="127.0.0.1", port=port, timeout_s=120)
            try:
                with meeting(place) as met:
                    ends[number] = parts[number](met)
            except FituneError as error:
                ends[number] = error

        threads = [threading.Thread(target=node, args=(each,)) for each in range(len(parts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=240)
        return ends

    return run


def test_all_hear_all_and_the_first_decides(together):
    def part(nodes):
        own = nodes.gathered(f"of {nodes.place.node}")
        return own, nodes.from_first(lambda: "decided"), nodes.gathered("")

    heard = (["of 0", "of 1", "of 2"], "decided", ["", "", ""])
    assert together(part, part, part) == [heard, heard, heard]


def test_an_error_on_one_node_is_raised_on_all(together):
    def fails(nodes):
        raise RecipeError("a fault of the test")

    own, other = together(fails, lambda nodes: nodes.gathered("ready"))
    assert isinstance(own, RecipeError)
    assert isinstance(other, NodeFailed)
    assert (other.message, other.exit_code) == (f"node 0 ({socket.gethostname()}): a fault of the test", 2)


def test_ranks_are_called_off_until_the_next_word(together):
    def ends_badly(nodes):
        nodes.call_off("rank 1 failed")
        return nodes.gathered("bad")

    def watches(nodes):
        while not (seen := nodes.trouble):
            time.sleep(0.02)
        return seen, nodes.gathered("good"), nodes.trouble

    _, watched = together(ends_badly, watches)
    assert watched == (f"node 0 ({socket.gethostname()}): rank 1 failed", ["bad", "good"], "")


def test_nodes_that_were_told_different_numbers_are_refused(together):
    ends = together(lambda nodes: None, lambda nodes: None, nodes=(2, 3))
    assert all(isinstance(end, FituneError) for end in ends)
    assert any("for 3 nodes" in str(end) and "for 2" in str(end) for end in ends)


@pytest.mark.parametrize(
    ("node", "said"),
    [
        (0, "waited 0.3 s at 127.0.0.1:{} for 2 nodes: node 1 did not"),
        (1, "waited 0.3 s for node 0 at 127.0.0.1:{}: Connection refused"),
    ],
)
def test_a_node_that_never_comes_ends_the_waiting(port, node, said):
    place = Place(node=node, nodes=2, host="127.0.0.1", port=port, timeout_s=0.3)
    with pytest.raises(HardwareError, match=said.format(port)), meeting(place):
        pass


def test_a_port_that_is_taken_is_named_with_another(port):
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        place = Place(node=0, nodes=2, host="127.0.0.1", port=port)
        said = f"node 0 cannot serve port {port} of --rendezvous .*EADDRINUSE"
        with pytest.raises(HardwareError, match=said) as caught, meeting(place):
            pass
    assert f"--rendezvous 127.0.0.1:{port + 1}" in caught.value.hint


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"nodes": 1}, "nodes: 1"),
        ({"node": None}, "no --node-rank"),
        ({"node": 2}, "--node-rank is 2"),
        ({"rendezvous": ""}, "no --rendezvous"),
        ({"rendezvous": "a:0"}, "HOST:PORT"),
        ({"rendezvous": "a:1:2"}, "HOST:PORT"),
        ({"rendezvous": "a\nb:1"}, "HOST:PORT"),
        ({"timeout_s": 0.0}, "timeout 0"),
    ],
)
def test_a_place_that_cannot_be_is_refused(words, said):
    with pytest.raises(RecipeError, match=said):
        place_of(**{"node": 0, "nodes": 2, "rendezvous": "a:29400", **words})


def test_an_address_of_the_sixth_version_is_read():
    place = place_of(node=1, nodes=2, rendezvous="[fe80::1]:29400")
    assert (place.host, place.port, place.address) == ("fe80::1", 29400, "[fe80::1]:29400")


def test_gloo_takes_the_interface_on_the_way():
    assert interface_towards("127.0.0.1", 1) == "lo"


class _Second(OneNode):
    place = Place(node=1, nodes=2, host="a", port=1)


@pytest.mark.parametrize(
    ("ends", "code", "cause"),
    [
        ([(0,), (0,)], 0, ""),
        ([(1,), (1, "rank 1 was killed")], 1, "rank 1 was killed"),
        ([(1, "rank 0 failed", True), (1,)], 1, "node 0: rank 0 failed"),
        ([(143,), (0,)], 143, ""),
        ([(0,), (1,)], 1, ""),
    ],
)
def test_the_job_ends_as_the_node_with_the_cause(ends, code, cause):
    fields = ("exit_code", "cause", "is_said")
    end = job_end([Ended(**dict(zip(fields, each, strict=False))) for each in ends], _Second())
    assert (end.exit_code, end.cause, end.is_said) == (code, cause, False)
