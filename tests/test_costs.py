"""The cost model: each mode by hand, what the papers say of them, and rates that are measured on a small net."""

import sys
from dataclasses import replace

import pytest
import torch
from scaling import draw_efficiencies, strong_efficiency, weak_efficiency
from torch import nn

from germline.cli.costs import (
    MODES,
    Cost,
    Network,
    Rates,
    choose_cost,
    count_asked_arrays,
    count_summed_arrays,
    format_bytes,
    format_seconds,
    measure_rates,
    predict_cost,
    predict_costs,
    recommend,
)
from germline.errors import BadInput
from germline.fleet.spmd.exchange import Mode
from germline.recipes.recipe import Recipe
from germline.strategies import GA, PESGD, PSO, SNES, AnyStrategy, Gradient, HybridES, MuLambda, OpenAIES

RATES = Rates(member_seconds=1.0, noise_seconds=0.1, step_seconds=0.5, held=3, block=2)
NETWORK = Network(1000.0, 0.01)  # bytes a second, seconds
LARGE = Rates(member_seconds=0.01, noise_seconds=3.5e-4, step_seconds=0.024, held=3, block=4)
MILLIONS = 3_000_000
every_mode = pytest.mark.parametrize("mode", MODES)


def predict(mode: Mode, workers: int, strategy: AnyStrategy | None = None, population: int = 10) -> Cost:
    cost = predict_cost(RATES, strategy or OpenAIES(), 100, population, mode, workers, NETWORK)
    assert cost is not None
    return cost


def assert_close(cost: Cost, **expected: float) -> None:
    assert {name: getattr(cost, name) for name in expected} == pytest.approx(expected)


# By hand: 10 members in 5 blocks on 4 workers, 2 blocks at most for each, and 100 parameters. A member takes 1 s, an
# update 10 * 0.1 + 0.5 s; 4 * 10 * 3/4 = 30 bytes of scores come in 3 messages.


def test_replay_repeats_the_update_and_receives_scores() -> None:
    assert_close(
        predict("replay", 4),
        evaluate_seconds=4.0,
        update_seconds=1.5,
        bytes_received=30,
        bytes_sent=30,
        messages=3,
        network_seconds=0.03 + 0.03,
        seconds=5.56,
        memory_bytes=(3 + 2) * 400,
    )


def test_chromosome_divides_the_update_and_receives_columns() -> None:
    assert_close(
        predict("chromosome", 4),
        evaluate_seconds=4.0,
        update_seconds=0.375,
        bytes_received=30 + 300,
        bytes_sent=330,
        messages=6,
        network_seconds=0.33 + 0.06,
        seconds=4.765,
        memory_bytes=(1 + 2 / 4 + 2) * 400,  # theta, a quarter of Adam's moments, a block
    )


def test_semi_divides_the_sum_and_reduces_it() -> None:
    assert_close(
        predict("semi", 4),
        evaluate_seconds=4.0,
        update_seconds=3 * 0.1 + 0.5,
        bytes_received=30 + 600,
        bytes_sent=630,
        messages=9,
        network_seconds=0.63 + 0.09,
        memory_bytes=(3 + 2) * 400,
    )


def test_central_computes_once_and_broadcasts_by_a_tree() -> None:
    assert_close(
        predict("central", 4),
        evaluate_seconds=4.0,
        update_seconds=1.5,
        bytes_received=30 + 400,
        bytes_sent=30 + 2 * 400,  # two rounds
        messages=3 + 2,
        network_seconds=0.83 + 0.05,
    )
    assert_close(predict("central", 2), bytes_received=20 + 400, bytes_sent=20 + 400, messages=2)
    assert_close(predict("central", 5), bytes_sent=32 + 3 * 400, messages=4 + 3)


@every_mode
def test_one_worker_exchanges_nothing(mode: Mode) -> None:
    expected = {"bytes_received": 0, "bytes_sent": 0, "messages": 0, "network_seconds": 0}
    assert_close(predict(mode, 1), **expected, seconds=11.5, memory_bytes=2000)


def test_members_are_dealt_in_blocks_of_which_there_is_one_for_each_worker() -> None:
    seconds = []
    for workers in (1, 2, 3, 4, 8):  # 2 blocks of 8 members, then 3 of 6, 4 of 4 and 8 of 2
        cost = predict_cost(replace(RATES, block=8), OpenAIES(), 100, 16, "replay", workers, NETWORK)
        assert cost is not None
        seconds.append(cost.evaluate_seconds)
    assert seconds == [16, 8, 6, 4, 2]


def test_parameters_of_eight_bytes_double_what_travels_but_not_scores_and_sums() -> None:
    wide = replace(RATES, width=8)
    received = {}
    for mode in MODES:
        cost = predict_cost(wide, OpenAIES(), 100, 10, mode, 4, NETWORK)
        assert cost is not None
        received[mode] = cost.bytes_received
    assert received == {"replay": 30, "chromosome": 630, "semi": 630, "central": 830}


def test_the_arrays_that_a_strategy_reads_and_sums() -> None:
    strategies: list[AnyStrategy] = [OpenAIES(), SNES(), MuLambda(parents=7), GA(parents=5), PSO(population=20)]
    assert [count_asked_arrays(strategy) for strategy in strategies] == [1, 2, 7, 5, 21]
    assert [count_summed_arrays(strategy) for strategy in strategies] == [1, 2, 0, 0, 0]
    assert count_asked_arrays(PSO(population=20), 8) == 9
    assert_close(predict("chromosome", 4, PSO(), population=8), bytes_received=24 + 9 * 300)
    assert_close(predict("semi", 4, SNES()), bytes_received=30 + 2 * 600)


def test_the_swarm_is_in_the_memory_of_every_worker() -> None:
    rates = Rates(1.0, 0.1, 0.0, held=1, held_per_member=3, block=2)
    memory = {}
    for mode in ("replay", "chromosome"):
        cost = predict_cost(rates, PSO(), 100, 8, mode, 4, NETWORK)
        assert cost is not None
        memory[mode] = cost.memory_bytes
    assert memory == {"replay": (25 + 2) * 400, "chromosome": (9 + 16 / 4 + 2) * 400}


def test_modes_that_a_strategy_cannot_be_run_in_have_no_cost() -> None:
    network = Network.parse("1gbit")
    assert predict_cost(RATES, GA(), 100, 10, "semi", 4, network) is None
    assert weak_efficiency(RATES, GA(), 100, 10, "semi", 4, network) is None
    assert strong_efficiency(RATES, GA(), 100, 10, "semi", 4, network) is None
    for strategy in (OpenAIES(optimizer="torch.AdamW"), OpenAIES(optimizer=lambda p: torch.optim.SGD(p, lr=0.1))):
        assert predict_cost(RATES, strategy, 100, 10, "chromosome", 4, network) is not None
    for strategy in (OpenAIES(optimizer="torch.Adafactor"), OpenAIES(optimizer=lambda p: torch.optim.Adafactor(p))):
        assert predict_cost(RATES, strategy, 100, 10, "chromosome", 4, network) is None
        assert {cost.mode for cost in predict_costs(RATES, strategy, 100, 10, network)} == {"replay", "semi", "central"}


def test_an_error_says_what_has_no_cost() -> None:
    reasons = ((Gradient(), "no members"), (PESGD(), "rounded up"), (HybridES(), "--link"))
    for strategy, reason in reasons:
        with pytest.raises(BadInput, match=f"strategy '{strategy.name}': .*{reason}.* openai-es"):
            count_asked_arrays(strategy)
    with pytest.raises(BadInput, match="There is no exchange 'chromosom': did you mean 'chromosome'"):
        predict_cost(RATES, OpenAIES(), 100, 10, "chromosom", 4, NETWORK)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="at least one worker and one member, not 0 and 10"):
        predict_cost(RATES, OpenAIES(), 100, 10, "replay", 0, NETWORK)


# Ratios


def received(mode: Mode, workers: int, strategy: AnyStrategy) -> float:
    cost = predict_cost(LARGE, strategy, MILLIONS, 96, mode, workers, NETWORK)
    assert cost is not None
    return cost.bytes_received


@pytest.mark.parametrize("strategy", [OpenAIES(), SNES()], ids=lambda strategy: str(strategy.name))
@pytest.mark.parametrize("workers", [2, 16, 96, 1024])
def test_columns_are_half_of_what_semi_updates_receive_and_scores_next_to_nothing(
    strategy: AnyStrategy, workers: int
) -> None:
    assert received("chromosome", workers, strategy) / received("semi", workers, strategy) == pytest.approx(0.5, 1e-3)
    assert received("replay", workers, strategy) < received("chromosome", workers, strategy) / 1000


@every_mode
def test_efficiencies_of_one_worker_are_one(mode: Mode) -> None:
    network = Network.parse("10mbit")
    for members in (1, 8, 128):
        assert weak_efficiency(LARGE, OpenAIES(), MILLIONS, members, mode, 1, network) == 1
        assert strong_efficiency(LARGE, OpenAIES(), MILLIONS, members, mode, 1, network) == 1


def test_efficiencies_by_hand() -> None:
    free = Network(1e30, 0.0)
    # 2 members on one worker: 2 + 0.7 s; 8 on four: 2 + 1.3 s by replay, 2 + 1.3 / 4 s by columns
    assert weak_efficiency(RATES, OpenAIES(), 100, 2, "replay", 4, free) == pytest.approx(2.7 / 3.3)
    assert weak_efficiency(RATES, OpenAIES(), 100, 2, "chromosome", 4, free) == pytest.approx(2.7 / 2.325)
    # 8 members on one worker: 8 + 1.3 s
    assert strong_efficiency(RATES, OpenAIES(), 100, 8, "replay", 4, free) == pytest.approx(9.3 / (4 * 3.3))
    assert strong_efficiency(RATES, OpenAIES(), 100, 8, "chromosome", 4, free) == pytest.approx(1.0)


def test_the_table_has_every_mode_for_every_number_of_workers() -> None:
    costs = predict_costs(LARGE, OpenAIES(), MILLIONS, 960, Network.parse("1gbit"), workers=(1, 8))
    assert [(cost.workers, cost.mode) for cost in costs] == [(n, mode) for n in (1, 8) for mode in MODES]
    assert costs[4].as_row() == {
        "workers": "8",
        "exchange": "replay",
        "generation": "1.56 s",
        "evaluate": "1.20 s",
        "update": "0.36 s",
        "network": "2.13 ms",
        "received": "3.4 kB",
        "memory": "84 MB",
    }


# Networks


def test_networks_are_parsed() -> None:
    assert Network.parse("1gbit").bandwidth_bytes_per_second == 125e6
    assert Network.parse("2.5Mbit").bandwidth_bytes_per_second == 312_500
    assert Network.parse("10mbit 20ms") == Network(1.25e6, 0.02)
    assert Network.parse("none").bandwidth_bytes_per_second >= 1e9
    described = [Network.parse(text).describe() for text in ("1gbit", "10mbit", "64kbit", "none")]
    assert described == ["1 Gbit/s", "10 Mbit/s", "64 kbit/s", "no limit"]


@pytest.mark.parametrize("text", ["", "fast", "100", "0mbit", "-1mbit", "100mbit soon", "100mbit 1ms 2ms", "10mb"])
def test_other_networks_are_answered_by_a_sentence(text: str) -> None:
    with pytest.raises(BadInput, match=r"A network is written as 1gbit, .* or none, not '.*'\.$"):
        Network.parse(text)


# Recommendations


@pytest.mark.parametrize(("network", "mode"), [("none", "chromosome"), ("10mbit", "replay")])
def test_the_cheapest_mode_is_recommended(network: str, mode: str) -> None:
    costs = predict_costs(LARGE, OpenAIES(), MILLIONS, 960, Network.parse(network), workers=(1, 4, 16))
    fastest = min((cost for cost in costs if cost.workers == 16), key=lambda cost: cost.seconds)
    assert choose_cost(costs) == fastest
    assert fastest.mode == mode
    assert recommend(costs).startswith(f"Use {mode} for 16 workers: ")


def test_a_recommendation_says_why() -> None:
    thin = predict_costs(LARGE, OpenAIES(), MILLIONS, 960, Network.parse("10mbit"), workers=(16,))
    assert recommend(thin) == (
        "Use replay for 16 workers: it receives 3.6 kB a generation where chromosome receives 11 MB, "
        "and the update it repeats costs 0.36 s of 0.97 s."
    )
    wide = predict_costs(LARGE, OpenAIES(), MILLIONS, 960, Network(2e9, 3e-4), workers=(16,))
    assert recommend(wide) == (
        "Use chromosome for 16 workers: each updates its columns in 22.5 ms where replay takes 0.36 s for all, "
        "and the 11 MB it receives cost 14.6 ms of 0.64 s."
    )
    assert recommend(thin[1:]).startswith("Use chromosome for 16 workers: a generation takes ")
    assert recommend(thin[2:3]).startswith("Use semi for 16 workers, though it is approximate: a generation takes ")
    alone = predict_costs(LARGE, OpenAIES(), MILLIONS, 960, Network.parse("none"), workers=(1,))
    assert recommend(alone) == "One worker needs no exchange: a generation takes 9.96 s."


def test_a_simpler_mode_is_kept_where_another_gains_next_to_nothing() -> None:
    rates = replace(LARGE, noise_seconds=1e-5, step_seconds=0.0)
    costs = predict_costs(rates, OpenAIES(), 1000, 960, Network.parse("none"), workers=(2,))
    assert min(costs, key=lambda cost: cost.seconds).mode == "chromosome"
    assert choose_cost(costs).mode == "replay"


def test_quantities_for_a_person() -> None:
    assert [format_bytes(n) for n in (0, 999, 1000, 9999, 2.5e9, 4e13)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "10 kB",
        "2.5 GB",
        "40 TB",
    ]
    assert [format_seconds(t) for t in (0.00012, 0.0999, 0.1, 61.0)] == ["0.12 ms", "99.9 ms", "0.10 s", "61.00 s"]


# Measuring and drawing


def small() -> Recipe:
    return Recipe(
        model=nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
        data=(torch.randn(32, 6), torch.randint(0, 3, (32,))),
        loss=nn.functional.cross_entropy,
        batch_size=16,
    )


@pytest.mark.parametrize(
    ("strategy", "held", "per_member"),
    [
        (OpenAIES(population=20, sigma="auto"), 3, 0),
        (OpenAIES(population=20, rank=1, optimizer="momentum"), 2, 0),
        (SNES(population=20), 2, 0),
        (MuLambda(population=20, parents=5), 5, 0),
        (GA(population=6, parents=6), 6, 0),
        (PSO(population=12), None, 3),
    ],
    ids=lambda value: str(value.name) if hasattr(value, "name") else None,
)
def test_rates_are_measured(strategy: AnyStrategy, held: int | None, per_member: int) -> None:
    threads = torch.get_num_threads()
    rates = measure_rates(small(), strategy, "cpu")
    assert torch.get_num_threads() == threads
    assert rates.member_seconds > 0
    assert rates.noise_seconds >= 0
    assert rates.step_seconds >= 0
    assert rates.update_seconds(strategy.population) > 0
    assert rates.held == held or held is None
    assert (rates.held_per_member, rates.width) == (per_member, 4)
    assert 1 <= rates.block <= strategy.population
    costs = predict_costs(rates, strategy, 83, strategy.population, Network.parse("1gbit"), workers=(4,))
    assert recommend(costs).startswith("Use ")


def test_an_objective_of_the_whole_model_is_measured() -> None:
    recipe = Recipe(model=nn.Linear(2, 1), objective=lambda model: float(model.weight.sum()), maximize=True)
    assert measure_rates(recipe, OpenAIES(population=4), "cpu").member_seconds > 0


def test_what_cannot_be_planned_is_not_measured() -> None:
    with pytest.raises(BadInput, match="no cost model for the strategy 'gradient'"):
        measure_rates(small(), Gradient(), "cpu")


@pytest.mark.parametrize(("strategy", "lines"), [(OpenAIES(), 9), (GA(), 6)], ids=["openai-es", "ga"])
def test_the_figure_has_efficiencies_with_and_without_a_limit(strategy: AnyStrategy, lines: int) -> None:
    plot = draw_efficiencies(LARGE, strategy, MILLIONS)
    axes = plot.axes
    assert [len(axis.lines) for axis in axes] == [lines] * 4
    assert [axis.get_title() for axis in axes[:2]] == ["network without a limit", "network of 100 Mbit/s"]
    assert all(float(line.get_ydata()[0]) == 1 for axis in axes for line in axis.lines)  # type: ignore[arg-type, index]


def test_without_matplotlib_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(BadInput, match=r"A figure needs matplotlib: pip install matplotlib\."):
        draw_efficiencies(LARGE, OpenAIES(), MILLIONS)
