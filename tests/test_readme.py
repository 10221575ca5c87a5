"""The README's example runs as it stands, and gives what it says."""

import pathlib
import re

import jax

README = pathlib.Path(__file__).parent.parent / "README.md"


def test_the_example_runs_and_leaves_two_sequences(capsys):
    example = re.search(r"```python\n(import jax.*?)```", README.read_text(), re.DOTALL)
    assert example is not None
    assert len(example.group(1).splitlines()) <= 25
    with jax.numpy_dtype_promotion("standard"):
        exec(example.group(1), {})
    printed = capsys.readouterr().out
    assert "14 of 64 blocks used (22 %) by 2 sequences with 202 tokens" in printed
    assert "(100, 4, 8, 64)" in printed


def test_every_public_name_in_the_readmes_tables_exists():
    import paged_kv_jax as pkv

    text = README.read_text()
    table = text[text.index("| C allocator |") : text.index("## Implementations")]
    names = {"init", "init_pool", "allocate", "append", "free", "make_plan", "block_offset"}
    names |= {"block_count", "KVCacheConfig", "write_token", "write_prefill", "plan_from_tables"}
    for name in names:
        assert f"`{name}" in table
        assert hasattr(pkv, name)
