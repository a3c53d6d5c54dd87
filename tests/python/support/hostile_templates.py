"""Chat templates that would take all time or all memory, each by a means of its own, and a program that renders them.

As a program it renders those named on its command line, or all, and prints what becomes of each. The system gives it
little memory and processor time, in which a template that gets past the limits ends it. To be quick, it lowers the
limits twentyfold first; with SHARPI_LONG_TESTS=1 they stay as they are.
"""

from __future__ import annotations

import os
import resource
import sys

# Harmless: a template like those of most models.
MARKED = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('no role\\n' + message.role) }}
    {%- endif %}
[{{ message['role'] }}]{{ message.content | trim }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}
[assistant]
    {%- if enable_thinking is defined and not enable_thinking %}
{{ '<think></think>' }}
    {%- elif enable_thinking is defined %}
{{ '<think>\\n' }}
    {%- endif %}
{% endif %}
"""

LOOP = "{% for i in range(99999) %}"
DOUBLE = "{% set x = x ~ x %}"


def nested_list(brackets: str, then: str) -> str:
    """A list that is twice in the next one, and so on: 2^60 elements for a walk through it."""
    inside = "[x, x]" if brackets == "[]" else "(x, x)"
    return "{% set x = 'a' %}" + f"{{% set x = {inside} %}}" * 60 + then


def deep_list(step: str, then: str) -> str:
    """A list in a list in a list, 99,999 deep: a walk that recurses runs out of stack."""
    return "{% set n = namespace(t=1) %}" + LOOP + "{% set n.t = " + step + " %}{% endfor %}" + then


HOSTILE = {
    # What such templates usually do: multiply, format or pad text.
    "product": "{{ 'a' * 5000000000 }}",
    "product of a list": "{{ ([1, 2] * 5000000000) | length }}",
    "product from the left": "{{ 5000000000 * 'a' }}",
    "percent": "{{ '%999999999d' % 1 }}",
    "percent with a precision": "{{ '%.999999999f' % 1 }}",
    "percent with a given width": "{{ '%*d' % (999999999, 1) }}",
    "percent, many fields": "{{ ('%(a)9999d' * 60000) % {'a': 1} }}",
    "format filter": "{{ '%999999999d' | format(1) }}",
    "str.format": "{{ '{:>999999999}'.format(1) }}",
    "str.format, nested": "{{ '{:>{}}'.format(1, 999999999) }}",
    "str.format, precise": "{{ '{:.999999999f}'.format(1.5) }}",
    "str.format, many fields": "{% set x = 'a' * 100000 %}{{ ('{0}' * 100000).format(x) }}",
    "str.format_map": "{{ '{a:>999999999}'.format_map({'a': 1}) }}",
    "str.format of a sub-item": "{{ ('{0[content]:>999999999}').format(messages[0]) }}",
    "center": "{{ 'a' | center(10 ** 10) }}",
    "str.center": "{{ 'a'.center(10000000000) }}",
    "str.ljust": "{{ 'a'.ljust(10000000000) }}",
    "str.zfill": "{{ 'a'.zfill(10000000000) }}",
    "str.expandtabs": "{{ '\t'.expandtabs(10000000000) }}",
    "str.replace": "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "str.replace of nothing": "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
    "replace": "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "str.join": "{{ ('b' * 100000).join(['a'] * 100000) }}",
    "join": "{{ (['a'] * 100000) | join('b' * 100000) }}",
    "indent": "{{ ('a\\n' * 100000) | indent(100000) }}",
    "indent with text": "{{ ('a\\n' * 100000) | indent('b' * 100000) }}",
    "tojson with an indent": "{{ [[[1]]] | tojson(indent=1000000000) }}",
    "tojson with separators": "{{ ([1] * 100000) | tojson(separators=('a' * 100000, ':')) }}",
    "batch": "{{ [1] | batch(10000000000, 0) | list | length }}",
    "slice": "{{ [1] | slice(10000000000) | list | length }}",
    "round": "{{ 1.5 | round(1000000000) }}",
    "wordwrap": "{{ ('a ' * 100000) | wordwrap(1, wrapstring='b' * 100000) }}",
    "xmlattr, urlize": "{{ ('http://a.b ' * 200000) | urlize }}",
    "striptags": "{{ ('<!--' * 500000) | striptags }}",
    "text to a list": "{{ ('ab' * 5000000) | list | length }}",
    "split": "{{ ('é ' * 10000000).split() | length }}",
    "search from the end": LOOP + "{{ ('a' * 1000000).rfind('b' + 'a' * 500000) }}{% endfor %}",
    "strip": LOOP + "{{ ('a' * 1000000).strip('bcdefghijklmnopqrstuvwxyza' * 100) }}{% endfor %}",
    # Numbers.
    "power": "{{ 10 ** 10000000000 }}",
    "power of a power": "{{ 9 ** 9 ** 9 }}",
    "squares": "{% set n = namespace(x=3) %}" + LOOP + "{% set n.x = n.x * n.x %}{% endfor %}",
    "sum of numbers": "{% set n = namespace(x=3) %}" + LOOP + "{% set n.x = n.x + n.x %}{% endfor %}",
    "int of digits": "{{ ('f' * 10000000) | int(base=16) }}",
    "bytes of a number": "{{ (1).to_bytes(10000000000) }}",
    # Text and lists that grow by themselves.
    "doubling": "{% set x = 'aaaaaaaaaaaaaaaa' %}" + DOUBLE * 60 + "{{ x | length }}",
    "doubling with +": "{% set x = 'aaaaaaaaaaaaaaaa' %}" + "{% set x = x + x %}" * 60 + "{{ x | length }}",
    "doubling in a block": "{% set x %}aaaaaaaaaaaaaaaa{% endset %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
    "doubling in a loop": "{% set n = namespace(x='a') %}" + LOOP + "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling of a list": "{% set n = namespace(x=[1]) %}" + LOOP + "{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling in a macro": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{% set x = 'a' %}" + "{% set x = m(x) %}" * 60,
    "much text kept": "{% set n = namespace(x=[]) %}" + LOOP + "{% set n.x = n.x + ['a' * 100000] %}{% endfor %}",
    "much text put out": LOOP + LOOP + "aaaaaaaaaaaaaaaaaaaaaaaaaaaa{% endfor %}{% endfor %}",
    "short text put out": LOOP + LOOP + "{{ i }}{% endfor %}{% endfor %}",
    "slices": "{% set x = 'a' * 1000000 %}{% set n = namespace(x=[]) %}" + LOOP
              + "{% set n.x = n.x + [x[1:]] %}{% endfor %}",
    # Lists that are larger than they look, and deeper.
    "list as text": nested_list("[]", "{{ x }}"),
    "list joined to text": nested_list("[]", "{{ x ~ '' }}"),
    "list as JSON": nested_list("[]", "{{ x | tojson }}"),
    "lists compared": nested_list("[]", "{% set y = x %}" + nested_list("[]", "{{ x == y }}")),
    "list as a key": nested_list("()", "{{ {x: 1} }}"),
    "list looked up": nested_list("()", "{{ {1: 1}[x] }}"),
    "list in a dict": nested_list("()", "{{ x in {1: 1} }}"),
    "list in a format": nested_list("()", "{{ '%s' % (x,) }}"),
    "list replaced": nested_list("()", "{{ x | upper }}"),
    "a deep tuple as a key": deep_list("(n.t,)", "{{ {n.t: 1} | length }}"),
    "a deep tuple as a key, by a macro":
        "{% macro m() %}{% set n.t = varargs %}{% endmacro %}{% set n = namespace(t=1) %}" + LOOP
        + "{{ m(n.t) }}{% endfor %}{{ {n.t: 1} | length }}",
    "a deep list as text": deep_list("[n.t]", "{{ n.t }}"),
    "a deep list as JSON": deep_list("[n.t]", "{{ n.t | tojson }}"),
    "a deep list, made by batch": deep_list("[n.t] | batch(1) | list", "{{ n.t }}"),
    # Loops and calls.
    "loops": LOOP * 4 + "{% endfor %}" * 4,
    "loops with a body": LOOP * 4 + "{% set x = i + 1 %}" + "{% endfor %}" * 4,
    "loop with a condition": LOOP + "{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
    "range": "{% for i in range(10 ** 12) %}{% endfor %}",
    "loop over text": "{% for c in 'a' * 100000000 %}{% endfor %}",
    "filter in a loop": LOOP + "{{ range(99999) | map('abs') | sum }}{% endfor %}",
    "select in a loop": LOOP + "{{ range(99999) | select('odd') | list | length }}{% endfor %}",
    "sort in a loop": LOOP + "{{ range(99999) | sort | first }}{% endfor %}",
    "lists added up": LOOP + "{{ ([[1]] * 99999) | sum(start=[]) | length }}{% endfor %}",
    "search in a loop": LOOP + "{{ 'b' in 'a' * 1000000 }}{% endfor %}",
    "comparison in a loop": "{% set x = 'a' * 1000000 %}{% set y = 'a' * 1000000 %}" + LOOP + LOOP
                            + "{{ x == y }}{% endfor %}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(50) }}",
    "macros without output": "{% macro m(n) %}{% if n %}{% set a = m(n - 1) %}{% set a = m(n - 1) %}{% endif %}"
                             "{% endmacro %}{% set a = m(50) %}",
    "recursive loop": "{% for i in [[], []] recursive %}{{ loop([[], []]) }}{% endfor %}",
    "blocks": "{% block a %}{{ self.b() }}{{ self.b() }}{% endblock %}{% block b %}{{ self.a() }}{% endblock %}",
    "call blocks": "{% macro m(n) %}{{ caller() }}{{ caller() }}{% endmacro %}"
                   + "{% call m(1) %}" * 40 + "a" + "{% endcall %}" * 40,
    # Large or deep before it runs.
    "a long template": "{{ 1 }}" * 1000000,
    "many loops side by side": "{% for i in messages %}{% set a = i %}{% endfor %}" * 5000,
    "deep parentheses": "{{ " + "(" * 50000 + "1" + ")" * 50000 + " }}",
    "deep blocks": "{% if 1 %}" * 20000 + "{% endif %}" * 20000,
    "deep loops": "{% for i in messages %}" * 60 + "{% endfor %}" * 60,
    "a long sum": "{{ 1" + " + 1" * 60000 + " }}",
    "a long list": "{{ [" + "1, " * 80000 + "] }}",
    "a long number": "{{ " + "9" * 100000 + " }}",
    "an open comment": "{# " * 80000,
    "open braces": "{{ '" * 50000,
    "many branches": "".join(f"{{% if x{i} %}}{{% set a{i} = 1 %}}{{% endif %}}" for i in range(2000)),
    "many alternatives":
        "{% if x %}" + "".join(f"{{% elif x{i} %}}{{% set a{i} = 1 %}}" for i in range(2000)) + "{% endif %}",
    # Filters that recurse into what they are given.
    "pprint": nested_list("[]", "{{ x | pprint }}"),
    "a date": "{{ strftime_now('%999999999Y') }}",
    "lorem ipsum": "{{ lipsum(1000000000) }}",
    "message": "{{ raise_exception('a' * 100000000) }}",
    "cycler": LOOP + "{% set c = cycler(*range(99999)) %}{% endfor %}",
    # A template's own lists, which it may change.
    "a list that grows under a loop": "{% set a = [1] %}{% for x in a %}{% set _ = a.append(x) %}{% endfor %}",
    "appending": "{% set a = [] %}" + LOOP * 2 + "{% set _ = a.append('x') %}{% endfor %}{% endfor %}",
    "a list in itself": "{% set a = [] %}{% set _ = a.append(a) %}{{ a }}",
    "popping": "{% set a = [1] * 99999 + [] %}" + LOOP * 2 + "{% set b = [] %}{% set _ = b.append(1) %}"
               "{% set _ = b.pop(0) %}{% endfor %}{% endfor %}",
    "namespace as text": "{% set n = namespace(x='a' * 1000) %}" + "{% set n.x = [n.x, n.x] %}" * 50 + "{{ n }}",
}

# These come to an end by themselves, and put out little.
HARMLESS = {"power of a power", "a date", "many branches", "many alternatives"}


def outcome(source: str) -> str:
    """What becomes of a conversation with such a template."""
    from sharpi.errors import SharpiError
    from sharpi.text.chat import ChatTemplate

    try:
        template = ChatTemplate(source, "<s>", "</s>", "hostile.gguf")
        return f"{len(template.render([{'role': 'user', 'content': 'Hello'}]))} characters"
    except SharpiError as error:
        return str(error)


if __name__ == "__main__":
    import sharpi.text.chat  # noqa: F401  what this takes is not the templates' doing
    from sharpi.text import template_limits

    scale = 1 if os.environ.get("SHARPI_LONG_TESTS") == "1" else 20
    template_limits.MAX_STEPS //= scale
    template_limits.MAX_MADE //= scale
    with open("/proc/self/statm") as stream:
        now = int(stream.read().split()[0]) * os.sysconf("SC_PAGESIZE")
    most = now + (128 << 20) + 8 * template_limits.MAX_MADE
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (60 + 600 // scale, 60 + 600 // scale))
    for name in sys.argv[1:] or HOSTILE:
        print(f"{name}\t{outcome(HOSTILE[name])}", flush=True)
