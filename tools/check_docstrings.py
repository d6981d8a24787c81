"""Check the docstrings of all public names and methods with numpydoc; exit with 1 on faults.

Run from a checkout with the extra ``dev``: ``python tools/check_docstrings.py``.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys

from numpydoc.validate import validate

import splince_fast as sf

# Docstring present (GL08), sections in order (GL07), summary with a full stop (SS03) and without
# leading spaces (SS04), all parameters (PR01) and no others (PR02), in the order of the signature
# (PR03), with descriptions (PR07), return values with descriptions (RT03). Public functions and
# classes also need an example (EX01).
CODES = {"GL07", "GL08", "SS03", "SS04", "PR01", "PR02", "PR03", "PR07", "RT03"}


def public_objects() -> dict[str, object]:
    """Return all public objects and the public methods of classes, by import path."""
    objects: dict[str, object] = {}
    for name in sf.__all__:
        value = getattr(sf, name)
        if inspect.ismodule(value):
            try:
                members = {m: getattr(value, m) for m in getattr(value, "__all__", ())}
            except sf.exceptions.MissingExtraError as error:
                print(f"splince_fast.{name} is not checked: {error}")
                continue
        else:
            members = {"": value}
        for member, value in members.items():
            path = ".".join(filter(None, ("splince_fast", name, member)))
            objects[path] = value
            if inspect.isclass(value):
                objects |= {f"{path}.{method}": v for method, v in methods(value).items()}
    return objects


def methods(owner: type) -> dict[str, object]:
    """Return the public methods of a class, inherited methods only from this package."""
    classes = [kind for kind in owner.__mro__ if kind.__module__.startswith("splince_fast")]
    return {
        name: member
        for kind in reversed(classes)
        for name, member in vars(kind).items()
        if not name.startswith("_") and callable(getattr(kind, name))
    }


def needs_example(path: str) -> bool:
    """Return whether the path names a public function or class, not a method."""
    parent, _, name = path.rpartition(".")
    module = sf if parent == "splince_fast" else getattr(sf, parent.split(".")[1])
    return name in getattr(module, "__all__", ()) and inspect.ismodule(module)


def main() -> int:
    """Print all faults and return the exit status."""
    faults = 0
    objects = public_objects()
    for path, value in objects.items():
        if inspect.isclass(value) and issubclass(value, BaseException):
            continue
        errors = validate(path)["errors"]
        # Users do not construct records, so that a section Parameters is not required.
        record = dataclasses.is_dataclass(value) or hasattr(value, "_fields")
        codes = CODES - {"PR01"} if record else CODES
        if needs_example(path) and not record:
            codes = codes | {"EX01"}
        wrong = [f"{code} {text}" for code, text in errors if code in codes]
        for text in wrong:
            print(f"{path}: {text}")
        faults += len(wrong)
    print(f"{len(objects)} public names checked, {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
