"""Plans that cannot run here: where their graphs were, or can be, judged as ONNX."""

from dataclasses import replace
from pathlib import Path

import pytest
from gate_reports import every_class, report
from hydra import compose, initialize_config_dir

from pipeline.artifacts.store import Artifact, Recipe, Store
from pipeline.config import CONF
from pipeline.config.compose import to_config
from pipeline.core.errors import MissingRequirement
from pipeline.core.kv import KVPolicy
from pipeline.core.records import Progress
from pipeline.run.chain import Chain
from pipeline.verdict.report import REPORT_FILE
from stages.engines.tensorrt.config import PlanConfig

DIGEST = "d" * 64


class _Chain(Chain):
    """Every bundle is there, and no engine can be loaded."""

    def bundle(self, policy: KVPolicy, config: object = None) -> Artifact:
        assert config == self.backend.onnx_equivalent()
        recipe = Recipe("build", ("pipeline.core.kv",), {"kv": policy.name}, {})
        return replace(self.make(recipe, _nothing), digest=DIGEST, files={"decode.onnx": "a1b2"})

    def engine(self, policy: KVPolicy) -> Artifact:  # noqa: ARG002
        raise MissingRequirement("no GPU")


def _nothing(_: Path, __: Progress) -> None: ...


def cite(out: Path, graph: str | None) -> None:
    """Leave an evaluation's report."""
    cited = report(every_class(), engine_digest=DIGEST, graph_digest=graph)
    (out / REPORT_FILE).write_text(cited.model_dump_json(), encoding="utf-8")


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    return plans_in(tmp_path, "float16")


def plans_in(workdir: Path, dtype: str) -> Chain:
    overrides = ["backend=tensorrt_rtx", f"backend.compute_dtype={dtype}", f"workdir={workdir}"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = to_config(compose("config", overrides=overrides))
    return _Chain(config, Store(workdir / "artifacts"))


def test_the_default_profile_fits_the_built_in_workloads(chain: Chain) -> None:
    backend, workloads = chain.config.backend, chain.config.workloads
    assert isinstance(backend, PlanConfig)
    assert backend.max_batch >= max(workloads.batch_size, workloads.load.batch)


def test_a_machine_without_a_gpu_is_given_the_command_that_judges_the_graphs(chain: Chain) -> None:
    with pytest.raises(MissingRequirement, match=r"no GPU\nkv=fp8: .* sha256 a1b2\) can be judged here") as caught:
        chain.evaluation(chain.config.kv)
    assert "backend=onnxruntime backend.compute_dtype=float16" in str(caught.value)


def test_graphs_in_bfloat16_which_onnx_runtime_does_not_run_have_no_such_command(tmp_path: Path) -> None:
    chain = plans_in(tmp_path, "bfloat16")
    assert chain.onnx_report(chain.config.kv) is None
    with pytest.raises(MissingRequirement, match=r"^no GPU$"):
        chain.evaluation(chain.config.kv)


def test_a_report_on_the_engine_of_the_same_graphs_is_pointed_to(chain: Chain) -> None:
    for seed, engine in enumerate((DIGEST, "e" * 64)):
        recipe = Recipe("evaluate", ("pipeline.core.kv",), {"seed": seed}, {"engine": engine})
        artifact = chain.store.get(recipe, lambda out: cite(out, "a1b2"))
        if engine == DIGEST:
            evaluation = artifact
    with pytest.raises(
        MissingRequirement, match=rf"was judged as ONNX: {evaluation.path}/report\.json cites it \(engine {DIGEST}\)"
    ):
        chain.evaluation(chain.config.kv)


@pytest.mark.parametrize("graph", [None, "c3d4"])
def test_a_report_that_cites_another_graph_or_none_is_not_pointed_to(graph: str | None, chain: Chain) -> None:
    chain.store.get(Recipe("evaluate", ("pipeline.core.kv",), {}, {"engine": DIGEST}), lambda out: cite(out, graph))
    with pytest.raises(MissingRequirement, match="can be judged here"):
        chain.evaluation(chain.config.kv)


def test_an_altered_report_is_not_pointed_to(chain: Chain) -> None:
    recipe = Recipe("evaluate", ("pipeline.core.kv",), {}, {"engine": DIGEST})
    evaluation = chain.store.get(recipe, lambda out: cite(out, "a1b2"))
    (evaluation.path / REPORT_FILE).write_text("{}")
    with pytest.raises(MissingRequirement, match="can be judged here"):
        chain.evaluation(chain.config.kv)
