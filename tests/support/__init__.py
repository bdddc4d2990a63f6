"""Shared test helpers: every optimizer as a case, dense twins, small problems and data."""
