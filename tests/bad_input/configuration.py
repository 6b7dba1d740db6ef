"""Bad keys and values on the command line."""

from bad_input.forks import BadInput
from bad_input.makers import text_file

BAD_VALUES = {
    "": """
        seed=1e999 seed=${oc.decode: kv=[fp8,int8] kv={name:fp8} kv=../kv/fp8 kv.key=null kv.key.scale=3
        kv.eviction={window_tokens:10} kv.overrides=[{layers:[]}] kv.overrides=[{layers:[0],key:null,value:null}]
        kv.name=UPPER kv.name=int8 +kv._target_=os.system model=null model.path=[a] model.path=pkg://
        model.path=pkg://stages.tiny/nowhere model.path=pkg://stages.tiny/../../../etc model.path=pkg://stages.tiny//etc
        model.path=https://huggingface.co/x/y workloads.samples={} workloads.rounds=[0.5,0.25,1.0]
        workloads.context_bins=[512,1024] gates.max_mean_kl=nan gates.attempt=99 gates.max_rounds=1000
        tracking.enabled=maybe tracking.uri=ftp://host tracking.experiment= workdir= workdir=s3://bucket/work
        hydra.callbacks={evil:{_target_:os.system}} no_such_key=3
    """,
    "stage=evaluate": "tracking.uri=sqlite:///:memory: tracking.uri=http://h:0",
    "-m": "seed=range(0,100000000) kv=fp8,int8,fp8",
    "stage=capacity": "capacity.gpu_gib=0 capacity.shared_prefix_tokens=99999",
    "backend=tensorrt_rtx": "backend.compute_capabilities=[90]",
}
"""Preceding arguments -> overrides. Each override is a case of its own, whose message must name the override's key."""

BAD_COMMANDS: tuple[tuple[str, ...], ...] = (
    ("seed=-1", "seed: input should be greater than or equal to 0 (got -1)"),
    ("seed=${oc.env:HOME}", "seed", "a variable holds text, write ${oc.decode:${oc.env:HOME}}"),
    ("reference=cuda", "reference: must be a mapping of keys to values", "give them one by one, as in reference.device=VALUE"),
    ("kv.eviction=streaming", "kv.eviction: must be", "give them one by one, as in kv.eviction.window_tokens=VALUE"),
    ("model.path=${HOME}/x", "model.path: Interpolation key 'HOME' not found; give it a value, or name", "${oc.env:NAME}"),
    ("–m kv=int8", "–m: has EN DASH in its key; write"),
    ("stage=bild", "stage=bild", "did you mean build?"),
    ("kv=fp8k_int4v kv.value.group_size=33", "kv.value.group_size must be 16, 32, 64 or 128, got 33"),
    ("model.path=Qwen/Qwen3-0.6B", "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B, then give model.path=Qwen3-0.6B"),
    ("model.path=pkg://no_such_package/x", "no_such_package", "stages.tiny"),
    ("tracking.model_name=a/b", "tracking.model_name: must have no / : '", "(got 'a/b')"),
    ("reference.device=gpu", "reference.device=gpu: no such option; choose one of auto, cpu, cuda"),
    ("kv=INT8", "kv=INT8: no such option, did you mean int8?"),
    ("kv=fp8_e4m3_per_head", "kv=fp8_e4m3_per_head: no such option, did you mean fp8_head?"),
    ("dry=yes", "dry: must be true or false (got 'yes')"),
    ("experiment=vllm backend=torch", "Interpolation key 'backend.max_model_len' not found; give it a value"),
    ("workloads=base", "workloads=base: no such option; choose one of auto, builtin"),
    ("tracking=none tracking.uri=sqlite:///x.db", "tracking.uri=sqlite:///x.db: tracking=none uses no store"),
    ("model=gemma3", "gemma-3-270m-q4_k_m.gguf: no such file; run make gemma3"),
    ("kv/key=fp8", "kv/key: unknown key, did you mean kv.key?"),
    ("model_path=/models/x", "model_path: unknown key, did you mean model.path?"),
    ("kv.overrides={layers:[0]}", "kv.overrides: Cannot merge DictConfig with ListConfig; give a value of its type"),
    ("backend.foo=1", "backend.foo: unknown key; choose one of compute_dtype, threads, attention"),
    ("workloads.lengths=[2048", "workloads.lengths: must be a list, as in [VALUE,VALUE]"),
    ("workloads.samples={prose:0,retrieval:0,tool_call:0,copy:0,multi_turn:0}", "workloads.samples must ask for at least one"),
    ("workloads.lengths=[2048,2048]", "workloads.lengths must be different", "give"),
    ("workloads.full_pool=7", "full_pool=7: the small pool could not hold two requests; give at least 8, or 0"),
    ("bundle=engine", "bundle=engine: only stage=verify reads it"),
    ("kv=int8 seed=1 kv=fp8", "kv=fp8: contradicts kv=int8; keep one of them"),
    ("-m kv=int8 dry=true,false", "dry=true,false: the jobs of a sweep share it; give one value"),
    ("+kv=int8", "+kv=int8: an option needs no +; write kv=OPTION"),
    ("++experiment=quick", "experiment=quick: an option needs no +; write experiment=OPTION"),
    ("stage=rollback rollback=2", "rollback: unknown key; stage=rollback restores the previous version, stage=promote promote"),
    ("workdir=7", """workdir: input should be a valid string (got 7); a text needs quotes, as in 'workdir="TEXT"'"""),
    (
        "kv.eviction={window_tokens:64,sinks:4}",
        "kv.eviction.sinks: unknown key; choose one of window_tokens, sink_tokens, heavy",
    ),
    ("~gates.max_mean_kl", "~gates.max_mean_kl: a key cannot be removed"),
    ("backend.name=vllm", "backend.name=vllm: cannot be set by itself; write backend=vllm"),
    ("evaluate kv=int8", "evaluate: has no value; write stage=evaluate"),
    ("workloads.samples={'copy':20}", "workloads.samples={'copy':20}: cannot be read", "quote texts"),
    ("kv.overrides=[{layers:[0],key:{dtype:fp8,dtype:int8}}]", "key:{dtype:fp8,dtype:int8}}]: has a name twice; keep one of"),
    ("kv=fp8,int8", "kv=fp8,int8: several values need a sweep; add -m, or give one value: a list has brackets"),
    ("model.path=/data/modèle/[7b]#a=b", "model.path=/data/modèle/[7b]#a=b: no such directory"),
    ("workdir=/data/what?", "workdir=/data/what?: MLflow", "give another path"),
    ("hydra.launcher.n_jobs=2", "hydra.launcher.n_jobs", "choose the launcher"),
    ("hydra/sweeper=optuna", "hydra/sweeper=optuna: kvgate sets hydra.* itself; leave it out"),
    ("--config-dir nowhere", "--config-dir=nowhere", "no such directory"),
    ("--frobnicate", "--frobnicate: no such option; give KEY=VALUE"),
    ("gates={min_recovery:0.9}", "the keys one by one, as gates.NAME=VALUE"),
    ('seed="3"', "seed: input should be a valid integer (got '3')"),
    ("kv.window.tokens=256", "kv.window.key and value are both null", "or null for no window"),
    ("workloads.samples=3", "workloads.samples: must be a mapping of keys to values (got 3)", "as in workloads.samples.NAME="),
    ("-m seed=range(3,0)", "seed=range(3,0): has no values; list the values to sweep"),
    ("signing.key=nowhere.pem", "signing.key=nowhere.pem: no such file", "openssl"),
    (
        "stage=capacity capacity.contexts=[{tokens:10,requests:1,x:1}]",
        "capacity.contexts.0.x: unknown key; choose one of tokens, requests",
    ),
    (
        "stage=capacity capacity.contexts=[{tokns:10,requests:1}]",
        "capacity.contexts.0: has tokns and no tokens; rename or add it",
    ),
    (
        "stage=capacity capacity.contexts=[{tokens:40000,requests:1}]",
        "capacity.contexts: got 40,000 tokens, 7,232 too many (the model was made for 32,768 tokens)",
    ),
    ("stage=verify", "bundle: stage=verify needs bundle=; give one"),
    ("stage=verify bundle=.", "bundle=.: holds neither identity.json nor bundle.json"),
    ("stage=capacity capacity.gpu_gib=0.001", "capacity.gpu_gib=0.001: capacity.reserve_gib=4 leaves nothing"),
    ("backend.compute_dtype=bfloat16", "backend.compute_dtype=bfloat16", "ONNX Runtime", "backend=tensorrt_rtx"),
    (
        "backend=tensorrt_rtx backend.compute_capabilities=[80,86,89] kv=fp8",
        "kv.key.dtype=",
        "set backend.compute_capabilities=[89]",
    ),
    (
        "backend=tensorrt_rtx backend.max_batch=1024 backend.max_tokens=32768",
        "backend.max_batch=1024",
        "backend.max_tokens=32768",
        "2,147,483,647",
    ),
)
"""Arguments, then texts that the message must contain (by default the last argument)."""

UNMET_REQUIREMENTS: tuple[tuple[str, ...], ...] = (
    ("backend=tensorrt", "backend=tensorrt", "TensorRT"),
    ("backend=trtllm backend.python=/nowhere", "backend.python=/nowhere"),
    ("backend=sglang kv=fp8_e5m2 backend.python=/etc/passwd", "backend.python=/etc/passwd"),
)
"""Like BAD_COMMANDS, with exit code 4, because this machine does not meet a requirement."""


OWN_FILES: tuple[tuple[str, str, str | bytes, tuple[str, ...]], ...] = (
    ("deep nesting", "kv/mine.yaml", "a: " + "[" * 9999 + "]" * 9999, ("mine.yaml", "maximum recursion")),
    ("keys for a list", "kv/mine.yaml", "overrides: {}", ("Cannot merge DictConfig with ListConfig; give each key a value",)),
    ("a single number", "kv/mine.yaml", "5", ("--config-dir", "mine.yaml")),
    ("an open interpolation", "kv/mine.yaml", 'name: "${"', ("--config-dir", "mine.yaml")),
    ("no character", "kv/mine.yaml", r'name: "\UFFFFFFFF"', ("--config-dir", "mine.yaml", "cannot be read")),
    ("a value of ???", "kv/mine.yaml", "name: ???", ("--config-dir", "mine.yaml", "??? is no value")),
    ("an empty file", "kv/mine.yaml", "", ("--config-dir", "mine.yaml", "has no keys")),
    ("a file outside the groups", "mine.yaml", "name: mine", ("--config-dir=mine: has no options, such as kv/NAME.yaml",)),
    ("an unknown group", "caches/mine.yaml", "name: mine", ("mine: has no options", "experiment, gates, hydra, kv")),
    (
        "an unknown default",
        "kv/mine.yaml",
        "defaults: [x]",
        ("In 'kv/mine': Could not load 'kv/x'; ", "override /GROUP: OPTION"),
    ),
    ("defaults of one text", "kv/mine.yaml", "defaults: int8\nname: mine", ("In 'defaults'", "kv/mine", "must be a list")),
    ("keys of its group's name", "kv/mine.yaml", "kv: {name: mine}", ("mine.yaml", "leave out the line `kv:`")),
    ("keys for another place", "kv/mine.yaml", "# @package _global_\nname: mine", ("mine.yaml", "moves the keys out of kv")),
    ("keys below experiment", "experiment/mine.yaml", "seed: 3", ("mine.yaml", "needs the first line '# @package _global_'")),
    ("a shipped option", "kv/int8.yaml", "name: int8", ("--config-dir", "kv/int8.yaml", "another name")),
)
"""Name, file below --config-dir, its content, texts that the message must contain."""


def case(line: str, *expected: str, code: int = 2) -> BadInput:
    """Return the case of a command line. stderr must contain `expected`, by default the last argument."""
    arguments = tuple(line.split(" "))
    return BadInput(
        line,
        arguments,
        expected or arguments[-1:],
        code=code,
        runs_stage=not {"stage=verify", "dry=true"}.isdisjoint(arguments),
    )


CASES = [
    *(
        case(f"{before} {override}".lstrip(), override.partition("=")[0].lstrip("+"))
        for before, overrides in BAD_VALUES.items()
        for override in overrides.split()
    ),
    *(case(*row) for row in BAD_COMMANDS),
    *(case(*row, code=4) for row in UNMET_REQUIREMENTS),
    *(
        BadInput(f"--config-dir: {what}", ("--config-dir=mine", "kv=mine"), expected, text_file(f"mine/{file}", content))
        for what, file, content, expected in OWN_FILES
    ),
    *(
        BadInput(
            f"--config-dir: {key}",
            ("--config-dir=mine", f"{group}=mine"),
            tuple(expected),
            text_file(f"mine/{group}/mine.yaml", key),
        )
        for group, key, *expected in (
            ("model", "paht: x", "error: model: has paht and no path; rename or add it"),
            ("workloads", "samples: {copy: 20}", "error: workloads: has no jsonl, seed, ", "load; add them, or begin the file"),
            ("backend", "threads: 2", "error: backend: must be a mapping with a name (got", "add the name, or begin the file"),
        )
    ),
    *(
        BadInput(
            f"--config-dir: an experiment with {keys}",
            ("--config-dir=mine", "experiment=mine"),
            (expected,),
            text_file("mine/experiment/mine.yaml", f"# @package _global_\n{keys}\n"),
        )
        for keys, expected in {
            "hydra: {sweeper: {params: {kv: 'int8,fp8'}}}": "hydra.sweeper.params.kv: is read only with -m; add it",
            "experiment: quick": "experiment: unknown key; name it first in `defaults`, as in `defaults: [OPTION, _self_]`",
            "defaults: [/kv: int8]": "--config-dir: Multiple values for kv. To override a value use 'override kv: int8'; give",
            "kv: int8": "kv: must be a mapping of keys to values (got 'int8'); choose the option in its defaults",
            "defaults: [{override /kv: int8, override /backend: torch}]": "In 'defaults' of a file: In experiment/mine: ",
            "gates.min_recovery: 0.97": "gates.min_recovery: unknown key, because no dot divides keys in a file; write gates: ",
        }.items()
    ),
    case(f"seed={'9' * 5000}", "seed: input should be a valid integer"),
    case(f"model.path={'x' * 300}", "model.path", "too long"),
    BadInput("a b=3", ("a b=3",), ("a b",)),
    BadInput("a line break", ("\n",), ("KEY=VALUE",)),
    BadInput("an empty argument", ("",), ("an empty argument",)),
    BadInput("a value of 100,000 quotes", ("seed=" + "\"'" * 50_000,), ("seed:", "32,768 characters")),
    BadInput("lists of lists", ("seed=" + "[" * 3000 + "]" * 3000,), ("seed:", "nested too deep")),
    BadInput("a model's name with a right-to-left override", ("tracking.model_name='a\u202eb'",), ("tracking.model_name",)),
]
