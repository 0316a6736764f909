"""All fuzz targets, with their seeds and their corpus. `make fuzz` looks for new inputs."""

import pytest
from tests.fuzz.run import CORPUS, MODULES, load


@pytest.mark.parametrize("name", MODULES)
def test_the_seeds_and_the_corpus_of_a_target(name: str) -> None:
    target = load(name)
    for data in (b"", *target.seeds):
        target.check(data)
    for path in sorted((CORPUS / name).glob("*")):
        target.check(path.read_bytes())


def test_the_corpus_belongs_to_targets() -> None:
    assert {path.name for path in CORPUS.iterdir()} <= MODULES.keys()
