"""The attention benchmark's own logic on tiny cells: what it counts, checks, compares and keeps."""

import json
import pathlib
import types

import jax.numpy as jnp
import numpy as np
import pytest

BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"
TINY = dict(num_heads=2, num_kv_heads=1, head_dim=16, block_size=8)


@pytest.fixture
def bench(monkeypatch) -> types.ModuleType:
    """The script, with clocks and ceilings that need no GPU: the n-th thing timed takes n us."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import attention
    import measure

    timed = iter(range(1, 1000))
    monkeypatch.setattr(measure, "median_us", lambda call, iterations: float(next(timed)))
    monkeypatch.setattr(measure, "ceilings", lambda: {"read": 4.0, "copy": 4.0})
    monkeypatch.setattr(measure, "environment", lambda: {"gpu": "none"})
    return attention


def test_a_case_holds_what_its_cell_says(bench):
    cell = bench.Cell("cell", (40, 70, 25), (9, 46, 1), shared=24, sharers=2, **TINY)
    visible = [
        range(position + 1)
        for q, n in zip(cell.q_lens, cell.kv_lens, strict=True)
        for position in range(n - q, n)
    ]
    assert cell.flops == 4 * 16 * 2 * sum(map(len, visible))
    assert cell.live_bytes == 2 * (40 + 70 + 25) * 16 * 2

    case = bench.make_case(cell)
    assert case.rows.tolist() == [0] * 9 + [1] * 46 + [2]
    assert case.positions.tolist() == [keys[-1] for keys in visible]
    table = np.asarray(case.block_table)
    np.testing.assert_array_equal(table[0, :3], table[1, :3])  # the third row is alone
    used = [*table[1:, :3].ravel().tolist(), *table[:, 3:][table[:, 3:] >= 0].tolist()]
    assert sorted(used) == list(range(3 + 3 + 2 + 6 + 1)) == list(range(case.k_pool.shape[1]))

    # Peers that take one query length for all rows get the last queries aligned.
    padded, place = bench.peers._padded(case, at_end=False)
    np.testing.assert_array_equal(padded[place], case.q)
    np.testing.assert_array_equal(padded[0, :-9], 0)
    np.testing.assert_array_equal(padded[2, -1], case.q[-1])


def test_contenders_are_checked_timed_and_kept(bench, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib", reason="the benchmark draws its results")
    right = bench._ours("xla", shared_prefix=True)

    def wrong(case):
        return [bench.Call(lambda: jnp.zeros_like(case.q))]

    contenders = {"prefill": {"mosaic_gpu": bench._ours("mosaic_gpu"), "xla": right, "bad": wrong}}
    cells = {"prefill": [bench.Cell("cell", (150, 140), (3, 1), shared=128, **TINY)]}
    for table, value in (("CELLS", cells), ("CONTENDERS", contenders), ("OURS", contenders)):
        monkeypatch.setattr(bench, table, value)
    bench.main(["--out", str(tmp_path)])
    record = json.loads((tmp_path / "attention_prefill.json").read_text())
    mosaic, xla, bad = record["results"]
    assert "NotImplementedError" in mosaic["error"]
    assert "wrong: relative error" in bad["error"]
    assert xla["time_us"] == 1
    flops = 4 * 16 * 2 * (148 + 149 + 150 + 140)
    assert xla["tflop_per_s"] == pytest.approx(flops / 1e6)
    assert xla["share_of_peak"] == pytest.approx(flops / 1e6 / 989)
    assert xla["cell"]["kv_lens"] == "150, 140"
    assert (tmp_path / "attention_prefill.png").stat().st_size > 1000


def test_times_are_compared_with_parts_and_with_plain_attention(bench):
    def result(cell, name, time_us, parts=()):
        return {"cell": {"name": cell, "parts": parts}, "name": name, "time_us": time_us}

    results = [
        result("one", "x", 2.0), result("two", "x", 3.0), result("both", "x", 4.0, ("one", "two")),
        result("both", "y", 4.0, ("one", "two")), result("one", "x cascade", 0.5),
    ]  # fmt: skip
    assert bench.over_parts(results) == [{"cell": "both", "name": "x", "ratio": 0.8}]
    assert bench.speedups(results) == [{"cell": "one", "name": "x cascade", "speedup": 4.0}]


def test_cells_that_do_not_exist_are_refused_by_name(bench, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--cells", "B1x1"])
    assert "no such cells: B1x1; there are B1x32768" in capsys.readouterr().err


def test_every_cell_has_a_name_of_its_own_and_parts_that_exist(bench):
    names = [cell.name for cells in bench.CELLS.values() for cell in cells]
    assert len(names) == len(set(names))
    for kind, cells in bench.CELLS.items():
        for cell in cells:
            assert set(cell.parts) <= set(names)
            assert set(cell.contenders) <= set(bench.CONTENDERS[kind])
