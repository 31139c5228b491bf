"""Words that a command does not take: the option, the value, what may stand there, the nearest of it; never a box."""

import pytest


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        (
            ["launch", "r.yaml", "--on", "slrm"], "--on = 'slrm': must be 'kuberay', 'kubernetes' or 'slurm'",
            "did you mean 'slurm'?",
        ),
        (["export", "run", "--as", "mergd"], "--as = 'mergd': must be 'merged', 'adapter' or 'full'", "'merged'?"),
        (["plan", "--budget", "0"], "--budget = '0': must be at least 0.01", ""),
        (["plan", "--budget", "inf"], "--budget = 'inf': must be at most", ""),
        (["plan", "--rows", "many"], "--rows = 'many': must be a whole number", ""),
        (["plan", "--rows", "9" * 320], "must be at most 1000000000000", ""),
        (["export", "run", "--merge"], "--merge is not an option of fitune export", "--as merged"),
        (["doctor", "--calibrat"], "--calibrat is not an option of fitune doctor", "did you mean '--calibrate'?"),
        (["plan", "--fleet"], "--fleet has no value", "--help"),
        (["trian"], "fitune: no such command 'trian'", "did you mean 'train'?"),
        (["why", "r.yaml"], "fitune why: 'r.yaml' sets nothing", 'fitune why "zero: 3" RECIPE.yaml'),
        (["why", "--gpu", "t4"], "fitune why: '--gpu' sets nothing", 'fitune why "zero: 3" RECIPE.yaml'),
        (["launch", "r.yaml"], "launch prints what starts a plan, and was not told which", "--on kuberay"),
        (["report"], "fitune report: missing argument", "fitune report --help"),
        (["plan", "--model", "gpt2", "--tuning", "lorra"], "tuning = 'lorra': must be 'full', 'lora'", "'lora'?"),
    ],
)  # fmt: skip
def test_a_word_that_is_not_taken_is_refused_in_words(call, words, said, hint):
    told = call(*words).ends(2, said, hint)
    assert told.startswith("error: ")
    assert not set("╭│╰") & set(told)
    assert "Value error" not in told
