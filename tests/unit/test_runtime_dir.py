"""Which group the sockets of a daemon with --allow-uid get."""

from kvstore.server import shared_group


def test_the_directorys_group_is_taken_when_every_allowed_uid_is_in_it() -> None:
    assert shared_group(500, [[100, 500], [101, 500]], own=[1, 500], root=False) == 500


def test_else_a_group_of_the_daemon() -> None:
    assert shared_group(7, [[100, 500], [101, 500]], own=[1, 500], root=False) == 500


def test_root_may_take_any_group_that_the_allowed_uids_share() -> None:
    assert shared_group(0, [[100, 500], [101, 500]], own=[0], root=True) == 500
    assert shared_group(0, [[100, 500], [101, 500]], own=[0], root=False) is None


def test_no_common_group() -> None:
    assert shared_group(None, [[100], [101]], own=[0], root=True) is None


def test_a_uid_without_an_account_is_believed_to_be_in_the_group_given_to_the_directory() -> None:
    assert shared_group(500, [None], own=[0], root=True) == 500
    assert shared_group(0, [None], own=[0], root=True) is None
    assert shared_group(None, [None], own=[0], root=True) is None
