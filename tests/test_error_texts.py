"""One golden file holds the texts of all errors: whoever changes one reads it beside the others."""

from tests.error_texts import GOLDEN, texts


def test_the_texts_of_all_errors_are_those_of_the_golden_file() -> None:
    assert texts() == GOLDEN.read_text(), (
        "errors have changed: run `python -m tests.error_texts` and read the difference"
    )
