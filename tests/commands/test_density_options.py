"""Options and methods that decide which Gaussians there are, and when: each does to a short run what it says."""

from __future__ import annotations

import pytest
import torch
from commands import Run, train

STEPS = 110
SCHEDULE = {
    "schedule_length": 30_000,  # what follows is in images
    "warmup_length": 10,
    "refine_every": 10,
    "reset_alpha_every": 5,
    "num_downscales": 1,
    "resolution_schedule": 12,
    "max_gaussians": 100_000,  # out of reach
}
"""Nine refinements, at images 20 to 100. Large Gaussians are pruned after image 50."""

SAMPLED = {"schedule_length": 30_000, "warmup_length": 10, "refine_every": 10}


def words(**options: object) -> list[str]:
    """Options of the model as words of the command line."""
    return [word for k, v in options.items() for word in (f"--pipeline.model.{k.replace('_', '-')}", str(v))]


def counts(run: Run) -> list[int]:
    """Gaussians after each step."""
    return [line["gaussians"] for line in run.metrics() if "gaussians" in line]


def parameters(run: Run, step: int = STEPS - 1) -> dict[str, torch.Tensor]:
    model = run.checkpoint(step)["pipeline"]
    return {
        k.removeprefix("_model."): v for k, v in model.items() if k.startswith(("_model.gauss_params.", "_model.ids"))
    }


def equal(a: Run, b: Run) -> bool:
    ours, theirs = parameters(a), parameters(b)
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def refined(capture, tmp_path_factory) -> Run:
    return train(capture, tmp_path_factory.mktemp("refined"), *words(**SCHEDULE), steps=STEPS)


@pytest.fixture(scope="module")
def sampled(capture, tmp_path_factory) -> Run:
    return train(capture, tmp_path_factory.mktemp("sampled"), *words(**SAMPLED), steps=STEPS, method="bytesplat-mcmc")


# Refinement by gradient (splatfacto) --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "option, value, gaussians",
    [
        ("cull_alpha_thresh", 0.05, "more"),
        ("cull_alpha_thresh", 0.2, "fewer"),
        ("cull_scale_thresh", 0.02, "fewer"),
        ("cull_screen_size", 0.05, "fewer"),
        ("densify_grad_thresh", 0.001, "fewer"),
        ("use_absgrad", False, "fewer"),  # gradients of pixels on either side of a Gaussian cancel
        ("densify_size_thresh", 0.05, "fewer"),  # what is duplicated is not made smaller, so more is pruned
        ("n_split_samples", 3, "more"),
        ("split_screen_size", 0.02, "more"),
        ("split_screen_size", 0.2, "fewer"),
        ("stop_screen_size_at", 15, "fewer"),
        ("warmup_length", 30, "fewer"),
        ("refine_every", 20, "fewer"),
        ("stop_split_at", 40, "fewer"),
        ("reset_alpha_every", 1, "fewer"),  # refinement pauses after a reset
    ],
)
def test_an_option_of_refinement_changes_the_number(option, value, gaussians, refined, capture, tmp_path):
    run = train(capture, tmp_path, *words(**SCHEDULE | {option: value}), steps=STEPS)
    assert {"more": counts(run)[-1] > counts(refined)[-1], "fewer": counts(run)[-1] < counts(refined)[-1]}[gaussians]


def test_refinement_keeps_to_its_schedule(refined, capture, tmp_path):
    options = SCHEDULE | {"warmup_length": 25, "refine_every": 15, "stop_split_at": 70}
    run = train(capture, tmp_path, *words(**options), steps=STEPS)
    changes = [n for n, (a, b) in enumerate(zip(counts(run), counts(run)[1:], strict=False), start=2) if a != b]
    assert changes == [30, 45, 60]
    assert [n for n in range(2, STEPS) if counts(refined)[n - 1] != counts(refined)[n - 2]] == list(range(20, 110, 10))


def test_opacities_are_reset(refined, capture, tmp_path):
    """The shortest period that leaves time to recover is 38 images: twice nine photos and ten until a refinement."""
    save = "--steps-per-save", "37", "--save-only-latest-checkpoint", "False"
    run = train(capture, tmp_path, *words(**SCHEDULE | {"reset_alpha_every": 1}), *save, steps=STEPS)
    faded, recovered = (parameters(run, step)["gauss_params.opacities"].sigmoid().max() for step in (37, STEPS - 1))
    assert faded <= 0.2 + 1e-6 < recovered, "twice cull_alpha_thresh"


def test_harmonics_wake_after_their_interval(refined, capture, tmp_path):
    run = train(capture, tmp_path, *words(**SCHEDULE | {"sh_degree_interval": 50}), steps=STEPS)
    assert not parameters(refined)["gauss_params.features_rest"].any(), "the first degree is due after 1,000 images"
    rest = parameters(run)["gauss_params.features_rest"]
    assert rest[:, :8].any(dim=0).all() and not rest[:, 8:].any(), "the first two are due after 50 and 100"


def test_resolution_doubles_after_its_schedule(refined, capture, tmp_path):
    run = train(capture, tmp_path, *words(**SCHEDULE | {"resolution_schedule": 30}), steps=STEPS)
    losses = [[line["loss"] for line in run.metrics() if "loss" in line] for run in (refined, run)]
    same = [a == b for a, b in zip(*losses, strict=True)]
    assert all(same[:12]) and not any(same[12:])


def test_big_has_more_gaussians(refined, capture, tmp_path):
    run = train(capture, tmp_path, *words(**SCHEDULE), steps=STEPS, method="bytesplat-big")
    assert counts(run)[-1] > counts(refined)[-1]
    from nerfstudio.configs.method_configs import all_methods

    ours, theirs = (all_methods[f"{name}-big"].pipeline.model for name in ("bytesplat", "splatfacto"))
    shared = vars(theirs).keys() - {"_target"}
    assert {k: v for k, v in vars(ours).items() if k in shared} == {k: vars(theirs)[k] for k in shared}


# Sampling by opacity (MCMC) -----------------------------------------------------------------------------------------


def test_mcmc_trains_and_keeps_to_its_schedule(sampled):
    assert counts(sampled)[0] == 1500
    expected, n = [], 1500
    for step in range(1, STEPS + 1):
        if step > 10 and step % 10 == 0:
            n = min(3000, n + -(-n // 20))
        expected.append(n)
    assert counts(sampled) == expected
    losses = [line["loss"] for line in sampled.metrics() if "loss" in line]
    assert sum(losses[-9:]) < 0.9 * sum(losses[:9])
    (held_out,) = (line for line in sampled.metrics() if "eval_psnr" in line)
    assert held_out["eval_psnr"] > 10


def test_mcmc_is_an_option_of_the_plain_method_too(sampled, capture, tmp_path):
    run = train(capture, tmp_path, *words(**SAMPLED, strategy="mcmc"), steps=STEPS)
    assert equal(run, sampled), "the methods differ in schedule and cap only"


@pytest.mark.parametrize(
    "option, value", [("noise_lr", 0), ("min_opacity", 0.1), ("mcmc_opacity_reg", 0.5), ("mcmc_scale_reg", 0.5)]
)
def test_an_option_of_mcmc_changes_the_result(option, value, sampled, capture, tmp_path):
    run = train(capture, tmp_path, *words(**SAMPLED | {option: value}), steps=STEPS, method="bytesplat-mcmc")
    assert not equal(run, sampled)
    ours, theirs = (parameters(run) for run in (run, sampled))
    if option == "min_opacity":
        assert len(set(ours["ids"].tolist()) - set(theirs["ids"].tolist())) > 100, "more have moved"
    if option == "mcmc_opacity_reg":
        means = [p["gauss_params.opacities"].sigmoid().mean() for p in (ours, theirs)]
        assert means[0] < means[1]
    if option == "mcmc_scale_reg":
        means = [p["gauss_params.scales"].exp().mean() for p in (ours, theirs)]
        assert means[0] < means[1]


def test_mcmc_stays_within_its_cap(capture, tmp_path):
    run = train(capture, tmp_path, *words(**SAMPLED | {"max_gaussians": 700}), steps=40, method="bytesplat-mcmc")
    assert set(counts(run)) == {700}, "the data has 1,500 points"


def test_mcmc_resumes_to_the_last_bit(sampled, capture, tmp_path):
    options = *words(**SAMPLED), "--steps-per-save", "45", "--save-only-latest-checkpoint", "False"
    train(capture, tmp_path / "first", *options, steps=STEPS, method="bytesplat-mcmc")
    folder = tmp_path / "first/scene/bytesplat-mcmc/run/nerfstudio_models"
    start = "--load-dir", str(folder), "--load-step", "45"
    run = train(capture, tmp_path / "second", *options, *start, steps=STEPS, method="bytesplat-mcmc")
    assert equal(run, sampled)


# Pruning -------------------------------------------------------------------------------------------------------------

PRUNED = SCHEDULE | {"prune_budget": 5, "prune_share": 0.2, "prune_start": 20, "prune_stop": 100, "prune_every": 10}


def rounds(run: Run) -> list[dict]:
    """Rounds of pruning that were judged."""
    return [line for line in run.metrics() if "pruned" in line]


@pytest.mark.parametrize("method, start", [("bytesplat", PRUNED), ("bytesplat-mcmc", PRUNED)])
def test_pruning_with_either_strategy(method, start, capture, tmp_path, capsys):
    """Rounds are judged when they should be, logged in one line each, and resumed in between to the last bit."""
    options = dict(start)
    if method == "bytesplat-mcmc":
        options = {name: value for name, value in start.items() if name in SAMPLED or name.startswith("prune_")}
    save = "--steps-per-save", "45", "--save-only-latest-checkpoint", "False"
    run = train(capture, tmp_path / "first", *words(**options), *save, steps=STEPS, method=method)
    printed = capsys.readouterr().out
    judged = rounds(run)
    assert len(judged) >= 4 and all(line["step"] % 10 == 0 for line in judged)
    assert printed.count("tiles within budget") >= len(judged) and "PSNR" in printed
    taken = [line for line in judged if line["pruned"]]
    assert taken and all(line["lists_p95_before"] > 5 for line in taken)
    pending = run.checkpoint(45)["bytesplat"]["pruning"]["round"]
    assert pending is not None and pending["due"] > 46 and len(pending["removed"]["ids"]) == pending["total"]

    again = "--load-dir", str(run.models), "--load-step", "45"
    resumed = train(capture, tmp_path / "second", *words(**options), *save, *again, steps=STEPS, method=method)
    assert equal(run, resumed)
    assert [line["psnr_judged_after"] for line in rounds(resumed)] == [
        line["psnr_judged_after"] for line in judged if line["step"] > 46
    ]


@pytest.mark.parametrize("option, value", [("prune_cost", "tiles"), ("prune_veto", 0.1), ("prune_share", 0.4)])
def test_an_option_of_pruning_changes_the_result(option, value, capture, tmp_path):
    few = PRUNED | {"prune_start": 60, "prune_stop": 70}
    a, b = (
        train(capture, tmp_path / str(k), *words(**few | more), steps=STEPS)
        for k, more in enumerate(({}, {option: value}))
    )
    assert rounds(a) and not equal(a, b)


def test_a_round_that_costs_quality_is_undone(capture, tmp_path):
    """Nine tenths at once, late in the run: no recovery makes up for that."""
    late = PRUNED | {"prune_share": 0.9, "prune_veto": 1.0, "prune_guard": 0.0, "stop_split_at": 40}
    late |= {"prune_start": 90, "prune_stop": 90}
    run = train(capture, tmp_path, *words(**late), steps=STEPS)
    (judged,) = rounds(run)
    assert judged["pruned"] > 100 and not judged["kept"]
    assert counts(run)[-1] == counts(run)[88] > counts(run)[91]


# What would have no effect ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method, options",
    [
        ("bytesplat-mcmc", {"densify_grad_thresh": 0.0004}),
        ("bytesplat-mcmc", {"cull_alpha_thresh": 0.005}),
        ("bytesplat-mcmc", {"reset_alpha_every": 20}),
        ("bytesplat-mcmc", {"stop_screen_size_at": 100}),
        ("bytesplat-mcmc", {"use_absgrad": False}),
        ("bytesplat", {"noise_lr": 1e5}),
        ("bytesplat", {"min_opacity": 0.01}),
        ("bytesplat", {"mcmc_opacity_reg": 0.0}),
        ("bytesplat", {"prune_share": 0.2}),  # on a CPU there is no budget but what is given
        ("bytesplat", {"prune_every": 100}),
        ("bytesplat", {"prune_budget": 10, "prune_share": 0}),
        ("bytesplat", {"num_random": 100}),
        ("bytesplat", {"random_scale": 3.0}),
        ("bytesplat", {"max_gauss_ratio": 5.0}),
        ("bytesplat", {"camera_optimizer.rot_l2_penalty": 0.1}),
        ("bytesplat", {"resolution_schedule": 100, "num_downscales": 0}),
        ("bytesplat", {"sh_degree_interval": 100, "sh_degree": 0}),
        ("bytesplat", {"eval_num_rays_per_chunk": 100}),
        ("bytesplat", {"prompt": "a room"}),
        ("bytesplat", {"output_depth_during_training": True}),
        ("bytesplat-big", {"densify_grad_thresh": 0.0008, "strategy": "mcmc"}),  # bytesplat's own
    ],
)
def test_options_without_effect_are_refused(method, options, capture, tmp_path):
    name = next(iter(options)).replace("_", "-")
    with pytest.raises(ValueError, match=f"without effect: --pipeline.model.{name} "):
        train(capture, tmp_path, *words(**options), steps=STEPS, method=method)


def test_what_a_method_sets_is_not_refused(sampled, capture, tmp_path):
    """bytesplat-big has thresholds of its own, of which sampling has no need."""
    run = train(capture, tmp_path, *words(**SAMPLED, strategy="mcmc"), steps=STEPS, method="bytesplat-big")
    assert equal(run, sampled)


def test_a_grid_without_its_switch_is_refused(capture, tmp_path):
    with pytest.raises(ValueError, match=r"grid-shape .*use-bilateral-grid True"):
        train(capture, tmp_path, "--pipeline.model.grid-shape", "4", "4", "2", steps=STEPS)
