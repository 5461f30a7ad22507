"""Every kind of input that people have, and those that are refused."""

import numpy as np
import pandas as pd
import polars as pl
import torch

X = [[1.0, 0.0], [0.5, -0.25], [0.0, 1.0]]
R = [1.0, 0.0, 1.0]


def locked(values):
    array = np.array(values)
    array.setflags(write=False)
    return array


def pandas(values, dtype="float64"):
    if np.ndim(values) > 2:  # which no table holds
        return [pandas(part, dtype) for part in values]
    return (pd.DataFrame if np.ndim(values) == 2 else pd.Series)(values).astype(dtype)


def polars(values):
    if np.ndim(values) > 2:
        return [polars(part) for part in values]
    return pl.DataFrame(values, orient="row") if np.ndim(values) == 2 else pl.Series(values)


def missing(values):
    """A nullable column, or a table of such, whose first entry is not there."""
    table = pandas(values, "Float64")
    return table.where(np.arange(table.size).reshape(table.shape) > 0)


def masked(values):
    return np.ma.masked_array(values, mask=np.arange(np.size(values)).reshape(np.shape(values)) < 1)


KINDS = {
    "list": lambda v: v,
    "tuple": lambda v: tuple(v),
    "float64": lambda v: torch.tensor(v, dtype=torch.float64),
    "float32": lambda v: torch.tensor(v, dtype=torch.float32),
    "float16": lambda v: torch.tensor(v, dtype=torch.float16),
    "bfloat16": lambda v: torch.tensor(v, dtype=torch.bfloat16),
    "numpy float64": lambda v: np.array(v),
    "numpy float32": lambda v: np.array(v, dtype=np.float32),
    "numpy float16": lambda v: np.array(v, dtype=np.float16),
    "numpy locked": locked,
    "numpy big-endian": lambda v: np.array(v, dtype=">f4"),
    "numpy reversed": lambda v: np.array(v)[::-1][::-1],
    "float8": lambda v: torch.tensor(v).to(torch.float8_e4m3fn),
    "numpy objects": lambda v: np.array(v, dtype=object),
    "pandas": pandas,
    "pandas float32": lambda v: pandas(v, "float32"),
    "pandas nullable": lambda v: pandas(v, "Float64"),
    "pandas Arrow": lambda v: pandas(v, "double[pyarrow]"),
    "polars": polars,
    "list of tensors": lambda v: [torch.tensor(row) for row in v],
    "list of arrays": lambda v: [np.array(row, dtype=np.float32) for row in v],
}
WHOLE = {
    "ints": lambda v: [[int(n) for n in row] if isinstance(row, list) else int(row) for row in v],
    "int64": lambda v: torch.tensor(v).long(),
    "int32": lambda v: torch.tensor(v).int(),
    "uint8": lambda v: torch.tensor(v).byte(),
    "bool": lambda v: torch.tensor(v).bool(),
    "numpy int64": lambda v: np.array(v).astype(np.int64),
    "numpy bool": lambda v: np.array(v).astype(bool),
}
REFUSED = {
    "complex": (lambda v: torch.tensor(v).cfloat(), "expected a dense tensor of real numbers"),
    "words": (lambda v: "one", "expected a tensor or (real )?numbers"),
    "nothing": (lambda v: [None, None, None], "expected a tensor or (real )?numbers"),
    "missing": (missing, "expected .*, got (DataFrame with the entry <NA>|nan)"),
    "masked": (masked, "expected numbers none of which is masked, got 1 of [0-9]+ masked"),
    "ragged": (lambda v: [[1.0], [1.0, 2.0]], "expected a tensor or numbers"),
    "other device": (lambda v: torch.tensor(v).to("meta"), "expected a tensor on device cpu"),
    "not a number": (lambda v: torch.tensor(v) * torch.nan, "expected"),
    "too long": (lambda v: 3.0 * torch.tensor(v), "expected"),
}
