"""How full an engine was: what counts, and what of the run does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.sampled_worker import Sample, Sampler, occupancy, read


def test_the_share_is_of_the_places_from_the_first_request_until_the_last_places_cannot_be_filled() -> None:
    samples = [Sample(float(at), *rest) for at, rest in enumerate([
        (0, 0, 100),  # before this batch: what an earlier one had finished does not count
        (2, 10, 100),
        (4, 10, 102),
        (4, 8, 106),
        (1, 1, 109),  # fewer than four of ten are left
        (0, 0, 110),
    ])]  # fmt: skip
    share, seconds = occupancy(samples, requests=10, max_num_seqs=4)
    assert share == pytest.approx((2 + 4 + 4) / 3 / 4)
    assert seconds == 2.0


def test_samples_are_written_and_read(tmp_path: Path) -> None:
    sampler = Sampler(tmp_path / "samples", lambda: 3, lambda: 5)
    sampler.finished = 7
    sampler.start()
    sampler.close()
    assert read(tmp_path / "samples")[0][1:] == (3, 5, 7)
