from penstock.cli.meant import meant


def test_a_name_that_is_like_one_gets_that() -> None:
    assert meant("updtes", ["updates", "walk"]) == 'did you mean "updates"?'


def test_a_name_that_is_like_none_gets_the_list() -> None:
    assert meant("zzz", ["a", "b"]) == "there are a, b"
