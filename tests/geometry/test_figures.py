"""Figures as data: what is drawn of which rows, on which scale."""

from typing import Any

import pytest

from statewise.geometry import figures


def row(module: str, layer: int, **numbers: Any) -> dict[str, Any]:
    return {
        "checkpoint": "a<b>",
        "matrix": f"{layer}.{module}",
        "module": module,
        "layer": layer,
        "entries": 10,
        **numbers,
    }


def test_sparsity_is_weighted_and_beside_noise() -> None:
    rows = [
        row("q", 0, sparsity=0.2, sparsity_noise=0.3),
        {**row("v", 0, sparsity=0.8, sparsity_noise=0.7), "entries": 30},
    ]
    figure = figures.sparsity(rows, ["a<b>"])
    bar, noise = figure["data"]
    assert bar["y"] == [pytest.approx(0.65), 0.2, 0.8] and bar["name"] == "a&lt;b&gt;"
    assert noise["y"] == [pytest.approx(0.6), 0.3, 0.7] and noise["mode"] == "markers"
    assert figure["layout"]["yaxis"]["title"]["text"] and figure["layout"]["xaxis"]["ticktext"] == ["all", "q", "v"]
    assert len(figures.sparsity([row("q", 0, sparsity=0.2)], ["a<b>"])["data"]) == 1


def test_heat_maps_take_logarithms_where_one_matrix_would_take_all_colours() -> None:
    rows = [row("q", 0, sparsity=0.2, nss=1e-5, low_gaussian_excess=-0.1), row("q", 1, sparsity=0.4, nss=1e-3)]
    maps = {trace["hovertemplate"].split("<br>")[1].split(":")[0]: trace for trace in figures.heat_maps(rows)["data"]}
    assert maps["bf16 sparsity"]["z"] == [[0.2], [0.4]]
    shift = maps["NSS"]
    assert shift["z"] == [[pytest.approx(-5)], [pytest.approx(-3)]] and shift["customdata"] == [[1e-5], [1e-3]]
    ticks = dict(zip(shift["colorbar"]["ticktext"], shift["colorbar"]["tickvals"], strict=True))
    assert ticks["0.0001"] == pytest.approx(-4)
    excess = maps["low-magnitude overlap less its null"]
    assert excess["z"] == [[-0.1], [None]] and excess["zmid"] == 0


def test_many_layers_are_drawn_thin() -> None:
    few, many = (
        [row("q", i, angle_u_max=1.0, angle_v_max=2.0, angle_u_noise_max=0.5) for i in range(n)] for n in (3, 30)
    )
    widths = [figures.angles(rows)["data"][0]["line"]["width"] for rows in (few, many)]
    assert widths[0] > widths[1]
    assert [trace["name"] for trace in figures.angles(few)["data"]] == ["q", figures.NOISE, "q"]
