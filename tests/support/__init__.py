"""What the tests share: every optimizer as a case, dense twins, small problems and data."""
