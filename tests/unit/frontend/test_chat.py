"""Chat templates against transformers' apply_chat_template."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from blink_core.frontend.chat import ChatTemplate, ChatTemplateError
from blink_core.frontend.tokenizer import Tokenizer

# Each exercises something that the environment must provide just so.
TEMPLATES = {
    "headers, bos, trim": (
        "{{- bos_token }}\n{%- for m in messages %}\n    {%- if m.role == 'system' and not loop.first %}\n"
        "        {{- raise_exception('system must come first') }}\n    {%- endif %}\n"
        "{{- '<|' + m['role'] + '|>\\n' + m['content'] | trim + eos_token }}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n{{- '<|assistant|>\\n' }}\n{%- endif %}\n"
    ),
    "block whitespace": (
        "{% for m in messages %}\n  {% if m.role == 'user' %}\nU: {{ m.content }}\n"
        "  {% else %}\n{{ m.role }}: {{ m.content }}\n  {% endif %}\n{% endfor %}\n  end  \n"
    ),
    "tojson": (
        "{{ messages | tojson }}|{{ messages | tojson(indent=2) }}|{{ {'b': 1, 'a': '<é>'} | tojson(sort_keys=true) }}"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
    ),
    "namespace and loop controls": (
        "{% set ns = namespace(n=0, last='') %}{% for m in messages %}{% if ns.n >= 3 %}{% break %}{% endif %}"
        "{% set ns.n = ns.n + 1 %}{% set ns.last = m.role %}{{ m.content }}{% endfor %}{{ ns.n }}{{ ns.last }}"
    ),
    "optional names": (
        "{% for m in messages %}{% if m.name is defined %}{{ m.name }}{% endif %}{{ m.content }}{% endfor %}"
    ),
    "tools and dict": (
        "{{ tools is none }}{{ documents is none }}{{ dict(a=1)['a'] }}{{ messages | length }}{{ undefined_thing }}"
    ),
    "date": "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}",
}
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text(max_size=20)},
        optional={"name": st.none() | st.text(max_size=5)},
    ),
    min_size=1,
    max_size=5,
)


def render_both(
    reference: PreTrainedTokenizerBase, source: str, messages: list[dict[str, Any]], prompt: bool
) -> tuple[str | None, str | None]:
    """Blink's and transformers' text, None where the template refused."""
    try:
        ours = ChatTemplate(source, reference.special_tokens_map).render(messages, add_generation_prompt=prompt)
    except ChatTemplateError:
        ours = None
    try:
        theirs = reference.apply_chat_template(
            messages, chat_template=source, tokenize=False, add_generation_prompt=prompt
        )
    except Exception:
        theirs = None
    return ours, theirs


@pytest.mark.parametrize("name", TEMPLATES)
@given(messages=MESSAGES, prompt=st.booleans())
def test_rendering_equals_transformers(
    reference: PreTrainedTokenizerBase, name: str, messages: list[dict[str, Any]], prompt: bool
) -> None:
    """Catches: a difference in whitespace, filters, globals or extensions of the template environment."""
    ours, theirs = render_both(reference, TEMPLATES[name], messages, prompt)
    assert ours == theirs


@given(messages=MESSAGES)
def test_real_template_gives_the_ids_of_transformers(
    smollm: Tokenizer, reference: PreTrainedTokenizerBase, messages: list[dict[str, Any]]
) -> None:
    """Catches: fault T11, special tokens added to rendered text a second time (more BOS than the template wrote)."""
    assert smollm.chat_template is not None
    text = ChatTemplate(smollm.chat_template, smollm.special_tokens).render(messages)
    assert text == reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = smollm.encode_rendered(text)
    assert ids == list(reference.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])
    assert ids.count(1) == text.count("<|im_start|>")


def test_template_that_refuses_gives_its_own_words() -> None:
    """Catches: raise_exception lost, or its message replaced."""
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(ChatTemplateError, match="^roles must alternate$"):
        template.render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace(__class__=1) %}",
        "{{ dict.__class__.__init__.__globals__ }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ messages[7].content.x }}",
        "{{ 1 // 0 }}",
    ],
)
def test_template_escapes_and_failures_are_errors(source: str) -> None:
    """Catches: a template from the Hub that reaches Python internals, or whose failure is no ChatTemplateError."""
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])


def test_template_with_a_syntax_error_is_refused_when_loaded() -> None:
    """Catches: a faulty template found only by the first request."""
    with pytest.raises(ChatTemplateError, match="does not compile"):
        ChatTemplate("{% for %}", {})
