"""What a drive holds is read beside the state that takes its place."""

from pathlib import Path

import pytest

from fullshard.errors import OffloadError
from fullshard.offload.drive_store import GROUP_BUFFERS
from tests.offload.test_store import GROUPS, all_hold, check_whole, drive_store, put


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("after", [1, 4, 5])
def test_what_is_kept_is_read_beside_another_state_and_after_a_part_of_it(
    after: int, committed: bool, tmp_path: Path
) -> None:
    assert len(GROUPS) > GROUP_BUFFERS
    with drive_store(tmp_path) as store:
        put(store, time_=1, fresh=True)
        put(store, time_=2, before=1)
        if committed:
            store.commit_generation(7, b"")
        store.keep_current_state_readable()
        stream = store.stream_for_update(fresh=True)
        for _ in range(after):
            next(stream)[1].master.fill_(-1)
            check_whole(store, time_=2)
        stream.close()
        check_whole(store, time_=2)
        assert all_hold(store, time_=2)
        put(store, time_=3, before=2)
        check_whole(store, time_=3)


def test_what_is_not_kept_and_written_over_in_part_is_told(tmp_path: Path) -> None:
    with drive_store(tmp_path) as store:
        put(store, time_=1, fresh=True)
        stream = store.stream_for_update(fresh=True)
        next(stream)
        stream.close()
        found = store.read_parameter_state("a")
        assert found is not None
        with pytest.raises(OffloadError, match="there is no optimizer state on the drive"):
            found.master.cpu()
        put(store, time_=2, fresh=True)
        check_whole(store, time_=2)
