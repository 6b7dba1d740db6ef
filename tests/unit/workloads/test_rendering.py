"""Chat templates are programs by the model's author. They are stopped at limits on time, memory and output."""

import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from helpers.refusals import refused
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stages.core.errors import UserError
from stages.core.records import Sample
from stages.workloads import prompts
from stages.workloads.prompts import render_all

SAMPLE = Sample(id="1", workload="custom", reference="", messages=(("user", "Hello"),))

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"


class TemplateTokenizer:
    """A tokenizer that has only a chat template."""

    def __init__(self, chat_template: str) -> None:
        self.chat_template = chat_template

    def apply_chat_template(self, messages: Any, strftime_now: Callable[[str], str], **variables: Any) -> str:
        template = ImmutableSandboxedEnvironment().from_string(self.chat_template)
        return template.render(messages=messages, strftime_now=strftime_now, **variables)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (LOOP, "takes more than 0.3 s"),
        ("{{ 'x'.join(['%s' % (7**(10**8))]) }}", "takes more than 0.3 s"),
        ("{{ 'x' * 10**11 }}", "takes more than 1,024 MiB of memory"),
        ("{{ 'x' * (17 * 1024 * 1024) }}", "writes 17,825,792 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails (RecursionError)"),
        ("{{ messages[7].role.upper() }}", "refuses sample 1"),
        ("{{ 1 // 0 }}", "refuses sample 1 (ZeroDivisionError"),
    ],
)
def test_a_template_that_exceeds_a_limit_or_fails_is_refused(
    template: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "0.3 s" in problem:
        monkeypatch.setattr(prompts, "RENDER_SECONDS", 0.3)
    began, before = time.monotonic(), psutil.Process().children()
    with refused(UserError, "", problem):
        render_all(TemplateTokenizer(template), [SAMPLE])
    assert time.monotonic() - began < 4
    assert psutil.Process().children() == before, "the child process was stopped"


def test_samples_are_rendered_in_one_child() -> None:
    samples = [dataclasses.replace(SAMPLE, id=str(number), messages=(("user", str(number)),)) for number in range(300)]
    assert render_all(TemplateTokenizer("{{ messages[0].content }}\\n"), samples) == [f"{number}\\n" for number in range(300)]
    with pytest.raises(UserError, match=r"refuses sample 7 \(ZeroDivisionError"):
        render_all(TemplateTokenizer("{{ messages[0].content }}{{ 1 // (7 - messages[0].content | int) }}"), samples)


def test_a_template_that_ends_its_process_is_refused() -> None:
    with refused(UserError, "", "ends the process that renders it"):
        prompts.rendered([lambda: "sound", lambda: os._exit(3)])


def test_thinking_is_disabled_in_templates_that_support_it() -> None:
    for template in (
        "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}",
        "{% if not (enable_thinking | default(true)) %}<think></think>{% endif %}",
        "{% if thinking is defined and thinking %}<think>{% else %}<think></think>{% endif %}",
    ):
        (text,) = render_all(TemplateTokenizer("{{ messages[0].content }}" + template), [SAMPLE])
        assert text.endswith("<think></think>")
