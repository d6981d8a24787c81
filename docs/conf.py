"""The site: ``sphinx-build -W -b html docs docs/_build``."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

import splince_fast

sys.path.insert(0, str(Path(__file__).parents[1]))  # examples read rows of `reproduction`

project = "splince_fast"
copyright = "the splince_fast developers"
version = release = splince_fast.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "numpydoc",
    "myst_parser",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "examples/README.txt"]
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence"]
myst_heading_anchors = 4
# Pages of Markdown link to files of the repository; on the site these are text.
suppress_warnings = ["myst.xref_missing", "config.cache"]

autosummary_generate = True
# Packages of a gigabyte or more, which pages describe and the build does not run.
autodoc_mock_imports = [
    name for name in ("torch", "transformers", "datasets", "dask") if find_spec(name) is None
]
autodoc_typehints = "none"
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False

sphinx_gallery_conf = {
    "examples_dirs": "examples",
    "gallery_dirs": "gallery",
    "filename_pattern": r"/plot_",
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
    "write_computation_times": False,
    "min_reported_time": float("inf"),
    "abort_on_example_error": True,
}

templates_path = ["_templates"]
html_theme = "pydata_sphinx_theme"
html_title = "splince_fast"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
# Pages without subpages have no section navigation: an empty column would take a quarter of them.
html_sidebars = {
    page: []
    for page in ("index", "start", "which", "guarantees", "performance", "experiments",
                 "coming_from", "live_models", "changelog", "api", "verdicts")
}  # fmt: skip
html_theme_options = {
    "show_toc_level": 2,
    "header_links_before_dropdown": 8,
    "navigation_with_keys": False,
    "show_prev_next": False,
    "footer_start": ["copyright"],
    "footer_end": [],
}
# Neither the build nor a reader needs a network: formulas are MathML, which browsers draw by
# themselves, and the theme brings its fonts and scripts.
html_math_renderer = "mathml"


def mathml(writer: Any, node: nodes.math | nodes.math_block) -> None:
    """Write a formula; one that cannot be converted ends the build."""
    block = isinstance(node, nodes.math_block)
    text = node.astext().strip()
    try:
        formula = tex2mathml(text, as_block=block)
    except MathError as error:
        raise ExtensionError(f"{node.source}: {text!r}: {error}") from error
    writer.body.append(f'<div class="formula">{formula}</div>' if block else formula)
    raise nodes.SkipNode


def as_text(
    app: object, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Bars of a norm, |P Cov(x, z)|, are no substitutions of reST, and names that end in an
    underscore no links; references to the guide of scikit-learn, inherited, are its words."""
    for i, line in enumerate(lines):
        if line.lstrip().startswith((">>>", "...", "..")):
            continue
        line = re.sub(r":(?:ref|term):`([^`<]*?)(?: *<[^`]*>)?`", r"\1", line)
        parts = re.split(r"(``.*?``|`[^`]*`_?)", line)
        for k in range(0, len(parts), 2):
            bars = re.sub(r"(?<!\\)\|", r"\\|", parts[k])
            parts[k] = re.sub(r"\b([A-Za-z]\w*)_(?=[^\w`]|$)(?<!\\_)", r"\1\\_", bars)
        lines[i] = "".join(parts)


def without_last_line(app: Sphinx, name: str, source: list[str]) -> None:
    """A doctest ends with an empty line, which readers need not see."""
    source[0] = source[0].replace("\n\n```\n", "\n```\n")


def setup(app: Sphinx) -> None:
    """Connect what is defined above."""
    app.connect("source-read", without_last_line)
    app.connect("autodoc-process-docstring", as_text)
    app.add_html_math_renderer("mathml", (mathml, None), (mathml, None))
