"""The bundle on disk: refusals when building and loading, and the inputs of its digest."""

import shutil
from pathlib import Path

import pytest
from onnx_fixtures import BY_NAME, make_bundle

from stages.core.digest import file_digest
from stages.core.errors import UserError
from stages.engines.onnx.engine import load_engine


@pytest.mark.parametrize("file", ["decode.onnx", "prefill.onnx", "weights.bin", "kv_policy.json", "kv_scales.json"])
def test_an_altered_or_missing_file_is_refused_by_name(file: str, decoder: Path, tmp_path: Path) -> None:
    bundle = make_bundle(decoder, tmp_path / "bundle", BY_NAME["fp8"])
    data = bytearray((bundle / file).read_bytes())
    data[len(data) // 2] ^= 1
    (bundle / file).unlink()
    with pytest.raises(UserError, match=f"{file} is missing"):
        load_engine(bundle, threads=1)
    (bundle / file).write_bytes(data)
    with pytest.raises(UserError, match=f"{file} is not the file that was built"):
        load_engine(bundle, threads=1)


def test_the_graph_digest_depends_on_the_policy_and_not_on_the_place(decoder: Path, tmp_path: Path) -> None:
    shutil.copytree(decoder, tmp_path / "copy")
    digests = [
        file_digest(make_bundle(source, tmp_path / name, BY_NAME[policy]) / "decode.onnx")
        for name, source, policy in (
            ("a", decoder, "fp8"),
            ("b", tmp_path / "copy", "fp8"),
            ("c", decoder, "fp8_uncalibrated"),
        )
    ]
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]
