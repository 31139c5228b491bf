"""The program, where rank 1 on Ray stays in its ninth loss until it is killed: the file HELD says that it is there."""

import os

import ray
import ray_runs
from fitune.cli import main
from fitune.session.clusters import on_ray

if __name__ == "__main__":
    ray.cloudpickle.register_pickle_by_value(ray_runs)  # workers do not have the folder of the tests
    on_ray.train_as_rank = ray_runs.Faulty("hold", call=9, marker=os.environ["HELD"])
    main()
