"""Pages of the site that are made when it is built: the home page, the changelog, and every flag of the command.

    README.md       -> index.md
    CHANGELOG.md    -> changelog.md
    CONTRIBUTING.md -> contributing.md
    the typer app   -> command.md, where its marker stands
    the notebook    -> a file beside them

Written once, so that they cannot differ from what they are made from. Links are rewritten to fit: on GitHub the README
points to docs/, and pages to ../README.md, which here is the home page. And what Markdown cannot say: which page is as
wide as its table, which pages the search shows first, where long names in tables may break, and where numbers may not.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from flatmin_lab.cli.app import app

ROOT = Path(__file__).parents[2]
MADE = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
NOTEBOOK = "examples/quick_start.ipynb"  # a file to download
ELSEWHERE = r"\[([^\]]+)\]\(CITATION\.cff\)"  # not a page: its name is enough
OF_THE_SITE = r" *`make docs`\s+builds[^`]*`site/index\.html`\."  # its reader has it
WIDE = {"compared.md"}  # a table of seven columns needs the place of the table of contents
BOOST = {"choosing_epsilon.md": 8}  # in the search: "epsilon" is a word of many pages, and this is the one about it
JOINED = r"(?<=\d) (?=[%±])|(?<=%) (?=±)|(?<=±) |(?<=\b[nNεζ]) (?==)|(?<=\b[nNεζ] =) "  # spaces amid a number
IN_TABLE = re.compile(r"(?<=<code>)[^<]{15,}(?=</code>)")
KINDS = {str: "TEXT", int: "INT", float: "NUMBER", Path: "PATH"}
MARKER = "<!-- every subcommand with its flags stands here when the site is built -->"


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    for page, source in MADE.items():
        text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
        text = re.sub(OF_THE_SITE, "", re.sub(ELSEWHERE, r"`\1`", text))
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, NOTEBOOK, abs_src_path=str(ROOT / NOTEBOOK)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    for made, source in MADE.items():
        markdown = re.sub(rf"\]\((\.\./)*{re.escape(source)}", f"]({made}", markdown)
    markdown = markdown.replace(f"](../{NOTEBOOK}", f"]({NOTEBOOK}")
    markdown = markdown.replace("[README](index.md", "[home page](index.md")
    if page.file.src_uri in WIDE:
        page.meta["hide"] = ["toc"]
    if page.file.src_uri in BOOST:
        page.meta["search"] = {"boost": BOOST[page.file.src_uri]}
    return markdown.replace(MARKER, "\n".join(commands(app))) if MARKER in markdown else markdown


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    html = re.sub(
        r"<td.*?</td>", lambda cell: IN_TABLE.sub(lambda name: breakable(name[0]), cell[0]), html, flags=re.DOTALL
    )
    return unbroken(html)


def unbroken(html: str) -> str:
    """A number stays on one line with its name, its ± and its %; what a code block shows is left as it is.

    >>> unbroken("<p>8.5 % ± 1.7</p><pre>8.5 % ± 1.7</pre>").replace("\N{NO-BREAK SPACE}", "~")
    '<p>8.5~%~±~1.7</p><pre>8.5 % ± 1.7</pre>'
    """
    parts = re.split(r"(<pre.*?</pre>)", html, flags=re.DOTALL)
    parts[::2] = [re.sub(JOINED, "\N{NO-BREAK SPACE}", part) for part in parts[::2]]
    return "".join(parts)


def breakable(name: str) -> str:
    """Where a long name may break, if its column is narrow: where its words end, not amid letters.

    >>> breakable("test_a_zero_gradient")
    'test_<wbr>a_<wbr>zero_<wbr>gradient'
    """
    return re.sub(r"(?<=\w)([_.(,=/]+)(?=[\w&])", r"\1<wbr>", name)


def commands(command_line: typer.Typer) -> Iterator[str]:
    """Every subcommand: what it does, its arguments, and its flags panel by panel."""
    group: Any = typer.main.get_command(command_line)
    for name, command in group.commands.items():
        arguments = [param for param in command.params if param.param_type_name == "argument"]
        words = "".join(f" [{param.name.upper()}{' …' if param.nargs < 0 else ''}]" for param in arguments)
        yield f"\n## flatmin {name}\n\n{_escaped(command.help)}\n\n```text\nflatmin {name}{words} [flags]\n```\n"
        for param in arguments:
            yield f"`{param.name.upper()}`: {_escaped(param.help)}\n"
        panels, hints = defaultdict(list), get_type_hints(command.callback)
        for param in command.params:
            if param.param_type_name == "option" and not param.hidden:
                panels[param.rich_help_panel or "Flags"].append(param)
        for title, params in panels.items():
            yield f"\n| {title} | |\n|---|---|"
            yield from (f"| {_flag(param, hints[param.name])} | {_what(param)} |" for param in params)
            yield ""


def _flag(param: Any, annotation: Any) -> str:
    """Its names, and what it takes: read from the function's signature, which is the same in every version of typer."""
    kinds = [kind for kind in (get_args(annotation) or [annotation]) if kind is not type(None)]
    kinds = [kind for given in kinds for kind in (get_args(given) or [given])]  # a list or a pair of something
    takes = "" if param.is_flag else " " + " ".join(KINDS[kind] for kind in kinds)
    return ", ".join(f'<code class="flag">{name}</code>' for name in [*param.opts, *param.secondary_opts]) + takes


def _what(param: Any) -> str:
    shown = not param.is_flag and param.default is not None and param.show_default
    return _escaped(param.help or "") + (f" Default: `{param.default}`." if shown else "")


def _escaped(text: str) -> str:
    """Help is plain text: nothing in it is Markdown."""
    return re.sub(r"([\\`*_{}\[\]<>|])", r"\\\1", " ".join(text.split()))
