"""A pool of actors does every piece once and gives results in order, whoever dies."""

import pytest

from fitune.errors import HardwareError, ScoringFailed
from fitune.launch.ray_actors import ActorPool
from ray_runs import Squarer, node_args

pytestmark = pytest.mark.ray
CORE = {"CPU": 1.0}


def pool_of(workers, folder, *, restarts=3, told=None):
    return ActorPool(
        Squarer, (str(folder),), workers=workers, each=CORE, restarts=restarts,
        told=lambda line: None if told is None else told.append(line),
    )  # fmt: skip


def nobody_looks(parts):
    return


def test_a_piece_whose_actor_died_is_done_by_another_one(cluster, tmp_path):
    told = []
    (tmp_path / "die-3").touch()
    with pool_of(2, tmp_path, told=told) as pool:
        found = list(pool.results(iter(range(12)), look=nobody_looks))
    assert found == [number**2 for number in range(12)]
    [line] = told
    assert "ended" in line
    done = sorted(int(path.name.removeprefix("did-")) for path in tmp_path.glob("did-*"))
    assert done == list(range(12))


def test_an_actor_knows_its_next_piece_and_another_one_does_it_if_it_is_free_before(cluster, tmp_path):
    """Both are begun with a piece and know another; the one of the actor that is held is done all the same."""
    (tmp_path / "hold-0").touch()

    def look(parts):
        if {path.name for path in tmp_path.glob("did-*")} == {"did-1", "did-2", "did-3"}:
            (tmp_path / "hold-0").unlink(missing_ok=True)

    with pool_of(2, tmp_path) as pool:
        assert list(pool.results(iter(range(4)), look=look)) == [0, 1, 4, 9]
    assert len(list(tmp_path.glob("next-*"))) == 2


def test_actors_that_die_beyond_the_limit_are_an_error(cluster, tmp_path):
    (tmp_path / "always-3").touch()
    with (
        pool_of(2, tmp_path, restarts=1) as pool,
        pytest.raises(HardwareError, match=r"process \d+ .* ended, and no restart is left"),
    ):
        list(pool.results(iter(range(12)), look=nobody_looks))


def test_an_error_of_the_work_ends_it_in_its_own_words(cluster, tmp_path):
    (tmp_path / "refuse-3").touch()
    with pool_of(1, tmp_path) as pool, pytest.raises(ScoringFailed, match="piece 3 cannot be done") as failed:
        list(pool.results(iter(range(12)), look=nobody_looks))
    assert failed.value.hint == "another piece"
    assert failed.value.exit_code == 1


def test_nobody_runs_far_ahead_of_the_oldest_piece(cluster, tmp_path):
    """While piece 0 is held, the other worker begins only what fits between it and the limit."""
    taken = []

    def pieces():
        for number in range(30):
            taken.append(number)
            yield number

    def look(parts):
        if len(list(tmp_path.glob("did-*"))) >= 7:
            (tmp_path / "hold-0").unlink(missing_ok=True)

    (tmp_path / "hold-0").touch()
    with pool_of(2, tmp_path) as pool:
        results = pool.results(pieces(), look=look)
        assert next(results) == 0
        assert max(taken) <= 8
        assert list(results) == [number**2 for number in range(1, 30)]


def test_a_lost_node_gives_its_piece_back(cluster, tmp_path):
    node = cluster.add_node(**node_args(num_cpus=1))
    cluster.wait_for_nodes()
    for number in range(3):
        (tmp_path / f"hold-{number}").touch()

    told = []

    def look(parts):
        if len(list(tmp_path.glob("held-*"))) == 3 and node in cluster.list_all_nodes():
            cluster.remove_node(node, allow_graceful=False)
        if told:
            for held in tmp_path.glob("hold-*"):
                held.unlink()

    with pool_of(3, tmp_path, told=told) as pool:
        assert list(pool.results(iter(range(9)), look=look)) == [number**2 for number in range(9)]
    assert len(told) == 1
