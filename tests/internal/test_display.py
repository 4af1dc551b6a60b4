"""What results show of themselves: one true line, and escaped HTML for notebooks, without changing anything."""

from __future__ import annotations

import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import precast
from precast import report
from precast._internal.display import Card, milliseconds, plural
from tests.support.documents import document


class Read(HTMLParser):
    """The texts and tags of a fragment, every tag closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert not attrs
        self.tags.append(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def shown(value: Any) -> Read:
    return Read(value._repr_html_())


def test_a_card_is_a_line_and_a_table_of_ten_rows() -> None:
    card = Card("What", ["one", "two"], ("a", "b"), [(n, None) for n in range(2000, 2012)])
    assert card.text() == "<What: one, two>"
    read = Read(card.html())
    assert read.texts[:2] == ["What", ": one, two"]
    assert read.tags.count("tr") == 11
    assert "2,000" in read.texts
    assert read.texts[-1] == "and 2 more rows"


@pytest.mark.parametrize("text", ["<script>x</script>", "a & b", '"quoted"', "'</td>'", "<b>"])
def test_what_a_program_calls_its_things_is_text(text: str) -> None:
    read = Read(Card(text, [text], (text,), [(text,)] * 11, text).html())
    assert set(read.tags) <= {"p", "b", "table", "thead", "tbody", "tr", "th", "td"}
    assert "".join(read.texts).count(text) == 14


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (2000, "2,000 steps")]
)
def test_a_number_agrees_with_what_it_counts(count: int, text: str) -> None:
    assert plural(count, "step") == text


def test_times_have_units() -> None:
    assert [milliseconds(t) for t in (0.0, 0.00123, 2.0)] == ["0 ms", "1.23 ms", "2 s"]


# --- each result ---


def stepped(scaler: precast.GradScaler, value: float = 1.0) -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([("the <weight>", parameter)], lr=0.1)
    scaler.scale((parameter * value).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


def test_a_scaler_says_its_scale_and_what_it_skipped() -> None:
    scaler = precast.GradScaler("cpu", init_scale=1024.0)
    assert repr(scaler) == "<GradScaler on cpu: scale 1,024, 0 steps, 0 skipped>"
    stepped(scaler)
    stepped(scaler, math.nan)
    assert repr(scaler) == "<GradScaler on cpu: scale 512, 2 steps, 1 skipped>"
    read = shown(scaler)
    table = read.texts[2:]
    assert table[4:8] == ["1", "1,024", "skipped", "the <weight>"]
    assert table[8:] == ["0", "1,024", "stepped"]


def test_a_scaler_that_is_off_or_searches_says_so() -> None:
    assert repr(precast.GradScaler("cpu", enabled=False)) == "<GradScaler on cpu: off>"
    searching = precast.GradScaler("cpu", init_scale="auto")
    assert repr(searching).endswith("0 skipped, searching for the first scale>")


@pytest.mark.parametrize("scale", [2.0**-14, 1.5, 2.0**24, 3.0e30])
def test_a_scale_is_said_as_it_is(scale: float) -> None:
    text = (
        repr(precast.GradScaler("cpu", init_scale=scale)).split("scale ")[1].split(", 0 steps")[0]
    )
    assert float(text.replace(",", "")) == pytest.approx(scale, rel=1e-5)


def test_displaying_a_scaler_changes_nothing() -> None:
    scaler = precast.GradScaler("cpu", on_diagnosis="ignore")
    stepped(scaler, math.inf)
    before = scaler.state_dict(), scaler.counters, scaler.history
    repr(scaler), shown(scaler)
    assert before == (scaler.state_dict(), scaler.counters, scaler.history)


def test_scalers_of_several_losses_have_a_line_each() -> None:
    scalers = precast.LossScalers("cpu", ["fit", "<penalty>"], init_scale=1024.0)
    assert repr(scalers) == "<LossScalers: 2 losses>"
    texts = shown(scalers).texts
    assert {"fit", "<penalty>"} <= set(texts)
    assert texts.count("scale 1,024") == 2


def test_a_trace_says_what_ran_and_what_casts_cost() -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    with precast.trace(model) as trace:
        empty = repr(trace)
        with precast.autocast("cpu"):
            model(torch.ones(1, 4))
    assert empty.startswith("<Trace: 0 calls in 0 ms, 0 casts in 0 ms")
    totals = trace.totals
    assert repr(trace).startswith(f"<Trace: {totals.calls} calls in ")
    assert f", {totals.casts} casts in " in repr(trace)
    texts = shown(trace).texts
    assert {"0", "linear", "forward", "lower", "bfloat16"} <= set(texts)
    loaded = precast.Trace.from_dict(trace.to_dict())
    assert (repr(loaded), loaded._repr_html_()) == (repr(trace), trace._repr_html_())


def test_a_trace_that_counts_says_so() -> None:
    with precast.trace(full=False) as trace, precast.autocast("cpu"):
        nn.Linear(4, 2)(torch.ones(1, 4))
    assert repr(trace) == "<Trace: 1 call with a rule, 3 casts, only counted>"
    assert {"linear", "lower", "3"} <= set(shown(trace).texts)


def test_a_monitor_names_the_first_offender_and_its_largest_tensors() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        model[1].weight.fill_(1e30)
    with precast.monitor(model) as watched:
        assert repr(watched) == "<Monitor: 0 steps, 0 of them counted>"
        model(torch.full((1, 2), 1e38)).sum().backward()
        watched.end_step()
    assert watched.first is not None
    assert repr(watched) == (
        f"<Monitor: 1 step, 1 of them counted, first {watched.first.what} in step 0: "
        f"{watched.first.kind} of {watched.first.name!r}>"
    )
    read = shown(watched)
    assert read.texts[2:8] == ["tensor", "kind", "largest", "zeros", "infinite", "NaN"]
    assert "0.weight" in read.texts


def test_a_policy_says_how_many_rows_of_each_rule_it_has() -> None:
    policy = precast.Policy.load("default").replace(name="<mine>", modules={"head": "fp32"})
    rows = len(policy.rules("cpu"))
    assert repr(policy).startswith("<Policy '<mine>': ")
    assert f"{rows} rows on cpu" in repr(policy)
    assert repr(policy).endswith("1 rule for modules, mixed dtypes: promote>")
    texts = shown(policy).texts
    assert {"cpu", "cuda", "lower", "fp32"} <= set(texts)
    row = texts[texts.index("cpu", texts.index("device type")) + 1 : texts.index("cuda", 10)]
    assert sum(int(text.replace(",", "")) for text in row) == rows


def test_an_attachment_names_what_is_not_held_and_the_rules_of_its_modules() -> None:
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 2).double()})
    policy = precast.Policy.load("default").replace(modules={"body": "fp32"})
    attachment = precast.attach(model, policy)
    assert repr(attachment) == "<Attachment of ModuleDict: 2 parameters held, 2 left alone>"
    texts = shown(attachment).texts
    assert "fp32, by body" in texts
    assert "head.weight" in texts
    attachment.detach()
    assert repr(attachment) == "<Attachment of ModuleDict: ended>"


def test_a_document_shows_its_verdict_and_is_a_dict_in_all_else(tmp_path: Path) -> None:
    report.save(document(), tmp_path / "run.json")
    loaded = report.load(tmp_path / "run.json")
    texts = shown(loaded).texts
    headline = loaded["summary"]["headline"]  # type: ignore[typeddict-item]
    assert headline.replace("`", "") in "".join(texts)
    assert "`" not in "".join(texts)
    assert type(dict(loaded)) is dict
    assert loaded == dict(loaded)
    assert repr(loaded) == repr(dict(loaded))
    report.save(loaded, tmp_path / "again.json")
    assert report.load(tmp_path / "again.json") == loaded
