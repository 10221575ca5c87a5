"""What the pictures show, read off the drawn artists."""

import dataclasses

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.colors import to_hex

import paged_kv_jax as pkv

mpl.use("Agg")
import matplotlib.pyplot as plt

from paged_kv_jax import viz

CONFIG = pkv.KVCacheConfig(
    num_layers=1, num_kv_heads=1, head_dim=8, num_blocks=12, block_size=4, max_seqs=10,
    max_blocks_per_seq=8, dtype=jnp.float32,
)  # fmt: skip
COLUMNS = 5


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


def grown(*lengths_by_seq_id):
    """A state in which sequences have these lengths (0: not live)."""
    lengths = jnp.asarray(lengths_by_seq_id, jnp.int32)
    seq_ids = jnp.where(lengths > 0, jnp.arange(len(lengths)), -1)
    state, _ = pkv.allocate(pkv.init(CONFIG), seq_ids, lengths)
    return state


def forked(state, parent, child):
    """The state in which `child` shares every block of `parent`, all of them full."""
    count = state.seq_block_count[parent]
    blocks = state.block_table[parent, : int(count)]
    return dataclasses.replace(
        state,
        block_table=state.block_table.at[child].set(state.block_table[parent]),
        seq_lens=state.seq_lens.at[child].set(state.seq_lens[parent]),
        seq_block_count=state.seq_block_count.at[child].set(count),
        ref_count=state.ref_count.at[blocks].add(1),
    )


def bars(ax, gid):
    """(left, top, right, bottom) of each rectangle of the collection with that gid."""
    (collection,) = [c for c in ax.collections if c.get_gid() == gid]
    return [
        (*path.vertices.min(axis=0).tolist(), *path.vertices.max(axis=0).tolist())
        for path in collection.get_paths()
    ]


def block_in_map(bar):
    return int(bar[1]) * COLUMNS + int(bar[0])


def block_in_strip(bar):
    return round((bar[1] + bar[3]) / 2)


def owned(state, seq_id):
    row = np.asarray(state.block_table[seq_id])
    return row[row >= 0].tolist()


def test_every_block_is_drawn_once_in_its_owners_colour_and_free_ones_in_none():
    state = grown(5, 0, 9, 2)
    state, _ = pkv.free(state, jnp.array([0]))
    state, _ = pkv.allocate(state, jnp.array([9]), 14)
    ax = viz.draw_blocks(state, columns=COLUMNS)
    drawn = []
    for seq_id in (2, 3, 9):
        blocks = [block_in_map(bar) for bar in bars(ax, f"sequence {seq_id}")]
        assert blocks == owned(state, seq_id)
        (collection,) = [c for c in ax.collections if c.get_gid() == f"sequence {seq_id}"]
        assert to_hex(collection.get_facecolor()[0]).upper() == viz.COLOURS[seq_id % 8]
        drawn += blocks
    assert len(drawn) == len(set(drawn)) == 12 - int(state.free_top)
    gids = {c.get_gid() for c in ax.collections if (c.get_gid() or "").startswith("sequence")}
    assert gids == {"sequence 2", "sequence 3", "sequence 9"}


def test_a_tail_is_filled_as_far_as_it_holds_tokens():
    ax = viz.draw_blocks(grown(5, 8, 3), columns=COLUMNS)
    widths = [
        right - left for s in range(3) for left, _, right, _ in bars(ax, f"sequence {s}")
    ]  # fmt: skip
    whole = widths[0]
    np.testing.assert_allclose(np.array(widths) / whole, [1, 1 / 4, 1, 1, 3 / 4])


def test_the_title_counts_blocks_and_slots():
    assert viz.draw_blocks(grown(5, 8, 3)).get_title("left") == (
        "5 of 12 blocks used, 16 of their 20 slots filled"
    )
    assert viz.draw_blocks(pkv.init(CONFIG)).get_title("left") == "0 of 12 blocks used"


def test_shared_blocks_are_framed_counted_and_divided_among_their_owners():
    state = forked(grown(8, 5), parent=0, child=3)
    assert pkv.check_invariants(state) == []
    ax = viz.draw_blocks(state, columns=COLUMNS)
    assert [block_in_map(bar) for bar in bars(ax, "shared")] == owned(state, 0)
    for upper, lower, frame in zip(
        bars(ax, "sequence 0"), bars(ax, "sequence 3"), bars(ax, "shared"), strict=True
    ):
        assert block_in_map(upper) == block_in_map(lower)
        assert upper[3] == pytest.approx(lower[1])
        assert lower[3] == pytest.approx(frame[3])
    assert sum(text.get_text() == "×2" for text in ax.texts) == 2
    # Two blocks shared by two hold 8 tokens once, and the other sequence has 5.
    assert ax.get_title("left") == "4 of 12 blocks used, 13 of their 16 slots filled"


def test_blocks_that_only_a_prefix_index_keeps_are_neither_free_nor_a_sequences():
    kept = grown(8, 5)
    kept = dataclasses.replace(kept, ref_count=kept.ref_count.at[:2].add(1))  # the index's
    state, _ = pkv.free(kept, jnp.array([0]))
    ax = viz.draw_blocks(state, columns=COLUMNS)
    assert [block_in_map(bar) for bar in bars(ax, "cached")] == owned(kept, 0)
    assert ax.get_title("left") == "4 of 12 blocks used, 13 of their 16 slots filled"
    legend = ax.get_legend()
    assert legend is not None
    assert "cached" in [text.get_text() for text in legend.get_texts()]
    strip = viz.draw_history([kept, state])
    cached = [c for c in strip.collections if c.get_gid() == "cached"]
    assert [len(c.get_paths()) for c in cached] == [0, 2]


def test_nothing_is_framed_where_nothing_is_shared():
    assert bars(viz.draw_blocks(grown(6, 4)), "shared") == []


def test_cells_say_which_block_and_whose():
    state = grown(5, 9)
    ax = viz.draw_blocks(state, labels=[*"ABCDEFGHI", "long name"], columns=COLUMNS)
    texts = [text.get_text() for text in ax.texts]
    assert texts[:12] == [str(block) for block in range(12)]
    assert texts[12:] == ["A[0]", "A[1]", "B[0]", "B[1]", "B[2]"]
    legend = ax.get_legend()
    assert legend is not None
    assert [t.get_text() for t in legend.get_texts()] == ["A: 5 tokens", "B: 9 tokens", "free"]


def test_history_fills_each_lane_over_time_and_empties_it_when_its_sequence_leaves():
    states = [grown(3, 4)]
    for _ in range(2):
        states.append(pkv.append(states[-1], jnp.array([0, 1]), 1)[0])
    states.append(pkv.free(states[-1], jnp.array([0]))[0])
    ax = viz.draw_history(states)
    heights = {}
    for seq_id in (0, 1):
        for bar in bars(ax, f"sequence {seq_id}"):
            time = round((bar[0] + bar[2]) / 2)
            heights[seq_id, time, block_in_strip(bar)] = (bar[3] - bar[1]) / viz._LANE
    expected = {}
    for time, state in enumerate(states):
        for seq_id in (0, 1):
            for column, block in enumerate(owned(state, seq_id)):
                tokens = min(4, int(state.seq_lens[seq_id]) - 4 * column)
                expected[seq_id, time, block] = tokens / 4
    assert heights.keys() == expected.keys()
    assert len(expected) == 2 + 3 + 4 + 2
    for key, fill in expected.items():
        assert heights[key] == pytest.approx(fill)


def test_history_takes_the_states_of_a_scan():
    def step(state, _):
        state, _ = pkv.append(state, jnp.array([0, 1]), 1)
        return state, state

    _, stacked = jax.lax.scan(step, grown(3, 4), length=5)
    apart = [jax.tree.map(lambda leaf: leaf[time], stacked) for time in range(5)]  # noqa: B023
    assert bars(viz.draw_history(stacked), "sequence 1") == bars(
        viz.draw_history(apart), "sequence 1"
    )


def test_history_marks_where_the_sticky_word_was_first_set():
    states = [grown(3, 4)]
    states.append(pkv.append(states[-1], jnp.array([0]), 1)[0])
    states.append(pkv.append(states[-1], jnp.array([5]), 1)[0])  # not live
    states.append(pkv.append(states[-1], jnp.array([5]), 1)[0])
    ax = viz.draw_history(states)
    assert [line.get_xdata()[0] for line in ax.lines if line.get_gid() == "failure"] == [1.5]
    assert [text.get_text() for text in ax.texts] == ["INVALID_SEQ"]


def test_it_draws_into_the_axes_it_is_given():
    _, (left, right) = plt.subplots(2)
    assert viz.draw_blocks(grown(3), ax=left) is left
    assert viz.draw_history([grown(3)], ax=right) is right
    assert len(plt.get_fignums()) == 1


def test_many_sequences_stay_apart_by_hatch_and_the_legend_says_how_many_it_leaves_out():
    config = dataclasses.replace(CONFIG, num_blocks=64, max_seqs=20)
    state, _ = pkv.allocate(pkv.init(config), jnp.arange(20), jnp.arange(20) + 1)
    ax = viz.draw_blocks(state)
    hatches = {c.get_gid(): c.get_hatch() for c in ax.collections if c.get_gid()}
    assert hatches["sequence 1"] != hatches["sequence 9"] != hatches["sequence 17"]
    legend = ax.get_legend()
    assert legend is not None
    assert [t.get_text() for t in legend.get_texts()][-2:] == ["and 8 more sequences", "free"]


def test_arguments_that_cannot_be_drawn_are_named():
    state = grown(3)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state)
    with pytest.raises(TypeError, match=r"state is a PagedKVCache.*cache\.state"):
        viz.draw_blocks(pkv.PagedKVCache.create(CONFIG))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="draw_history"):
        viz.draw_blocks(stacked)
    with pytest.raises(TypeError, match="state is being traced"):
        jax.jit(lambda state: viz.draw_blocks(state))(state)
    with pytest.raises(ValueError, match=r"labels has 2 names.* 10 sequences"):
        viz.draw_blocks(state, labels="AB")
    with pytest.raises(ValueError, match="columns=0 "):
        viz.draw_blocks(state, columns=0)
    with pytest.raises(ValueError, match="states is empty"):
        viz.draw_history([])
    with pytest.raises(TypeError, match=r"states\[1\] is a int"):
        viz.draw_history([state, 3])  # pyright: ignore[reportArgumentType]
    other = pkv.init(dataclasses.replace(CONFIG, num_blocks=6))
    with pytest.raises(ValueError, match=r"states\[1\] has 6 blocks of 4 .* 12 of 4"):
        viz.draw_history([state, other])
    jax.tree.map(lambda leaf: leaf.delete(), state)
    with pytest.raises(ValueError, match="state was donated"):
        viz.draw_blocks(state)
