"""Raw kernels: arrays in, arrays out, one module per operation and backend.

Nothing here knows the package's pytrees; `paged_kv_jax.attention`, `paged_kv_jax.pool` and
`paged_kv_jax.allocator` choose among these modules and import the chosen one on first use.
"""

if __name__ == "kernels":
    raise ImportError(
        "this folder is `paged_kv_jax.kernels`; import it by that name. A bare `import kernels` "
        "from the repository's root finds this folder instead of the PyPI package of that name."
    )
