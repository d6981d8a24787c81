"""config: the report of show_config, and the instruction set of the row kernels."""

from __future__ import annotations

import numpy as np
import pytest
from processes import run, script

import splince_fast as sf
from splince_fast._kernels import row_kernels
from splince_fast.cli import main

LEVEL = "from splince_fast._kernels import row_kernels; print(row_kernels.level_name())"


def test_the_environment_names_an_instruction_set() -> None:
    for name in row_kernels.levels():
        assert script(LEVEL, SPLINCE_FAST_LEVEL=name).split() == [name]
    assert row_kernels.levels()[-1] == "baseline"


def test_an_instruction_set_that_is_not_available_is_an_error() -> None:
    error = run(LEVEL, SPLINCE_FAST_LEVEL="avx1024").stderr
    assert "'avx1024' is not available" in error
    assert "baseline" in error


def test_show_config_measures_and_advises(capsys: pytest.CaptureFixture[str]) -> None:
    config = sf.show_config()
    assert config.syrk_float32 > 0
    assert config.syrk_float64 > 0
    assert config.copy > 0
    assert config.threads >= 1
    assert (config.products == "BLAS") is not row_kernels.wide()
    assert config.versions["numpy"] == np.__version__
    assert config.row_kernels == row_kernels.level_name()
    assert "openblas" in config.blas
    assert "BLAS" in str(config)
    assert "<table>" in config._repr_html_()
    assert set(config.to_dict()) >= {"versions", "advice", "blas_core"}
    assert main(["doctor"]) == 0
    assert "symmetric product" in capsys.readouterr().out
