"""A recipe is planned, and checked before data is read.

The process that only starts ranks comes no further, so this file imports neither transformers nor PEFT, which were two
thirds of its start.
"""

from dataclasses import replace
from pathlib import Path

from fitune.engine.ranks import ALONE, Ranks
from fitune.errors import RecipeError
from fitune.measure.cuda_cards import other_card
from fitune.measure.hardware import require_free
from fitune.session.events import Note, Planned, Tell
from fitune.session.planning import plan_to_train, wanted_hardware
from fitune.session.train.attempts import Attempt
from fitune.session.train.checks import as_begun, complete_run, require_room_on_disk
from fitune.session.train.first_use import measure_on_first_use
from fitune.session.train.pushing import ready_repository
from fitune.spec.machines.hardware import Hardware
from fitune.spec.plan import Plan
from fitune.spec.recipe.recipe import Recipe, dump_recipe
from fitune.spec.reports import RunReport
from fitune.track.trackers import wanted_trackers
from fitune.train.directory import require_own_directory
from fitune.train.uploading import examined_store


def first_attempt(
    recipe: Recipe, *, overwrite: bool, tell: Tell, ranks: Ranks = ALONE, hardware: Hardware | None = None
) -> Attempt | RunReport:
    """Plan and check everything that can be checked before data is read; the report of a run that is complete already.

    ``hardware``: where it is another than the recipe's or this machine's.
    Raises FituneError for what cannot be planned, trained here, or written into output_dir.
    """
    if not recipe.data:
        raise RecipeError("no data is named", hint="data: train.jsonl, or --data on the command line")
    wanted_trackers(recipe.report_to)  # refuses those that are unknown or not installed
    if recipe.resume and not overwrite:
        recipe = as_begun(recipe)
    here = hardware
    if hardware is None:
        hardware = wanted_hardware(recipe)
        if ranks.is_alone and measure_on_first_use(hardware, tell=tell):
            hardware = wanted_hardware(recipe)
        if not ranks.is_alone:  # all have to make the same plan, and the ranks hold memory already
            hardware = replace(hardware, taken_bytes=0)
    report = plan_to_train(recipe, hardware=hardware)
    plan = report.chosen.plan
    tell(Planned(report=report))
    if here is None:  # else the ranks are started where the devices are
        if not plan.hardware.gpu.is_cpu:
            from fitune.train.prepare import require_planned_cards

            require_planned_cards(plan, ranks)
            if note := other_card(plan.hardware.gpu, ranks.local):
                tell(Note(note))
        if ranks.is_alone:
            require_free(plan.hardware, report.chosen.estimate.peak_bytes)
    directory = Path(plan.run.output_dir)
    require_own_directory(plan)
    is_fetched = ranks.from_first(lambda: examined_store(plan.run, overwrite=overwrite))
    complete = (
        None if overwrite else complete_run(directory, plan, resume=recipe.resume, saved_elsewhere=is_fetched)
    )
    if complete is not None:
        from fitune.session.train.training import end_complete

        return end_complete(plan, complete, is_fetched=is_fetched, tell=tell, ranks=ranks)
    require_room_on_disk(plan)
    if here is None:
        ready_to_push(plan, ranks)
    return Attempt(recipe=dump_recipe(recipe), report=report, resume=recipe.resume, overwrite=overwrite)


def ready_to_push(plan: Plan, ranks: Ranks) -> None:
    """Ask the Hub, where the export goes there, before anything is trained. Raises RecipeError, StoreError."""
    if name := plan.run.push_to_hub:
        ranks.from_first(lambda: ready_repository(name, public=plan.run.hub_public))
