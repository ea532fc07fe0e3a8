"""The kernel table: every attention kernel that is compiled, and all that is decided for it.

    sm80, sm90     its entries, by family
    features       sets of features that they name
    all_rows       the rows that come of them, in the order in which selection tries them
    row, rules     what a row is, and what kernels ask of it
    hopper_rows    which rows a Hopper GPU runs
    row_filter     choosing rows for a partial build

``python -m build_tools.report.print_table`` prints the rows.
"""
