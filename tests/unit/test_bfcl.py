"""Function calls from BFCL: read without running anything, judged by the package's own checker, refused before any work."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from pipeline.config.compose import plan
from pipeline.core.errors import UserError
from pipeline.core.records import Sample
from pipeline.core.workloads import BFCL_CATEGORIES, BFCL_REFUSED, BfclConfig
from stages.evaluate.inputs.checks import judge
from stages.evaluate.inputs.samples import load_samples, read_jsonl
from stages.workloads import bfcl
from stages.workloads.bfcl import bfcl_samples, read_calls, write_calls

ROOT = Path(__file__).resolve().parents[2]


def samples(category: str, count: int = 100_000, seed: int = 0) -> list[Sample]:
    return bfcl_samples(BfclConfig(categories=[category], samples=count), seed)


def correct(sample: Sample, text: str) -> bool:
    return judge(sample, text).correct


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[f(x=1)]", [{"f": {"x": 1}}]),
        ("f(x=1), a.b.g(y='t')", [{"f": {"x": 1}}, {"a.b.g": {"y": "t"}}]),
        ("```\n[f(x=-2.5, y=[1, (2, 3)], z={'k': None})]\n```", [{"f": {"x": -2.5, "y": [1, (2, 3)], "z": {"k": None}}}]),
        ("[f(x=2 * 3 - 1 / 4)]", [{"f": {"x": 5.75}}]),
        ("[f(x=name, y=g(), z=g(k=1), w=a[0])]", [{"f": {"x": "name", "y": "g()", "z": {"g": {"k": 1}}, "w": "a[0]"}}]),
        ("[f(1, 2, x=3)]", [{"f": {"x": 3}}]),
        (r"[f(x='\d')]", [{"f": {"x": r"\d"}}]),
        ("[]", []),
    ],
)
def test_calls_are_read_as_bfcl_reads_them(text: str, calls: list[Any]) -> None:
    assert read_calls(text) == calls


@pytest.mark.parametrize(
    "text",
    [
        "None of the functions can be used.", "[f(x=]", "[3]", "[f]", "f(x=1) + g(x=2)", "[f(x=1/0)]",
        "[f(x=9**9**9)]", "[f(x='a'*10**10)]", "[f(x=[]+[])]", "[f(x=-'a')]", "[f(x=lambda: 1)]", "[f(x={**y})]",
        "[f(x=" + "[" * 5000 + "]" * 5000 + ")]", "[f(x={[]: 1})]", "[f(x=not y)]", "\0",
    ],
)  # fmt: skip
def test_what_is_no_list_of_calls_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_calls(text)


@pytest.mark.parametrize("template", ["[f(x={} + 1)]", "[f(x=(lambda: {})())]", "[f(x={})]", "[f({})]", "[{}]", "{}"])
def test_nothing_that_a_model_writes_is_executed(template: str, tmp_path: Path) -> None:
    """The package's own reader runs `eval` on arithmetic: the first of these would create the file there."""
    victim = tmp_path / "executed"
    text = template.format(f"open({str(victim)!r}, 'w').write('x')")
    with contextlib.suppress(ValueError):
        read_calls(text)
    assert not victim.exists()


def test_a_reference_takes_first_values_and_leaves_out_what_may_be_left_out() -> None:
    possible: list[dict[str, dict[str, list[Any]]]] = [
        {"f": {"a": [1, 2], "b": ["", "x"], "c": ["", "y"], "d": [{"k": ["v", "w"], "l": [""]}], "e": [[{"m": [3]}]]}}
    ]
    text = write_calls(possible, {"f": ["b"]})
    assert read_calls(text) == [{"f": {"a": 1, "b": "x", "d": {"k": "v"}, "e": [{"m": 3}]}}]


@pytest.mark.parametrize("category", BFCL_CATEGORIES)
def test_every_reference_is_accepted_by_the_checker_and_few_entries_have_none(category: str) -> None:
    drawn = samples(category)
    assert all(correct(sample, sample.reference) for sample in drawn)
    left_out = {"live_simple": 2, "live_multiple": 2}
    assert len(bfcl._lines(f"BFCL_v4_{category}.json")) - len(drawn) == left_out.get(category, 0)
    assert {sample.workload for sample in drawn} == {f"bfcl_{category}"}


def test_a_wrong_value_a_missing_and_a_surplus_call_are_wrong_and_the_order_of_parallel_calls_is_free() -> None:
    (simple, *_) = (s for s in samples("simple_python") if s.id == "bfcl_simple_python_0")
    assert correct(simple, "[calculate_triangle_area(base=10, height=5)]")
    assert correct(simple, "calculate_triangle_area(base=10, height=5, unit='Units')")
    for wrong in ("base=10, height=6", "base=10", "base=10.0, height=5", "base=10, height=5, color='red'", "10, 5"):
        assert not correct(simple, f"[calculate_triangle_area({wrong})]")
    assert not correct(simple, "[triangle(base=10, height=5)]")
    assert not correct(simple, "The area is 25.")
    (parallel, *_) = samples("parallel", 1)
    first, *others = read_calls(parallel.reference)
    assert others
    text = [
        f"{name}({', '.join(f'{k}={v!r}' for k, v in values.items())})"
        for call in (*others, first)
        for name, values in call.items()
    ]
    assert correct(parallel, f"[{', '.join(text)}]")
    assert not correct(parallel, f"[{', '.join(text[:-1])}]")
    assert not correct(parallel, f"[{', '.join([*text, text[0]])}]")
    (none,) = samples("irrelevance", 1)  # where no call is right
    assert correct(none, "I cannot help.")
    assert correct(none, "[]")
    assert not correct(none, f"[{json.loads(none.expected)['functions'][0]['name']}(x=1)]")


def test_the_prompt_is_bfcls_own_and_the_questions_system_text_follows_it() -> None:
    (sample,) = (s for s in samples("simple_python") if s.id == "bfcl_simple_python_0")
    (system_role, system), (user_role, question) = sample.messages
    assert (system_role, user_role) == ("system", "user")
    assert system.startswith("You are an expert in composing functions.You are given a question")
    assert "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]" in system
    assert (
        '"description": "Calculate the area of a triangle given its base and height. Note that the provided function is'
        in system
    )
    assert question == "Find the area of a triangle with a base of 10 units and height of 5 units."
    with_system = [s for s in samples("live_simple") if s.messages[0][1].rstrip()[-1] != "]"]
    assert with_system
    assert all([role for role, _ in s.messages] == ["system", "user"] for s in with_system)


def test_neither_reading_nor_checking_imports_an_sdk_or_leaves_a_stand_in() -> None:
    program = (
        "import sys\n"
        "from pipeline.core.workloads import BfclConfig\n"
        "from stages.workloads.bfcl import bfcl_samples\n"
        "bfcl_samples(BfclConfig(categories=['simple_python'], samples=1), 0)\n"
        "print(*sys.modules)"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    modules = set(output.split())
    assert "bfcl_eval.eval_checker.ast_eval.ast_checker" in modules
    # utils and eval_config create directories beside the package; model_config would be the stand-in
    assert not {"bfcl_eval.utils", "bfcl_eval.constants.eval_config", "bfcl_eval.constants.model_config"} & modules
    assert not {"openai", "anthropic", "tree_sitter", "torch"} & {name.partition(".")[0] for name in modules}


@pytest.mark.parametrize(
    "category", ["web_search_base", "memory_kv", "multi_turn_base", "simple_java", "live_relevance", "simple"]
)
def test_a_category_that_cannot_be_judged_is_refused_in_one_line(category: str) -> None:
    why = next((why for start, why in BFCL_REFUSED.items() if category.startswith(start)), "no such category")
    with refused(UserError, f"workloads.bfcl.categories={category}: {why}; choose among"):
        plan(["workloads=bfcl", f"workloads.bfcl.categories=[simple_python,{category}]"], multirun=False)


def test_the_option_bfcl_asks_its_categories_and_other_samples_can_stand_beside_them() -> None:
    overrides = [
        "workloads=bfcl",
        "workloads.bfcl.categories=[multiple]",
        "workloads.bfcl.samples=2",
        "+workloads.samples.copy=1",
    ]
    (config,) = plan(overrides, multirun=False).jobs
    assert samples("multiple", 20) == samples("multiple", 20) != samples("multiple", 20, seed=1)
    assert [sample.workload for sample in load_samples(config.workloads)] == ["copy", "bfcl_multiple", "bfcl_multiple"]


def test_a_line_of_the_users_file_cannot_ask_for_bfcls_checker(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"prompt": "x", "reference": "[f()]", "check": "bfcl"}))
    with pytest.raises(UserError, match=r"mine\.jsonl:1: check: .*, give one of none, exact, mention, json, tool_call$"):
        read_jsonl(path, set())
