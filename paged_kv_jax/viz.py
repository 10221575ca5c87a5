"""Pictures of the allocator's state. Needs the extra: pip install "paged_kv_jax[viz]".

`draw_blocks` is a map of the pool at one moment, `draw_history` a strip with a lane for each block
and time from left to right. Both run on the host, on states that hold values.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from paged_kv_jax.errors import ResultCode
from paged_kv_jax.state import BlockState

try:
    import matplotlib.pyplot as plt
    from matplotlib.collections import LineCollection, PolyCollection
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator
except ModuleNotFoundError as error:
    if (error.name or "").split(".")[0] != "matplotlib":
        raise
    raise ModuleNotFoundError(
        'matplotlib is missing: pip install "paged_kv_jax[viz]"', name=error.name
    ) from error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# After Okabe and Ito, "Color Universal Design" (2008), in an order whose neighbours differ most,
# with a darker yellow for white paper and violet for black. More sequences get a hatch as well.
COLOURS = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B8A800", "#6A4C93",
)  # fmt: skip
HATCHES = ("", "////", "....", "xxxx")
FREE, CACHED = "#ECEEF1", "#8C959F"
_INK, _PALE_INK, _PAPER = "#24292F", "#6E7781", "#FFFFFF"

_HEADER, _MARGIN = 0.30, 0.06  # of a cell in the map: its line of text, and the gap around it
_READABLE_INCHES = 0.42  # a cell as large as that gets its text and its slots
_LANE = 0.86  # height of a block's lane in the strip
_MOST_IN_LEGEND = 12
_LONGEST_NAME = 3  # characters that fit above a cell


def draw_blocks(
    state: BlockState,
    *,
    ax: "Axes | None" = None,
    labels: Sequence[str] | None = None,
    columns: int = 16,
) -> "Axes":
    """Draw the pool as a map: a cell for each block, in the colour of the sequence that owns it.

    A cell is filled from the left as far as its slots hold tokens; the rest of an owned block is
    tinted. A block that several sequences share is framed, says how often it is referenced, and is
    divided among their colours from top to bottom. Blocks that only a prefix index keeps are grey.

    Args:
      state: the state to draw.
      ax: where to draw; a new figure if not given.
      labels: name of each of the S sequences; their ids if not given.
      columns: cells in a row of the map.

    Returns:
      The axes. Each live sequence has one `PolyCollection` of its filled slots in it, with the
      gid "sequence <id>".

    Raises:
      TypeError, ValueError: an argument cannot be drawn; the message names it.
    """
    _check_concrete("state", state)
    if np.ndim(state.free_top):
        raise ValueError(
            f"state has {np.shape(state.free_top)} states in it; give draw_blocks one of them, or all "
            "to draw_history"
        )
    labels = _check_labels(labels, state)
    if isinstance(columns, bool) or not isinstance(columns, int) or columns < 1:
        raise ValueError(f"columns={columns!r} must be an int of at least 1")
    num_blocks, columns = state.num_blocks, min(columns, state.num_blocks)
    rows = -(-num_blocks // columns)
    if ax is None:
        cell = min(0.62, 10 / columns)
        size = (columns * cell + 2.6, max(rows * cell, 0.9) + 0.5)
        _, ax = plt.subplots(figsize=size, layout="constrained")
    ax.set(xlim=(0, columns), ylim=(rows, 0), aspect="equal")
    ax.axis("off")

    space = ax.get_window_extent()
    cell_inches = min(space.width / columns, space.height / rows) / ax.figure.dpi
    has_room = cell_inches >= _READABLE_INCHES
    above = _HEADER if has_room else _MARGIN
    block = np.arange(num_blocks)
    left, top = block % columns + _MARGIN, block // columns + above
    width, height = 1 - 2 * _MARGIN, 1 - above - _MARGIN
    _add_bars(ax, left, top, width, height, color=FREE)
    is_cached = _is_cached(state)
    _add_bars(ax, left[is_cached], top[is_cached], width, height, color=CACHED, gid="cached")
    filled = is_cached.astype(float)  # only whole blocks are kept
    for seq_id, share in _shares(state):
        filled[share.block] = np.maximum(filled[share.block], share.fill)
        x, y = left[share.block], top[share.block] + height * share.start
        tall = height * share.extent
        _add_bars(ax, x, y, width, tall, color=_tint(seq_id))
        _add_bars(ax, x, y, width * share.fill, tall, gid=f"sequence {seq_id}", **_style(seq_id))
    is_shared = np.asarray(state.ref_count) > 1
    _add_bars(
        ax, left[is_shared], top[is_shared], width, height,
        facecolor="none", edgecolor=_INK, linewidth=1.6, gid="shared",
    )  # fmt: skip

    if has_room:
        _add_slot_lines(ax, state, left, top, width, height)
        _add_headers(ax, state, left, top, width, labels)
    used, tokens = num_blocks - int(state.free_top), round(filled.sum() * state.block_size)
    title = f"{used} of {num_blocks} blocks used"
    if used:
        title += f", {tokens} of their {used * state.block_size} slots filled"
    ax.set_title(title, loc="left", fontsize=10, color=_INK)
    _add_legend(ax, [state], labels, with_lengths=True)
    return ax


def draw_history(
    states: BlockState | Sequence[BlockState],
    *,
    ax: "Axes | None" = None,
    labels: Sequence[str] | None = None,
) -> "Axes":
    """Draw who owned which block over time: a lane for each block, a column for each state.

    A lane is filled from below as far as the block's slots hold tokens; the rest of an owned block
    is tinted. A dashed line marks the state in which a bit of the sticky word was first set.

    Args:
      states: states of one pool in order of time: a sequence of them, or one `BlockState` with a
        leading axis, as `lax.scan` stacks them.
      ax: where to draw; a new figure if not given.
      labels: name of each of the S sequences; their ids if not given.

    Returns:
      The axes. Each sequence that was ever live has one `PolyCollection` of its filled slots in it,
      with the gid "sequence <id>".

    Raises:
      TypeError, ValueError: an argument cannot be drawn; the message names it.
    """
    states = _unstack(states)
    num_blocks, num_states = states[0].num_blocks, len(states)
    labels = _check_labels(labels, states[0])
    if ax is None:
        size = (min(4 + 0.12 * num_states, 9) + 1.6, min(max(0.22 * num_blocks, 1.2), 9) + 0.7)
        _, ax = plt.subplots(figsize=size, layout="constrained")

    lane = np.arange(num_blocks) + _LANE / 2  # bottom of each lane; block 0 is at the top
    _add_bars(ax, np.full(num_blocks, -0.5), lane, num_states, -_LANE, color=FREE)
    shares: dict[int, list[tuple[int, _Share]]] = {}
    for time, state in enumerate(states):
        cached = lane[_is_cached(state)]
        _add_bars(
            ax, np.full(len(cached), time - 0.5), cached, 1, -_LANE, color=CACHED, gid="cached"
        )
        for seq_id, share in _shares(state):
            shares.setdefault(seq_id, []).append((time, share))
    for seq_id, timed in sorted(shares.items()):
        x = np.concatenate([np.full(len(share.block), time - 0.5) for time, share in timed])
        share = _Share(*map(np.concatenate, zip(*[share for _, share in timed], strict=True)))
        y, tall = lane[share.block] - _LANE * share.start, -_LANE * share.extent
        # Without antialiasing, neighbours in time join without a seam.
        _add_bars(ax, x, y, 1, tall, color=_tint(seq_id), antialiased=False)
        _add_bars(
            ax, x, y, 1, tall * share.fill,
            antialiased=False, gid=f"sequence {seq_id}", **_style(seq_id),
        )  # fmt: skip
    _add_failures(ax, states)

    ax.set(xlim=(-0.5, num_states - 0.5), ylim=(num_blocks - 0.4, -0.6))
    ax.set_xlabel("step", color=_INK)
    ax.set_ylabel("block", color=_INK)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if num_blocks <= 24:
        ax.set_yticks(range(num_blocks))
    else:
        ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax.tick_params(length=0, labelsize=8, colors=_PALE_INK)
    ax.spines[:].set_visible(False)
    _add_legend(ax, states, labels, with_lengths=False)
    return ax


class _Share(NamedTuple):
    """A sequence's part of each block that it holds; arrays [number of its blocks]."""

    block: np.ndarray
    column: np.ndarray  # its place in the sequence's row of the block table
    start: np.ndarray  # where its part of the block's cell begins, 0 unless the block is shared
    extent: np.ndarray  # how much of the cell it gets, 1 unless the block is shared
    fill: np.ndarray  # how much of the block its tokens fill


def _shares(state: BlockState) -> Iterator[tuple[int, _Share]]:
    """Each live sequence's seq_id and blocks."""
    table, lens = np.asarray(state.block_table), np.asarray(state.seq_lens)
    held = table >= 0
    holders = np.bincount(table[held], minlength=state.num_blocks)
    holders_before = np.zeros_like(holders)
    for seq_id in np.flatnonzero(held.any(axis=1)):
        column = np.flatnonzero(held[seq_id])
        block = table[seq_id, column]
        extent = 1 / holders[block]
        filled = np.clip(lens[seq_id] - column * state.block_size, 0, state.block_size)
        yield (
            int(seq_id),
            _Share(
                block, column, holders_before[block] * extent, extent, filled / state.block_size
            ),
        )
        holders_before[block] += 1


def _is_cached(state: BlockState) -> np.ndarray:
    """bool [N]: blocks that no sequence holds and that are not free, kept by a prefix index."""
    table = np.asarray(state.block_table)
    is_held = np.bincount(table[table >= 0], minlength=state.num_blocks) > 0
    return (np.asarray(state.ref_count) > 0) & ~is_held


def _style(seq_id: int) -> dict:
    """How the slots that hold a sequence's tokens are drawn."""
    return dict(
        facecolor=COLOURS[seq_id % len(COLOURS)],
        edgecolor=_PAPER,  # of the hatch; there is no line around
        hatch=HATCHES[seq_id // len(COLOURS) % len(HATCHES)] or None,
        linewidth=0,
    )


def _tint(seq_id: int) -> tuple[str, float]:
    """The colour, with its opacity, of slots that a sequence owns and that hold no token."""
    return COLOURS[seq_id % len(COLOURS)], 0.3


def _add_bars(ax: "Axes", left, top, width, height, **style) -> None:
    """One collection of rectangles; each measure is an array [n] or, for all alike, a float."""
    left, top, width, height = np.broadcast_arrays(left, top, width, height)
    x, y = np.stack([left, left + width], axis=-1), np.stack([top, top + height], axis=-1)
    corners = np.stack([x[:, [0, 1, 1, 0]], y[:, [0, 0, 1, 1]]], axis=-1)
    style.setdefault("linewidth", 0)
    ax.add_collection(PolyCollection(list(corners), **style), autolim=False)


def _add_slot_lines(ax: "Axes", state: BlockState, left, top, width, height) -> None:
    """Thin lines between the slots of a block, where there is room for them."""
    if state.block_size > 8:
        return
    x = (left[:, None] + width * np.arange(1, state.block_size) / state.block_size).ravel()
    y = np.repeat(top, state.block_size - 1)
    ends = np.stack([np.stack([x, y], -1), np.stack([x, y + height], -1)], axis=1)
    ax.add_collection(LineCollection(list(ends), color=_PAPER, linewidth=0.7, alpha=0.8))


def _add_headers(ax: "Axes", state: BlockState, left, top, width, labels: Sequence[str]) -> None:
    """Above each cell: the block's id, and its place in its owner's table or how often it is shared."""
    for block in range(state.num_blocks):
        ax.text(
            left[block], top[block] - 0.05, str(block),
            fontsize=7, color=_PALE_INK, ha="left", va="bottom",
        )  # fmt: skip
    ref_count = np.asarray(state.ref_count)
    for seq_id, share in _shares(state):
        name = labels[seq_id] if len(labels[seq_id]) <= _LONGEST_NAME else ""  # the colour tells
        for block, column in zip(share.block, share.column, strict=True):
            is_shared = ref_count[block] > 1
            if not is_shared or share.start[share.block == block] == 0:  # once, for the first
                ax.text(
                    left[block] + width, top[block] - 0.05,
                    f"×{ref_count[block]}" if is_shared else f"{name}[{column}]",
                    fontsize=7, fontweight="bold", color=_INK, ha="right", va="bottom",
                )  # fmt: skip


def _add_failures(ax: "Axes", states: Sequence[BlockState]) -> None:
    seen = 0
    for time, state in enumerate(states):
        word = int(state.errors)
        names = [code.name for code in ResultCode if word & ~seen & code.bit]
        seen |= word
        if names:
            ax.axvline(time - 0.5, color=_INK, linewidth=1.2, linestyle=(0, (4, 2)), gid="failure")
            ax.annotate(
                ", ".join(names), (time - 0.5, 1), xycoords=("data", "axes fraction"),
                xytext=(0, 3), textcoords="offset points",
                fontsize=8, color=_INK, ha="center", va="bottom",
            )  # fmt: skip


def _add_legend(
    ax: "Axes", states: Sequence[BlockState], labels: Sequence[str], *, with_lengths: bool
) -> None:
    """To the right of the axes: the sequences that ever held a block, free, and shared."""
    counts = np.stack([np.asarray(state.seq_block_count) for state in states])
    live = np.flatnonzero(counts.any(axis=0))
    entries = []
    for seq_id in live[:_MOST_IN_LEGEND]:
        length = f": {int(states[-1].seq_lens[seq_id])} tokens" if with_lengths else ""
        entries.append(Patch(**_style(int(seq_id)), label=f"{labels[seq_id]}{length}"))
    if len(live) > _MOST_IN_LEGEND:
        more = f"and {len(live) - _MOST_IN_LEGEND} more sequences"
        entries.append(Line2D([], [], linestyle="", label=more))
    if any(_is_cached(state).any() for state in states):
        entries.append(Patch(facecolor=CACHED, label="cached"))
    entries.append(Patch(facecolor=FREE, label="free"))
    if with_lengths and np.any(np.asarray(states[-1].ref_count) > 1):
        entries.append(Patch(facecolor=_PAPER, edgecolor=_INK, linewidth=1.6, label="shared"))
    ax.legend(
        handles=entries, title="sequence", alignment="left", title_fontsize=9,
        loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0,
        frameon=False, fontsize=9, labelcolor=_INK, handlelength=1.2, handleheight=1.0,
    )  # fmt: skip


def _unstack(states: BlockState | Sequence[BlockState]) -> list[BlockState]:
    """The states one by one, on the host."""
    if isinstance(states, BlockState):
        _check_concrete("states", states)
        if np.ndim(states.free_top) != 1:
            raise ValueError(
                f"states is a BlockState with {np.ndim(states.free_top)} leading axes; it must have "
                "one, time, or be a sequence of states"
            )
        stacked = jax.tree.map(np.asarray, states)
        states = [
            jax.tree.map(lambda leaf: leaf[time], stacked)  # noqa: B023 (called at once)
            for time in range(len(stacked.free_top))
        ]
    states = list(states)
    if not states:
        raise ValueError("states is empty; there is nothing to draw")
    for index, state in enumerate(states):
        _check_concrete(f"states[{index}]", state)
        if np.ndim(state.free_top):
            raise ValueError(f"states[{index}] is a stack of states; give it alone, or its parts")
        if state.num_blocks != states[0].num_blocks or state.block_size != states[0].block_size:
            raise ValueError(
                f"states[{index}] has {state.num_blocks} blocks of {state.block_size} slots and "
                f"states[0] {states[0].num_blocks} of {states[0].block_size}; they must be of one pool"
            )
    return states


def _check_concrete(name: str, state: BlockState) -> None:
    if not isinstance(state, BlockState):
        raise TypeError(
            f"{name} is a {type(state).__name__}; it must be a BlockState, such as cache.state"
        )
    for field in dataclasses.fields(state):
        leaf = getattr(state, field.name)
        if isinstance(leaf, Tracer):
            raise TypeError(
                f"{name} is being traced and holds no values; return it from the compiled function "
                "and draw it there"
            )
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ValueError(f"{name} was donated and is gone; draw it before, or keep a copy")


def _check_labels(labels: Sequence[str] | None, state: BlockState) -> Sequence[str]:
    if labels is None:
        return [str(seq_id) for seq_id in range(state.max_seqs)]
    if len(labels) != state.max_seqs:
        raise ValueError(
            f"labels has {len(labels)} names; it must have one for each of the {state.max_seqs} sequences"
        )
    return labels
