"""The commands. Each parses its words, calls a session, and prints what it answers."""

import json as json_text
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from fitune.cli.keys import CheckedCommand, RecipeCommand, ScoreCommand, complete_value
from fitune.errors import RecipeError
from fitune.units import MOST_EPOCH_ROWS
from fitune.values.machines.environment import without_expandable_segments

if TYPE_CHECKING:
    from fitune.cli.terminal import Terminal
    from fitune.recipe.recipe import Recipe
    from fitune.session.clusters.fleet import FleetRequest
    from fitune.session.results import Result

app = typer.Typer(name="fitune", no_args_is_help=True, pretty_exceptions_enable=False)

records = typer.Typer(help="Compare measured runs, anybody's, with the estimate.", no_args_is_help=True)
app.add_typer(records, name="records")

_RECIPE: dict[str, Any] = {"cls": RecipeCommand, "context_settings": {"ignore_unknown_options": True}}

Words = Annotated[
    list[str] | None,
    Argument(
        metavar="[RECIPE.yaml] [--KEY VALUE]...",
        help="A recipe file, and any key of a recipe as an option.",
        autocompletion=complete_value,
    ),
]
Settings = Annotated[
    list[str] | None, Option("--set", metavar="A.B=C", help="Change one setting of the recipe; repeatable.")
]
FleetFile = Annotated[Path | None, Option(metavar="FILE.yaml", help="Clusters to choose from.")]
Objective = Annotated[str, Option(help="fastest, cheapest, least-memory; of clusters also soonest.")]
Deadline = Annotated[str, Option(metavar="12h", help="With --fleet: finished by then.")]
Budget = Annotated[float | None, Option(min=0.01, max=1e12, help="With --fleet: US dollars at most.")]
Rows = Annotated[
    int | None, Option(min=1, max=MOST_EPOCH_ROWS, help="With --fleet: rows of data that is elsewhere.")
]
Live = Annotated[bool, Option("--live", help="With --fleet: ask the clusters what is free.")]
Json = Annotated[bool, Option("--json", help="Print one JSON object instead of text.")]
Picture = Annotated[Path | None, Option(metavar="FILE.svg", help="Draw a ranking or a matrix, too.")]
Html = Annotated[Path | None, Option(metavar="FILE", help="Write a page, too.")]
_NAMED = "A folder or Hub id of a model, an adapter, or the directory of a run."
Run = Annotated[Path, Argument(help="Directory of a run.")]
OnRay = Annotated[
    Literal["here", "ray"],
    Option("--on", help="Where it runs; ray: on a Ray cluster. Others: fitune launch."),
]
RayAddress = Annotated[str, Option(help="HOST:PORT. Default: RAY_ADDRESS or this machine.")]
Rendezvous = Annotated[str, Option(metavar="HOST:PORT", help="With --nodes N: node 0's address and port.")]
Workers = Annotated[str, Option(metavar="N|N..M", help="With --on ray: workers, or fewest..most.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version as installed

        print(f"fitune {installed('fitune')}")
        raise typer.Exit


@app.callback()
def fitune(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Fine-tune large language models within the memory you have: predicted, trained, measured."""


@app.command(**_RECIPE)
def init(
    words: Annotated[
        list[str] | None,
        Argument(
            metavar="[NEW.yaml] [--KEY VALUE]...",
            help="The file to write (recipe.yaml), and keys that are not asked for then.",
            autocompletion=complete_value,
        ),
    ] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace the file.")] = False,
    json: Json = False,
) -> None:
    """Write a commented recipe: answer five questions, or give --model, --data, --tuning, --gpu and --output-dir."""
    from fitune.session.recipes.new_recipe import ask_and_write

    ask = input if sys.stdin.isatty() and sys.stdout.isatty() and not json else None
    _print(*ask_and_write(words or [], overwrite=overwrite, ask=ask, say=print), json=json)


@app.command(**_RECIPE)
def plan(
    words: Words = None,
    settings: Settings = None,
    why: Annotated[str, Option(metavar="CHANGE", help='What another choice costs: --why "zero: 3".')] = "",
    largest: Annotated[str, Option(metavar="WHAT", help="The largest seq_len, micro_batch or model.")] = "",
    fleet: FleetFile = None,
    objective: Objective = "",
    deadline: Deadline = "",
    budget: Budget = None,
    rows: Rows = None,
    live: Live = False,
    picture: Picture = None,
    details: Annotated[bool, Option("--details", help="Memory by phase, what fits or not, and why.")] = False,
    html: Html = None,
    json: Json = False,
) -> None:
    """Predict memory and time of every way to train: does it fit, how fast, what does it cost, and what else would."""
    from fitune.session.planning import plan_on_data

    request = _fleet(fleet, objective, deadline, budget, rows, live)
    if request is not None:
        from fitune.session.clusters.fleet import draw_ranking, plan_on_fleet

        ranking = plan_on_fleet(_recipe(words, settings), request)
        _show(ranking, json=json)
        if picture is not None:
            draw_ranking(ranking, picture)
        return
    settings = [*(settings or []), *([f"objective={objective}"] if objective else [])]
    recipe = _recipe(words, settings)
    if why or largest:
        from fitune.session.alternatives import largest_for, plan_with

        _print(*(plan_with(recipe, why) if why else largest_for(recipe, largest)), json=json)
    elif details or json:
        _show(plan_on_data(recipe), json=json)
    else:
        _print_screen(recipe, [*(words or []), *(part for one in settings for part in ("--set", one))], html)


@app.command()
def ui(
    link: Annotated[
        str | None, Argument(metavar="'LINK'", help="An earlier page's address: its question is opened anew.")
    ] = None,
    port: Annotated[int, Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    runs: Annotated[
        Path | None, Option(metavar="FOLDER", help="Its runs have a page, too, with live curves.")
    ] = None,
) -> None:
    """Plan in a page of this machine: type a model and cards, see what fits. Needs the extra `ui`."""
    from fitune.session.planner_page import serve_planner

    serve_planner(port, runs=runs, link=link, log=lambda address: print(address, flush=True))


@app.command(**_RECIPE)
def why(
    change: Annotated[str, Argument(help='Settings as in a recipe: "zero: 3, backend: fsdp".')],
    words: Words = None,
    settings: Settings = None,
    json: Json = False,
) -> None:
    """Compare another choice with the plan that is taken, in bytes and seconds."""
    from fitune.session.alternatives import plan_with

    if not {":", "="} & {*change}:  # the recipe, or an option, stands first
        raise RecipeError(f"fitune why: {change!r} sets nothing", hint='fitune why "zero: 3" RECIPE.yaml')
    _print(*plan_with(_recipe(words, settings), change), json=json)


@app.command(**_RECIPE)
def matrix(
    models: Annotated[
        str, Option(help="Models, with commas between; 13b alone: the one before in that size.")
    ],
    context: Annotated[str, Option(help="Lengths of rows in tokens: 512,1024,2048.")],
    words: Words = None,
    settings: Settings = None,
    picture: Picture = None,
    json: Json = False,
) -> None:
    """Print the plan for each model and row length, and which of DDP, ZeRO, recompute and offload fit."""
    from fitune.session.alternatives import draw_picture, full_names, plan_matrix, row_lengths
    from fitune.session.recipes.reading import matrix_recipe

    names, lengths = tuple(full_names(models)), row_lengths(context)
    recipe = matrix_recipe(words or [], settings or [], model=names[0])
    found = plan_matrix(recipe, models=names, seq_lens=lengths)
    if picture is not None:
        draw_picture(found, picture)
    _show(found, json=json)
    if picture is not None and not json:
        print(f"\npicture: {picture}")


@app.command(**_RECIPE)
def rehearse(
    words: Words = None,
    settings: Settings = None,
    json: Json = False,
    exact: Annotated[bool, Option("--exact", help="Trace every block, not a few for all.")] = False,
) -> None:
    """Plan, then run the plan's own step on fake tensors: every allocation, without a GPU or weights."""
    from fitune.session.alternatives import rehearse_recipe

    _show(rehearse_recipe(_recipe(words, settings), exact=exact), json=json)


@app.command(**_RECIPE)
def train(
    words: Words = None,
    settings: Settings = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Remove an earlier run in output_dir.")] = False,
    node_rank: Annotated[int | None, Option(metavar="K", help="With --nodes N: 0 to N-1.")] = None,
    rendezvous: Rendezvous = "",
    rendezvous_timeout: Annotated[
        float, Option(metavar="SECONDS", help="Longest wait for the other nodes.")
    ] = 600.0,
    on: OnRay = "here",
    ray_address: RayAddress = "",
    workers: Workers = "",
    ray_restarts: Annotated[int, Option(min=0, help="How often lost workers are replaced.")] = 3,
    json: Json = False,
) -> None:
    """Plan, train exactly that, and show measured figures next to predicted ones."""
    from fitune.session.planning import see_planned_gpus, speaks_to_people

    see_planned_gpus()
    if json and not speaks_to_people():  # the first rank prints the object, or the error
        os.dup2(2, 1)
    recipe = _recipe(words, settings, quiet=not speaks_to_people())
    from fitune.session.clusters.on_ray import place_on_ray  # torch: after the recipe, whose errors need none
    from fitune.session.program import place_in, train_program

    on_ray = None
    if on == "ray":
        on_ray = place_on_ray(recipe, address=ray_address, workers=workers, restarts=ray_restarts)
    place = place_in(recipe, node=node_rank, rendezvous=rendezvous, timeout_s=rendezvous_timeout)
    with _telling(json) as terminal:
        code = train_program(recipe, overwrite=overwrite, emit=terminal, place=place, on_ray=on_ray)
    raise typer.Exit(code)


@app.command(**_RECIPE)
def data(
    words: Words = None,
    settings: Settings = None,
    rows: Annotated[int, Option(min=1, help="How many rows to show.")] = 3,
    html: Html = None,
    json: Json = False,
) -> None:
    """Show the data as the model sees it: rows in the template, what is learned, cut or dropped, and lengths."""
    from fitune.session.data_view import explain_data, view_data, write_data_page

    with _terminal(lines=sys.stderr) as terminal:
        shown = view_data(_recipe(words, settings), rows=rows, emit=terminal)
    _print(explain_data(shown), shown, json=json)
    if html is not None:
        write_data_page(shown, html)
        print(f"page: {html}", file=sys.stderr if json else None)
    if shown.would_stop:
        raise typer.Exit(RecipeError.exit_code)


@app.command(**_RECIPE)
def launch(
    words: Words = None,
    settings: Settings = None,
    show: Annotated[bool, Option("--print", help="Print the commands; `fitune train` runs them.")] = False,
    rendezvous: Rendezvous = "HOST:PORT",
    configuration: Annotated[bool, Option("--print-deepspeed-config", help="Print ds_config.json.")] = False,
    on: Annotated[
        Literal["kuberay", "kubernetes", "slurm"] | None,
        Option(help="Print the manifest or script that starts the plan there."),
    ] = None,
    job: Annotated[
        Path | None, Option(metavar="FILE.yaml", help="Image, claim, queue, …; or --set job.image=NAME:TAG.")
    ] = None,
    fleet: FleetFile = None,
    objective: Objective = "",
    deadline: Deadline = "",
    budget: Budget = None,
    rows: Rows = None,
    live: Live = False,
    json: Json = False,
) -> None:
    """Print what starts a plan: commands for each machine, a manifest for Kubernetes, a script for SLURM."""
    from fitune.session.clusters.launching import deepspeed_configuration, launch_lines, split_settings

    request = _fleet(fleet, objective, deadline, budget, rows, live)
    if objective and request is None:
        settings = [*(settings or []), f"objective={objective}"]
    if request is not None or on is not None:
        from fitune.session.clusters.fleet import launch_text

        of_recipe, of_job = split_settings(settings or [])
        text, place = launch_text(_recipe(words, of_recipe), request, of_job, on=on, job_file=job)
        if place:
            print(place, file=sys.stderr)
        return _print(text.removesuffix("\n"), {"manifest": text, "notes": place.splitlines()}, json=json)
    if configuration:
        _print(*deepspeed_configuration(_recipe(words, settings)), json=json)
    elif show:
        recipe = _recipe(words, settings)
        _print(*launch_lines(recipe, words or [], settings or [], rendezvous=rendezvous), json=json)
    else:
        raise RecipeError(
            "launch prints what starts a plan, and was not told which",
            hint="--print for commands, --on kuberay, kubernetes or slurm for a job; fitune train starts one here",
        )


@app.command(**_RECIPE)
def compare(
    words: Words = None,
    settings: Settings = None,
    tunings: Annotated[
        str, Option(help="Methods: full, lora, qlora, hqq, dora, lomo, adalomo; comma-separated.")
    ] = "full,lora,qlora",
    score_data: Annotated[str, Option(help="Questions with references, to score each result on.")] = "",
    overwrite: Annotated[bool, Option("--overwrite", help="Train anew what is there already.")] = False,
    json: Json = False,
) -> None:
    """Train one recipe by several methods on the same data and seed, and compare them on one page."""
    from fitune.session.comparing import compare_methods

    names = [name.strip() for name in tunings.split(",") if name.strip()]
    recipe = _recipe(words, settings)
    with _telling(json, starts_others=True) as terminal:
        code = compare_methods(recipe, names, score_data=score_data, overwrite=overwrite, emit=terminal)
    raise typer.Exit(code)


@app.command(cls=ScoreCommand)
def score(
    context: typer.Context,
    against: Annotated[str, Option(metavar="OUT", help="Compare with an earlier score.")] = "",
    on: OnRay = "here",
    ray_address: RayAddress = "",
    workers: Workers = "",
    plan: Annotated[bool, Option("--plan", help="Predict bytes, time and cost; answer nothing.")] = False,
    gpu: Annotated[str, Option(help="With --plan: a GPU that is elsewhere.")] = "",
    gpus: Annotated[int, Option(help="With --plan: how many in the node.")] = 0,
    fleet: FleetFile = None,
    objective: Objective = "",
    deadline: Deadline = "",
    budget: Budget = None,
    live: Live = False,
    json: Json = False,
) -> None:
    """Answer a dataset with a model and grade the answers."""
    from fitune.recipe.score_recipe import score_recipe

    recipe, request = score_recipe(**context.obj), _fleet(fleet, objective, deadline, budget, None, live)
    with _terminal(lines=sys.stderr) as terminal:  # standard output is the report's alone
        if recipe.lm_eval:
            from fitune.session.score.lm_eval import score_tasks

            return _show(score_tasks(recipe, emit=terminal), json=json)
        if plan or request is not None:
            from fitune.session.score.score_plan import predict_scoring

            return _show(predict_scoring(recipe, request, gpu=gpu, gpus=gpus, emit=terminal), json=json)
        from fitune.session.planning import see_planned_gpus

        see_planned_gpus()
        from fitune.session.clusters.score_on_ray import place_of_scoring
        from fitune.session.score.scoring import compare_scores, score_dataset, why_not_all

        place = place_of_scoring(address=ray_address, workers=workers) if on == "ray" else None
        report = score_dataset(recipe, emit=terminal, place=place, against=against)
    _show(report, json=json)
    if not json:
        print(f"answers: {recipe.out / 'answers.jsonl'}")
    if against:
        print(compare_scores(recipe.out, Path(against)), file=sys.stderr if json else sys.stdout)
    if failed := why_not_all(report, recipe.out):
        print(f"error: {failed}", file=sys.stderr)  # the report is printed, and is the one JSON object
        raise typer.Exit(failed.exit_code)


@app.command()
def chat(
    models: Annotated[list[str], Argument(metavar="MODEL|RUN [SECOND]", help=_NAMED)],
    system: Annotated[str, Option(help="What the models are told first.")] = "",
    max_new_tokens: Annotated[int, Option(help="Tokens of one answer at most.")] = 512,
    temperature: Annotated[float, Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, Option(help="Draw from the likeliest tokens of this share.")] = 1.0,
    seed: Annotated[int, Option(help="Seed of the draws; no effect at temperature 0.")] = 0,
    chat_template: Annotated[str, Option(help="Jinja file; default: the tokenizer's own.")] = "",
    json: Annotated[bool, Option("--json", help="Print one JSON object for each question.")] = False,
) -> None:
    """Talk to a model, or to two side by side. /reset begins anew, /exit ends; piped lines are questions."""
    from fitune.session.score.chat import open_chat

    sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    with _terminal(lines=sys.stderr) as emit:
        opened = open_chat(models, system=system, sampling=sampling, chat_template=chat_template, emit=emit)
    from fitune.cli.chat import talk

    talk(opened, as_json=json)


@app.command()
def serve(
    model: Annotated[str, Argument(metavar="MODEL|RUN", help=_NAMED)],
    server: Annotated[Literal["vllm", "transformers"] | None, Option(help="Default: vLLM if here.")] = None,
    host: Annotated[str, Option(help="Address to listen at.")] = "localhost",
    port: Annotated[int, Option(min=1, max=65535, help="Port to listen at.")] = 8000,
    context: Annotated[int, Option(help="Tokens of prompt and answer, for vLLM; 0: the model's.")] = 0,
    show: Annotated[bool, Option("--print", help="Print the command, start nothing.")] = False,
    json: Json = False,
) -> None:
    """Start vLLM's or transformers' own OpenAI-compatible server with the arguments that this model needs."""
    from fitune.session.score.serving import serve_command

    served = serve_command(model, server=server, host=host, port=port, context=context, only_print=show)
    _print(served.words, served, json=json)
    if not show:
        if json:  # the object is the only one
            os.dup2(2, 1)
        # the server is this process from now on, and gets its signals
        os.execve(served.argv[0], served.argv, without_expandable_segments())


@app.command(name="go-on", hidden=True)
def go_on(run: Run, json: Json = False) -> None:
    """Go on with the attempt that waits in a run's directory, after a shortage of memory or as one of several ranks."""
    from fitune.session import program

    with _telling(json) as terminal:
        code = program.go_on(run, emit=terminal)
    raise typer.Exit(code)


@app.command(cls=CheckedCommand)
def export(
    run: Annotated[str, Argument(help="Directory or URL of a run whose training is done.")],
    out: Annotated[
        str, Option("--out", "--output-dir", help="Folder or URL to write; default: a folder in RUN.")
    ] = "",
    kind: Annotated[
        Literal["merged", "adapter", "full"] | None,
        Option("--as", help="Default: what the run was to export, if that failed or is pushed; else merged."),
    ] = None,
    push_to_hub: Annotated[
        str, Option(metavar="OWNER/NAME", help="Send it to the Hub, too; one that is there is sent as it is.")
    ] = "",
    hub_public: Annotated[bool, Option("--hub-public", help="Let everybody read what is sent.")] = False,
    json: Json = False,
) -> None:
    """Export what a run trained, without training again: an adapter folded into its base, or an export that failed."""
    from fitune.session.exporting import export_anywhere

    with _telling(json) as terminal:
        export_anywhere(run, out, kind, push_to_hub=push_to_hub, hub_public=hub_public, emit=terminal)


@app.command()
def convert(
    recipe: Annotated[Path, Argument(help="A recipe of axolotl, LLaMA-Factory, TRL, torchtune or Unsloth.")],
    json: Json = False,
) -> None:
    """Print another trainer's recipe as one of fitune's, with a comment on each line."""
    from fitune.session.recipes.reading import convert_recipe

    _print(*convert_recipe(recipe), json=json)


@app.command()
def report(
    run: Annotated[str, Argument(help="Directory of a run, or its URL once it has ended.")],
    watch: Annotated[bool, Option("--watch", help="Until the run ends, every 5 s anew.")] = False,
    json: Json = False,
) -> None:
    """Show predicted and measured side by side, and write the run's report.html."""
    from fitune.session.reported import report_anywhere, watched_run

    watched = watched_run(run, log=lambda line: print(line, file=sys.stderr)) if watch else None
    _show(watched or report_anywhere(run), json=json)


@app.command()
def doctor(
    calibrate: Annotated[
        bool, Option("--calibrate", help="Measure this device in 1 to 2 minutes; plans use it from then on.")
    ] = False,
    prove: Annotated[
        bool, Option("--prove", help="Hold kernels against eager code, plans against steps: 10 minutes.")
    ] = False,
    out: Annotated[Path | None, Option(help="With --prove: a file for the record, to give away.")] = None,
    json: Json = False,
) -> None:
    """Show what is here: devices, memory, measured rates, libraries, and what each missing part would add."""
    from fitune.session import doctor as here

    log = partial(print, file=sys.stderr if json else None)
    if calibrate and not here.calibrate_device(log=log):
        return
    if prove or out:
        from fitune.session.proving.prove import describe_proof
        from fitune.session.proving.prove import prove as prove_device

        proof = prove_device(tell=log, out=out)
        _print(describe_proof(proof), proof, json=json)
        raise typer.Exit(int(bool(proof.failed)))
    _print(*here.examine(), json=json)


@app.command()
def demo(
    out: Annotated[Path, Option("--out", "--output-dir", help="Where its files go.")] = Path("demo"),
    gpus: Annotated[int, Option(min=1, max=2, help="2: train once more by two processes, on a CPU too.")] = 1,
    json: Json = False,
) -> None:
    """See everything work in three minutes, without network or GPU: a small model learns a task."""
    from fitune.session.demo import run_demo

    with _telling(json, starts_others=True) as terminal:
        run_demo(out, gpus=gpus, emit=terminal)


@records.command()
def check(
    files: Annotated[
        list[Path], Argument(metavar="FILE...", help="Rows, one JSON object a line; or files of results/.")
    ],
    confidence: Annotated[str, Option(help="The least that counts: high, medium, low or any.")] = "medium",
    leave_one_out: Annotated[bool, Option("--leave-one-out", help="Learn nothing of a source.")] = False,
    rows: Annotated[bool, Option("--rows", help="Print every row, too.")] = False,
    json: Json = False,
) -> None:
    """Predict every run of the files and print how far off memory, speed and verdicts are."""
    from fitune.session.records import check_records

    found = check_records(files, confidence=confidence, leave_one_out=leave_one_out, shows_rows=rows)
    _print(*found, json=json)


def _fleet(file: Path | None, *wishes: Any) -> "FleetRequest | None":
    """The question to a fleet; None without one."""
    if file is None:
        return None
    from fitune.session.clusters.fleet import FleetRequest

    return FleetRequest(file, *wishes)


def _terminal(**settings: Any) -> "Terminal":
    from fitune.cli.terminal import Terminal  # rich, for those who see something happen

    return Terminal(**settings)


@contextmanager
def _telling(json: bool, *, starts_others: bool = False) -> Iterator["Terminal"]:
    """The terminal of a command. With ``json`` all that is printed inside goes to standard error, and the result is
    printed at the end as one object. ``starts_others``: what child processes print goes to standard error, too."""
    with ExitStack() as stack:
        if json:
            stack.enter_context(redirect_stdout(sys.stderr))
        if json and starts_others:
            stack.callback(os.dup2, os.dup(1), 1)
            os.dup2(2, 1)
        yield (terminal := stack.enter_context(_terminal()))
    if json and terminal.result:
        _print("", terminal.result, json=True)


def _recipe(words: list[str] | None, settings: list[str] | None, *, quiet: bool = False) -> "Recipe":
    """The recipe that ``words`` name. Notes on another trainer's keys go to standard error."""
    from fitune.session.recipes.reading import recipe_from

    notes: list[str] = []
    recipe = recipe_from(words or [], settings or [], on_note=notes.append)
    if notes and not quiet:
        print("\n".join(notes), end="\n\n", file=sys.stderr)
    return recipe


def _show(result: "Result", *, json: bool) -> None:
    from fitune.session.results import result_data, text_of

    _print("" if json else text_of(result), result_data(result) if json else None, json=json)


def _print_screen(recipe: "Recipe", words: list[str], html: Path | None) -> None:
    """The verdict; where nothing fits, that is the screen, and the command still fails."""
    from fitune.cli.terminal import print_coloured
    from fitune.errors import NothingFits
    from fitune.session.planning import first_screen_of, plan_or_nothing
    from fitune.session.recipes.reading import split_words

    found = plan_or_nothing(recipe)
    train = shlex.join(["fitune", "train", *words, *([] if recipe.data else ["--data", "YOUR.jsonl"])])
    typed = split_words(words)[0] is None
    print_coloured(first_screen_of(recipe, found, train=train, as_options=typed))
    if html is not None:
        from fitune.session.planner_page import write_plan_page  # jinja2, for those who want a page

        print(f"\npage: {write_plan_page(recipe, found, html, train=train)}")
    if isinstance(found, NothingFits):
        raise typer.Exit(found.exit_code)


def _print(text: str, data: Any, *, json: bool) -> None:
    if json:
        from fitune.values.serial import to_data

        text = json_text.dumps(to_data(data), indent=2, ensure_ascii=False, default=str)
    print(text, flush=True)
