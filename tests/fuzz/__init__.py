"""Everything that decodes bytes from elsewhere, fed with bytes that nobody meant.

`targets.TARGETS` holds one function a decoder, `choices` makes well-typed but senseless messages of bytes, `machines`
feeds them to the state machines. tests/unit/test_fuzz.py drives all of them with hypothesis and, where atheris is
installed, for seconds by coverage; for longer:

    python -m tests.fuzz messages --seconds 600

A failure prints the bytes, and `python -m tests.fuzz messages FILE` runs them again.
"""
