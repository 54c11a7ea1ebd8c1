"""The public zoo's architectures, as the onnx wheel carries them, cut where adopt offers it.

Their weights are constants of one number there, so that every output is one number: they are
replaced by random ones. The oracle is onnxruntime on the whole file, one sample at a time.
`python -m benchmarks.adopt_cuts` does the same at every cut.
"""

from __future__ import annotations

import pytest

from benchmarks.adopt_cuts import LIGHT, check_offered, randomised

# gigaflops of one sample decide how many samples fit into the suite's time
BATCHES = {"light_vgg19": (1, 2), "light_densenet121": (1, 8), "light_resnet50": (1, 8)}


@pytest.mark.parametrize("name", LIGHT)
def test_every_offered_cut_gives_what_the_whole_file_gives(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = randomised(name, tmp_path_factory.mktemp("light"))
    found = check_offered(path, batches=BATCHES.get(name, (1, 32)))
    assert found.offered >= 1
    assert found.takes_batches
    assert found.worst <= 1e-4
    path.unlink()  # half a gigabyte
