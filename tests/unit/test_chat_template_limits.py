"""A chat template is a program of the model's author: it is stopped where it takes too much."""

import resource
import signal
from collections.abc import Callable
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeline.core.errors import UserError
from pipeline.core.records import Sample
from stages.workloads import prompts
from stages.workloads.prompts import render

SAMPLE = Sample(id="1", workload="custom", reference="", messages=(("user", "Hello"),))

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"


class Templated:
    """A tokenizer that has a template and nothing else."""

    def __init__(self, chat_template: str) -> None:
        self.chat_template = chat_template

    def apply_chat_template(self, messages: Any, strftime_now: Callable[[str], str], **_: Any) -> str:
        template = ImmutableSandboxedEnvironment().from_string(self.chat_template)
        return template.render(messages=messages, strftime_now=strftime_now)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (LOOP, "takes more than 0.3 s"),
        ("{{ 'x' * 10**11 }}", "takes more than 1,024 MiB of memory"),
        ("{{ 'x' * (17 * 1024 * 1024) }}", "writes 17,825,792 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails (RecursionError)"),
        ("{{ messages[7].role.upper() }}", "refuses sample 1"),
        ("{{ 1 // 0 }}", "refuses sample 1 (ZeroDivisionError"),
        ("{{ 1 + 'a' }}", "refuses sample 1 (TypeError"),
    ],
)
def test_a_template_that_takes_too_much_is_refused(template: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if template == LOOP:
        monkeypatch.setattr(prompts, "RENDER_SECONDS", 0.3)
    before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)
    with pytest.raises(UserError) as caught:
        render(Templated(template), SAMPLE)
    assert problem in str(caught.value)
    assert (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)) == before


def test_a_sound_template_is_rendered() -> None:
    assert render(Templated("{{ messages[0].content }}!"), SAMPLE) == "Hello!"
