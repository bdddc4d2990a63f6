"""Argument checks with one wording, so that every message says what was wrong and what was given."""


def require(
    condition: bool, name: str, owner: str, expected: str, got: object, error: type[Exception] = ValueError
) -> None:
    """Raise `error` unless `condition` holds. Write conditions so that NaN fails: `lr >= 0`, not `not lr < 0`.

    >>> require(-1.0 >= 0, "lr", "AdaGradBMA", ">= 0", -1.0)
    Traceback (most recent call last):
    ValueError: The 'lr' parameter of AdaGradBMA must be >= 0. Got -1.0 instead.
    """
    if not condition:
        raise error(f"The {name!r} parameter of {owner} must be {expected}. Got {got!r} instead.")
