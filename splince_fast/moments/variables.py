"""The kinds of variable, by the column that brings them and by name; all variables of a state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast.exceptions import IncompatibleMomentsError
from splince_fast.labels import ClassCodes, Columns, VariableName
from splince_fast.moments.class_sums import ClassSums
from splince_fast.moments.column_sums import ColumnSums
from splince_fast.moments.variable import Variable, contradiction

KIND_OF_COLUMN: dict[type[Any], type[Variable]] = {ClassCodes: ClassSums, Columns: ColumnSums}
KINDS: dict[str, type[Variable]] = {kind.kind: kind for kind in KIND_OF_COLUMN.values()}


def check_column(variable: Variable, column: Any, name: object) -> None:
    """Raise LabelError where an encoded column contradicts earlier blocks of a variable."""
    kind = KIND_OF_COLUMN[type(column)]
    if type(variable) is kind:
        variable.begin(column, name)
    elif kind.new(variable.width, column).begin(column, name)[0] is not None:
        raise contradiction(name, variable.kind, kind.kind)


def merged_variables(
    ours: Mapping[VariableName, Variable],
    theirs: Mapping[VariableName, Variable],
    shift: NDArray[np.float64],
    sign: int,
) -> dict[VariableName, Variable]:
    """Variables of both sides (sign 1) or of the first without the second (sign -1).

    `shift` is the reference point of their state minus that of ours. What only one side has is
    shared with it where it is ours, and copied where it is theirs.
    """
    result = dict(ours)
    for name, variable in theirs.items():
        ours_or_empty = result.get(name)
        if ours_or_empty is None:
            if sign < 0:
                raise IncompatibleMomentsError(
                    f"cannot remove a part that has the variable {name!r}, which the whole never "
                    "saw: it is not a part of it"
                )
            ours_or_empty = variable.empty_like()
        result[name] = ours_or_empty.merged(variable, shift, sign, name)
    return result
