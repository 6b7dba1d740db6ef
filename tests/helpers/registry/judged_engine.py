"""A judged engine as a run leaves it: a store with small artifacts of the whole chain. Files that a replay reads are real.

Its evidence may be signed with EC keys.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric import ec

from helpers.verdicts.reports import every_class, report
from pipeline.config.compose import plan
from pipeline.config.config import Config
from pipeline.config.signing import SigningConfig
from pipeline.evidence.identity import IDENTITY_FILE, Link, Role, make_identity, read_lineage, write_identity
from pipeline.evidence.reading import identities
from pipeline.evidence.verify import registered_engine
from pipeline.registry.tracking import Location, Version
from pipeline.store.store import Store
from stages.core.artifact import Artifact, Recipe
from stages.core.digest import file_digest
from stages.evaluate.inputs.samples import load_samples
from stages.evaluate.inputs.tokens import BundleTokenizer, encode_rounds, workloads_digest
from stages.policies.policy import FP16_POLICY, KVPolicy
from stages.verdict.candidate import Candidate
from stages.verdict.gates.decide import decide
from stages.verdict.report import REPORT_FILE, SAMPLES_FILE
from stages.workloads.user_files import user_content

TINY = Path(__file__).resolve().parents[3] / "stages" / "tiny" / "checkpoint"
SAMPLES = ["workloads=builtin", "workloads.samples={prose: 0, retrieval: 1, tool_call: 0, copy: 2, multi_turn: 0}"]


@dataclass
class Chain:
    """A store, and the artifacts that were made in it."""

    store: Store
    links: list[Link]

    def make(self, stage: str, title: str, inputs: dict[str, str], files: Mapping[str, str], **recipe: object) -> Artifact:
        def write(out: Path) -> None:
            for name, content in files.items():
                (out / name).parent.mkdir(exist_ok=True)
                (out / name).write_text(content)

        full_recipe = Recipe(stage, {"title": title, **recipe}, inputs, ("numpy",), evaluates=stage == "evaluate")
        artifact = self.store.make(full_recipe, write)
        self.links.append(Link.of(title, artifact))
        return artifact

    def bundle(self, weights: Artifact, quantized: Artifact, policy: KVPolicy) -> Artifact:
        inputs = {"model": weights.digest_under("checkpoint"), "scales": quantized.files["kv_scales.json"]}
        files = {"bundle.json": json.dumps({"backend": "onnxruntime"}), "kv_policy.json": json.dumps({"of": quantized.key})}
        files |= {"kv_scales.json": (quantized.path / "kv_scales.json").read_text(), "weights.bin": "w"}
        files |= {path.name: path.read_text(encoding="utf-8") for path in TINY.glob("*token*.json")}
        return self.make("build", f"build {quantized.key[:8]}", inputs, files, kv=policy.model_dump())


def judged_engine(
    root: Path,
    workloads: Sequence[str] = SAMPLES,
    gguf: str | None = None,
    measured: Mapping[str, object] | None = None,
    keys: SigningConfig | None = None,
    kv: str = "int8",
    **lost: int,
) -> Path:
    """Make a store in `root` and return the identity's directory. The answers `lost` per workload decide the verdict.

    `workloads` are overrides; the user's files that they name are part of the evidence. `gguf` is the digest of the
    GGUF that the checkpoint was converted from. `measured` overrides fields of the report, and `keys` sign the
    identity. A store may hold engines of several `kv`, and verdicts on several `workloads`.
    """
    config, policy = config_of(*workloads, "model.path=/models/some-llm"), config_of(f"kv={kv}").kv
    config = config.model_copy(update={"signing": keys or config.signing})
    chain = Chain(Store(root), [])
    make = chain.make
    checkpoint = "c" * 64
    if gguf is not None:
        checkpoint = make("checkpoint", "checkpoint", {"gguf": gguf}, {"model.safetensors": "weights"}).digest
    texts = make("calibration", "calibration", {"checkpoint": checkpoint}, {"texts.json": "[]"})
    inputs = {"checkpoint": checkpoint, "calibration": texts.digest}
    weights = make("weights", "weights", inputs, {"checkpoint/model.safetensors": "weights"}, weights="none")
    inputs = {**inputs, "weights": weights.digest}
    exact = make("quantize", "quantize fp16", inputs, {"kv_scales.json": "{}"}, weights="none")
    coded = make("quantize", f"quantize {kv}", inputs, {"kv_scales.json": '{"layers": []}'}, weights="none")
    baseline, engine = chain.bundle(weights, exact, FP16_POLICY), chain.bundle(weights, coded, policy)
    key, samples_path = config.workloads.user_key, config.workloads.user_path
    digests: dict[str, str] = (
        {key: hashlib.sha256(user_content(key, samples_path)).hexdigest()} if samples_path is not None else {}
    )
    answers = make("baseline", "baseline fp16", {"baseline": baseline.digest, **digests}, {"round.json": "{}"})
    rows = every_class(**lost)
    cited = {"engine_digest": engine.digest, "baseline_digest": baseline.digest, "policy": kv}
    encoded = encode_rounds(load_samples(config.workloads), BundleTokenizer(engine.path), config.workloads)
    judged = report(rows, **cited, workloads_digest=workloads_digest(encoded), **(measured or {}))
    evidence = {REPORT_FILE: judged.model_dump_json(), SAMPLES_FILE: "".join(row.model_dump_json() + "\n" for row in rows)}
    compared = {"engine": engine.digest, "answers": answers.digest, **digests}
    round_artifact = make("round", f"round {kv} 1/1", compared, {"statistics.safetensors": "rows"})
    inputs = {**compared, "baseline": baseline.digest, "round_1": round_artifact.digest}
    evaluation = make("evaluate", f"evaluate {kv}", inputs, evidence, workloads=config.workloads.model_dump())
    policy_config = config.model_copy(update={"kv": policy})
    verdict = decide(judged, rows, config.gates)
    identity = make_identity(policy_config, chain.links, verdict)
    asked = {} if workloads is SAMPLES else {"workloads": list(workloads)}
    return chain.store.make(
        Recipe("identity", asked if kv == "int8" else {"kv": kv, **asked}, {}),
        lambda out: write_identity(identity, evaluation.path, config.workloads, out, config.signing),
    ).path


def cited_tags(evidence: Path) -> dict[str, str]:
    """Return the tags of a registry version of a judged engine."""
    policy = json.loads((evidence / IDENTITY_FILE).read_text())["policy"]
    return {"kv": policy, "identity_digest": file_digest(evidence / IDENTITY_FILE)}


def candidate_of(evidence: Path) -> Candidate:
    """Return a judged engine as a candidate that is registered as version 1."""
    return registered_engine(
        identities(evidence.parents[1]), SigningConfig(), None, Version("1", cited_tags(evidence), "run")
    ).candidate


def exported(evidence: Path, target: Path, *roles: Role) -> Path:
    """Copy the evidence and the bundles of the given roles out of their store, without the manifests."""
    lineage = read_lineage(evidence / IDENTITY_FILE)
    shutil.copytree(evidence, target, ignore=shutil.ignore_patterns(".manifest.json"))
    for role in roles:
        place = evidence.parent.parent / lineage.link(role).place
        shutil.copytree(place, target / role, ignore=shutil.ignore_patterns(".manifest.json"))
    return target


@cache
def config_of(*overrides: str) -> Config:
    """Compose a configuration, which takes 0.1 s, once for all tests. Configurations are immutable."""
    return plan(overrides, multirun=False).jobs[0]


def make_champion(patch: pytest.MonkeyPatch, evidence: Path) -> Version:
    """Make every registry return the evidence's engine as its champion, version 1; return the version."""
    from pipeline.registry import mlflow_store  # importing MLflow takes 2 s

    version = Version("1", cited_tags(evidence))
    client = SimpleNamespace(champion=lambda *_: version, download=lambda *_: evidence)
    patch.setattr(Location, "exists", True)
    patch.setattr(mlflow_store, "RegistryReader", lambda _: client)
    return version


def key_pair(folder: Path, name: str) -> tuple[Path, Path]:
    """Write a new private key and its public key."""
    key, files = ec.generate_private_key(ec.SECP256R1()), (folder / f"{name}.pem", folder / f"{name}.pub.pem")
    files[0].write_bytes(key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.NoEncryption()))
    files[1].write_bytes(key.public_key().public_bytes(pem.Encoding.PEM, pem.PublicFormat.SubjectPublicKeyInfo))
    return files


def keys(signer: Path | None, *trusted: Path) -> SigningConfig:
    """Return a command's signing configuration after checking that its keys can be read."""
    config = SigningConfig(key=None if signer is None else str(signer), trusted=tuple(map(str, trusted)))
    config.check()
    return config
