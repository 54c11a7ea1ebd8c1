"""The public zoo's architectures, as the onnx wheel carries them, cut where adopt offers it.

Their weights are constants of one number there, so that every output is one number: they are
replaced by random ones. The oracle is onnxruntime on the whole file, one sample at a time.
`python -m benchmarks.adopt_cuts` does the same at batches of 32, and with `--every` at every cut.
"""

from __future__ import annotations

import pytest

from benchmarks.adopt_cuts import LIGHT, check_offered, randomised

pytestmark = pytest.mark.long

# one sample, and a batch that is no multiple of what differs
BATCHES = (1, 3)


@pytest.mark.parametrize("name", LIGHT)
def test_every_offered_cut_gives_what_the_whole_file_gives(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = randomised(name, tmp_path_factory.mktemp("light"))
    found = check_offered(path, batches=BATCHES)
    assert found.offered >= 1
    assert found.takes_batches
    assert found.worst <= 1e-4
    path.unlink()  # half a gigabyte
