"""Labelled variables z: the sums from which Cov(x, z) is computed, by kind of variable.

Sums of x are sums of deviations x - r from the reference point r of the state, for full precision
if the data are far from 0. The sums are not divided by the weight sum, so that states are merged by
addition. Every kind has these methods:

==============  ====================================================================================
encode          encoded labels of a column (None if all are missing), and the variable with the new
                names of the column, which shares the sums; changes nothing
label_sums      sums of the labels of a block, and the sums of x that they need
add             changes that add the sums of a block, with sums of x - r; changes nothing
merged          self + sign other, for a reference point of `other` that exceeds ours by `offset`
make_constant   set the sums as if features were constant: the reference point + `mean_deviation`
span            vectors that span the columns of Cov(x, z), ddof = 0, with z in standard units
tensors, read   named arrays of a file; `read` and `read_labels` raise FileFormatError
==============  ====================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from splince_fast.exceptions import LabelError, UnknownVariableError
from splince_fast.labels import ClassCodes, Columns, VariableName
from splince_fast.moments.class_sums import ClassSums
from splince_fast.moments.column_sums import ColumnSums

Variable: TypeAlias = ClassSums | ColumnSums

KIND_OF_COLUMN: dict[type[Any], type[Any]] = {ClassCodes: ClassSums, Columns: ColumnSums}
KINDS: dict[str, type[Any]] = {kind.kind: kind for kind in KIND_OF_COLUMN.values()}


def check_column(variable: Variable, column: Any, name: object) -> None:
    """Raise LabelError if a column differs from earlier blocks in kind, type or columns."""
    kind = KIND_OF_COLUMN[type(column)]
    if type(variable) is kind:
        variable.encode(column, name)
    elif kind.new(variable.width, column).encode(column, name)[0] is not None:
        raise contradiction(name, variable.kind, kind.kind)


def look_up(variables: Mapping[VariableName, Variable], name: VariableName) -> Variable:
    """Return the variable of this name; raise UnknownVariableError if there is none."""
    try:
        return variables[name]
    except (KeyError, TypeError):  # TypeError: the name is not hashable
        names = ", ".join(map(repr, variables)) or "none"
        hint = (
            f"; for a joint variable, pass joint=[{name!r}] to Moments"
            if isinstance(name, tuple)
            else ""
        )
        raise UnknownVariableError(
            f"no variable {name!r} was accumulated, or none of its labels is present; the "
            f"variables are: {names}{hint}"
        ) from None


def contradiction(name: object, ours: str, theirs: str) -> LabelError:
    """Return the error for a variable whose kind differs from earlier blocks."""
    held = {"classes": "classes", "continuous": "continuous values"}
    return LabelError(
        f"the variable {name!r} held {held[ours]} in earlier blocks and holds {held[theirs]} in "
        f"this one; give it one dtype, or fix it with Moments(kinds={{{name!r}: {ours!r}}})"
    )
