"""One Ray cluster for the whole folder: starting one takes longer than most tests."""

import pytest

import ray_runs
from fitune.recipe.recipe import canonical_keys, parse_recipe
from ray_runs import CORES, node_args, wait_until_idle


@pytest.fixture(scope="session")
def started_cluster():
    """A head node, which this process is a driver of; tests may add others."""
    ray = pytest.importorskip("ray", reason="needs ray: fitune[ray]")
    from fitune.launch.ray_cluster import loaded_ray

    patched = pytest.MonkeyPatch()
    patched.setenv("RAY_AUTH_MODE", "disabled")
    patched.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patched.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "6")  # for a place on a node that is gone
    loaded_ray()
    from ray.cluster_utils import Cluster

    ray.cloudpickle.register_pickle_by_value(ray_runs)  # workers do not have the folder of the tests
    started = Cluster(initialize_head=True, head_node_args=node_args(num_cpus=CORES))
    ray.init(address=started.address, log_to_driver=False, logging_level="ERROR")
    yield started
    ray.shutdown()
    started.shutdown()
    patched.undo()


@pytest.fixture
def cluster(started_cluster):
    """The cluster, once what the last test started has ended."""
    wait_until_idle()
    return started_cluster


@pytest.fixture
def recipe(model_folder, data_file, tmp_path):
    """A recipe of 8 rows a step, by however many workers."""

    def make(output="run", **settings):
        wanted = {
            "model": str(model_folder), "data": [str(data_file)], "tuning": "lora", "lora_r": 4, "precision": "fp32",
            "gpu": "cpu", "seq_len": 64, "micro_batch_size": 2, "global_batch_size": 8, "learning_rate": 1e-2,
            "max_steps": 6, "save_steps": 2, "samples": 0, "val_fraction": 0.1, "output_dir": str(tmp_path / output),
        }  # fmt: skip
        return parse_recipe(canonical_keys({**wanted, **settings}, where="test"))

    return make
