"""The allocator's decode step, `append` and `make_plan`, in one launch through Pallas Triton.

As XLA operations the step is about twenty kernels of a microsecond each; the work in them is small.
Nothing else in the package imports this module, except the dispatch that names it: deleting it is
deleting one file.

Each program reads all rows and computes which blocks each gets, and writes its share of the plan. What
the programs read is also what the step updates in place, so the program that finishes last, when
nobody reads any more, writes the state. The programs count themselves in the upper half of the sticky
word, which result codes do not reach and which is zero before and after.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from paged_kv_jax.errors import ResultCode

MAX_ROWS = 4096
MAX_SEQS = 65_536
MAX_COLUMNS = 1024  # each program copies its rows' columns tile by tile: wide tables take long
MAX_NEW_TOKENS = 64
# Programs to share the plan among; each repeats the rows' computation, which is latency more than work.
MAX_PROGRAMS = 32
MIN_ROWS_PER_PROGRAM = 8
TABLE_TILE = 128  # columns of the block table copied at once
ARRIVAL = 1 << 16


def step_unsupported_reason(
    seq_ids: jax.Array | jax.ShapeDtypeStruct,
    block_table: jax.Array | jax.ShapeDtypeStruct,
    *,
    num_new_tokens: int | jax.Array,
    compute_capability: float | None = None,
) -> str | None:
    """Why `step` here cannot serve a call, or None if it can."""
    if compute_capability is None or compute_capability < 8.0:
        return (
            f"{compute_capability=}; triton needs an NVIDIA GPU of compute capability 8.0 or newer"
        )
    if not isinstance(num_new_tokens, int):
        return "num_new_tokens is an array; triton serves an int for every row alike"
    if not 1 <= num_new_tokens <= MAX_NEW_TOKENS:
        return f"{num_new_tokens=}; triton serves 1 to {MAX_NEW_TOKENS}"
    if not 1 <= seq_ids.shape[0] <= MAX_ROWS:
        return f"{seq_ids.shape[0]} rows; triton serves 1 to {MAX_ROWS}"
    if block_table.shape[0] > MAX_SEQS:
        return f"max_seqs={block_table.shape[0]}; triton serves up to {MAX_SEQS}"
    if block_table.shape[1] > MAX_COLUMNS:
        return f"max_blocks_per_seq={block_table.shape[1]}; triton serves up to {MAX_COLUMNS}"
    return None


def _step_kernel(
    seq_ids_ref,  # int32 [B]
    free_list_ref,  # int32 [N]
    *refs,
    num_new_tokens: int,
    block_size: int,
    rows_per_program: int,
    interpret: bool,
):
    (
        table_ref,  # int32 [S, M]; the state, updated in place
        seq_lens_ref,  # int32 [S]
        block_counts_ref,  # int32 [S]
        free_top_ref,  # int32 [1]
        ref_count_ref,  # int32 [N]
        errors_ref,  # int32 [1]
        result_ref,  # int32 [B]
        first_ref,  # int32 [B]: where on the free list a row's first new block stands
        winner_ref,  # int32 [programs, S]: the row that has a sequence
        plan_table_ref,  # int32 [B, M]; the plan
        kv_lens_ref,  # int32 [B]
        cu_q_lens_ref,  # int32 [B + 1]
        slots_ref,  # int32 [B, n]
        positions_ref,  # int32 [B, n]
        token_rows_ref,  # int32 [B, n]
        plan_errors_ref,  # int32 [1]
    ) = refs[6:]  # the first six are the state's memory, as inputs
    num_rows, (num_seqs, max_blocks) = seq_ids_ref.shape[0], table_ref.shape
    program, num_programs = pl.program_id(0), pl.num_programs(0)
    shift = block_size.bit_length() - 1  # block_size is a power of two

    def past_end(seq_id, mask):
        """Ids to store at: what the mask leaves out must not alias a live row in the interpreter."""
        return jnp.where(mask, seq_id, num_seqs)

    # The interpreter has one thread, and no rule for either.
    def barrier():
        if not interpret:
            plgpu.debug_barrier()

    def arrive():
        if not interpret:
            return plgpu.atomic_add(errors_ref, (0,), ARRIVAL)
        word = errors_ref[0]
        errors_ref[0] = word + ARRIVAL
        return word

    def rows_of(row):
        """Sequence id, whether it is one, length and blocks of rows; -1 past the batch."""
        seq_id = plgpu.load(seq_ids_ref.at[row], mask=row < num_rows, other=-1)
        in_range = (seq_id >= 0) & (seq_id < num_seqs)
        seq_len = plgpu.load(seq_lens_ref.at[seq_id], mask=in_range, other=0)
        owned = plgpu.load(block_counts_ref.at[seq_id], mask=in_range, other=0)
        return seq_id, in_range, seq_len, owned

    # All rows: who is served, and with which blocks. This program's own rows are read along.
    row = jnp.arange(pl.next_power_of_2(num_rows), dtype=jnp.int32)
    own = program * rows_per_program + jnp.arange(rows_per_program, dtype=jnp.int32)
    seq_id, in_range, seq_len, owned = rows_of(row)
    own_id, own_in_range, own_len, own_owned = rows_of(own)
    free_top = free_top_ref[0]

    # The first row of a sequence has it: each row claims its own, and those that find a later row's
    # claim there claim again.
    def claim(mask):
        plgpu.store(winner_ref.at[program, past_end(seq_id, mask)], row, mask=mask)
        barrier()
        winner = plgpu.load(winner_ref.at[program, seq_id], mask=in_range, other=0)
        return winner, jnp.max(jnp.where(in_range & (winner > row), 1, 0))

    def claim_again(carry):
        barrier()
        return claim(in_range & (carry[0] > row))

    winner, _ = jax.lax.while_loop(lambda carry: carry[1] > 0, claim_again, claim(in_range))
    is_duplicate = in_range & (winner < row)

    code = jnp.where(
        num_new_tokens > max_blocks * block_size - seq_len, int(ResultCode.SEQ_TOO_LONG), 0
    )
    is_invalid = (seq_id != -1) & ~(in_range & (owned > 0))
    code = jnp.where(is_invalid, int(ResultCode.INVALID_SEQ), code)
    code = jnp.where(is_duplicate, int(ResultCode.DUPLICATE_SEQ), code)
    served = (seq_id != -1) & (code == 0)
    needed = ((seq_len + (num_new_tokens - 1)) >> shift) + 1 - owned
    needed = jnp.where(served, needed, 0)
    total = jnp.cumsum(needed, dtype=jnp.int32)
    fits = (needed == 0) | (total <= free_top)
    code = jnp.where(served & ~fits, int(ResultCode.OUT_OF_BLOCKS), code)
    served &= fits
    granted = jnp.where(served, needed, 0)
    result = jnp.where((seq_id != -1) & ~served, code, granted)
    first = free_top - 1 - (total - needed)
    is_own = (row < num_rows) & (row // rows_per_program == program)
    plgpu.store(result_ref.at[row], result, mask=is_own)
    plgpu.store(first_ref.at[row], first, mask=is_own)
    barrier()

    # Its own rows' plan, from the state as it was and what they get.
    in_batch = own < num_rows
    own_result = plgpu.load(result_ref.at[own], mask=in_batch, other=-1)
    own_first = plgpu.load(first_ref.at[own], mask=in_batch, other=0)
    takes_part = own_in_range & (own_result >= 0)
    kv_len = jnp.where(takes_part, own_len + num_new_tokens, 0)
    plgpu.store(kv_lens_ref.at[own], kv_len, mask=in_batch)
    plgpu.store(cu_q_lens_ref.at[own + 1], (own + 1) * num_new_tokens, mask=in_batch)

    def blocks_at(column, mask):
        """The rows' blocks in columns, [rows, columns], those of this step among them."""
        is_new = mask & (column >= own_owned[:, None])
        is_new &= column < (own_owned + own_result)[:, None]
        old = plgpu.load(table_ref.at[own_id[:, None], column], mask=mask & ~is_new, other=-1)
        place = (own_first + own_owned)[:, None] - column
        new = plgpu.load(free_list_ref.at[place], mask=is_new, other=-1)
        return jnp.where(is_new, new, old)

    token = jnp.arange(pl.next_power_of_2(num_new_tokens), dtype=jnp.int32)[None, :]
    is_token = in_batch[:, None] & (token < num_new_tokens)
    has_token = is_token & takes_part[:, None]
    position = jnp.where(has_token, own_len[:, None] + token, 0)
    block = blocks_at(position >> shift, has_token)
    slot = jnp.where(block >= 0, (block << shift) + (position & (block_size - 1)), -1)

    tile = min(pl.next_power_of_2(max_blocks), TABLE_TILE)

    def copy_columns(nth, _):
        column = (nth * tile + jnp.arange(tile, dtype=jnp.int32))[None, :]
        in_table = in_batch[:, None] & (column < max_blocks)
        block = blocks_at(column, in_table & takes_part[:, None])
        plgpu.store(plan_table_ref.at[own[:, None], column], block, mask=in_table)

    jax.lax.fori_loop(jnp.int32(0), jnp.int32(pl.cdiv(max_blocks, tile)), copy_columns, None)
    # Stored last, so that their blocks are read while the columns are.
    where = own[:, None], token
    plgpu.store(slots_ref.at[where], slot, mask=is_token)
    plgpu.store(positions_ref.at[where], position, mask=is_token)
    plgpu.store(token_rows_ref.at[where], jnp.where(has_token, own[:, None], -1), mask=is_token)

    # The last to arrive updates the state.
    barrier()
    word = arrive()

    @pl.when(word // ARRIVAL == num_programs - 1)
    def _():
        target = past_end(seq_id, served)
        plgpu.store(seq_lens_ref.at[target], seq_len + num_new_tokens, mask=served)
        plgpu.store(block_counts_ref.at[target], owned + granted, mask=served)
        for nth in range(min(max_blocks, pl.cdiv(num_new_tokens, block_size))):
            takes = nth < granted
            block = plgpu.load(
                free_list_ref.at[first - nth], mask=takes, other=ref_count_ref.shape[0]
            )
            plgpu.store(table_ref.at[past_end(seq_id, takes), owned + nth], block, mask=takes)
            plgpu.store(ref_count_ref.at[block], jnp.ones_like(block), mask=takes)
        free_top_ref[0] = free_top - jnp.sum(granted, dtype=jnp.int32)
        errors_ref[0] = word % ARRIVAL
        cu_q_lens_ref[0] = 0
        plan_errors_ref[0] = 0  # a row that got its tokens fits its plan

        @pl.when(jnp.min(result) < 0)
        def _():
            bits = word % ARRIVAL
            for failure in ResultCode:
                bits |= failure.bit * jnp.max(jnp.where(result == int(failure), 1, 0))
            errors_ref[0] = bits


def step(
    block_table: jax.Array,
    seq_lens: jax.Array,
    seq_block_count: jax.Array,
    free_list: jax.Array,
    free_top: jax.Array,
    ref_count: jax.Array,
    errors: jax.Array,
    seq_ids: jax.Array,
    *,
    num_new_tokens: int,
    block_size: int,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """`append` of as many tokens to every row, and `make_plan`.

    Args:
      block_table, seq_lens, seq_block_count, free_list, free_top, ref_count, errors: int32, the
        fields of a `BlockState`.
      seq_ids: int32 [B].
      num_new_tokens: n, at most 64.
      block_size: P, a power of two.
      interpret: run as ordinary JAX operations, for tests on a CPU.

    Returns:
      The new block_table, seq_lens, seq_block_count, free_top, ref_count and errors, updated in place
      where they are donated or carried by a loop; result, int32 [B]; the plan's block_table, kv_lens,
      cu_q_lens, slot_mapping, positions, token_rows and errors.
    """
    num_rows, (num_seqs, max_blocks) = seq_ids.shape[0], block_table.shape
    rows_per_program = max(
        pl.next_power_of_2(pl.cdiv(num_rows, MAX_PROGRAMS)), MIN_ROWS_PER_PROGRAM
    )
    num_programs = pl.cdiv(num_rows, rows_per_program)
    state = (
        block_table, seq_lens, seq_block_count, free_top.reshape(1), ref_count, errors.reshape(1),
    )  # fmt: skip
    new_shapes = (
        (num_rows,), (num_rows,), (num_programs, num_seqs),
        (num_rows, max_blocks), (num_rows,), (num_rows + 1,),
        (num_rows, num_new_tokens), (num_rows, num_new_tokens), (num_rows, num_new_tokens), (1,),
    )  # fmt: skip
    outputs = pl.pallas_call(
        functools.partial(
            _step_kernel,
            num_new_tokens=num_new_tokens,
            block_size=block_size,
            rows_per_program=rows_per_program,
            interpret=interpret,
        ),
        grid=(num_programs,),
        out_shape=[
            *(jax.ShapeDtypeStruct(array.shape, jnp.int32) for array in state),
            *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in new_shapes),
        ],
        input_output_aliases={2 + nth: nth for nth in range(len(state))},
        compiler_params=plgpu.CompilerParams(
            num_warps=min(max(pl.next_power_of_2(num_rows) // 128, 4), 16), num_stages=1
        ),
        interpret=interpret,
        name="paged_kv_step_triton",
    )(seq_ids, free_list, *state)
    *arrays, free_top, ref_count, errors = outputs[:6]
    result, _, _, plan_table, kv_lens, cu_q_lens, *tokens, plan_errors = outputs[6:]
    return (
        *arrays, free_top.reshape(()), ref_count, errors.reshape(()), result,
        plan_table, kv_lens, cu_q_lens, *(array.reshape(-1) for array in tokens),
        plan_errors.reshape(()),
    )  # fmt: skip
