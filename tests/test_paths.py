"""Addresses: what is one, what is refused, and how foreign ids and templates become one."""

from __future__ import annotations

import unicodedata
from enum import StrEnum

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from statelayer.errors import InvalidPathError
from statelayer.paths import (
    COLLECTION_CAPTURES,
    MAX_PATH_BYTES,
    MAX_SEGMENT_BYTES,
    MAX_SEGMENTS,
    Template,
    check_segment,
    decode_segment,
    encode_segment,
    parse,
    parse_namespace,
    reserved,
)

thorough = settings(deadline=None, max_examples=300)

NFC_E = "\u00e9"
NFD_E = "e\u0301"

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60)
awkward = st.text(
    st.sampled_from("aé\u0301\u0323~/.*{}$ %2F\u200b\u212b가\u1100\u1161\u09be😀\n\0"), min_size=1, max_size=25
)


def breaks_a_rule(segment: str) -> bool:
    """The rules of DESIGN §5 once more, without the module's short cuts."""
    kinds = {unicodedata.category(character) for character in segment}
    return (
        segment in {"", ".", ".."}
        or len(segment.encode("utf-8", "surrogatepass")) > 255
        or unicodedata.normalize("NFC", segment) != segment
        or bool(kinds & {"Cc", "Cf", "Cs", "Zs", "Zl", "Zp"})
        or any(character.isspace() or character in "/*{}$" for character in segment)
    )


def refusal(text: object) -> str:
    with pytest.raises(InvalidPathError) as caught:
        parse(text)
    return str(caught.value)


def test_a_path_knows_its_root_namespace_and_relative_part() -> None:
    path = parse("/tasks/T1/stage/reviewed")
    assert (path.root, path.namespace, path.relative) == ("tasks", "/tasks/T1", "stage/reviewed")
    assert path.segments == ("tasks", "T1", "stage", "reviewed")
    assert str(path) == path.text == "/tasks/T1/stage/reviewed"


@thorough
@given(st.lists(texts.map(lambda text: encode_segment(text[:20])), min_size=2, max_size=10))
def test_any_path_of_valid_segments_is_itself(segments: list[str]) -> None:
    text = "/" + "/".join(["tasks", *segments])
    if len(text.encode()) <= MAX_PATH_BYTES:
        path = parse(text)
        assert path.text == text
        assert path.segments == ("tasks", *segments)
        assert parse(str(path)) == path


@thorough
@given(st.one_of(texts, awkward, st.text(max_size=5)))
@example("a" * 256)
@example("\u00e9" * 128)
@example("...")
@example("a..")
@example("\ud800")
@example("\u2028")
def test_f2_h4_segments_are_judged_by_the_written_rules(segment: str) -> None:
    if breaks_a_rule(segment):
        with pytest.raises(InvalidPathError):
            check_segment(segment)
    else:
        assert check_segment(segment) == segment
        assert parse(f"/tasks/T1/{segment}").relative == segment


def test_every_ascii_character_is_judged_alike_by_the_fast_and_the_careful_way() -> None:
    for code in range(128):
        for segment in (chr(code), f"a{chr(code)}b"):
            accepted = []
            for probe in (segment, segment + NFC_E):  # the second leaves the fast way
                try:
                    accepted.append(check_segment(probe) == probe)
                except InvalidPathError:
                    accepted.append(False)
            assert accepted[0] == (not breaks_a_rule(segment)), segment
            assert accepted[1] == (not breaks_a_rule(segment + NFC_E)), segment


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/",
        "tasks/T/x",
        "/tasks",
        "/tasks/T",
        "/tasks/T/",
        "/tasks//x",
        "//tasks/T/x",
        "/tasks/T/x/",
        "/tasks/T/x\n",
    ],
)
def test_h4_a_path_has_one_spelling(text: str) -> None:
    refusal(text)


@pytest.mark.parametrize("path", ["/tasks/*/x", "/tasks/T/**", "/tasks/T/a*b", "/tasks/T/*"])
def test_h1_wildcards_are_no_addresses(path: str) -> None:
    assert "Wildcards belong in patterns" in refusal(path)


@pytest.mark.parametrize(
    ("path", "segment"),
    [
        ("/tasks/T/../U", "segment 3 ('..')"),
        ("/tasks/./x", "segment 2 ('.')"),
        ("/tasks/ T/x", "segment 2 (' T')"),
        ("/tasks/T/x\t/y", r"segment 3 ('x\t')"),
        ("/tasks/T/a\0b", r"segment 3 ('a\x00b')"),
        ("/tasks/T/a\u200bb", r"segment 3 ('a\u200bb')"),
        ("/tasks/T/{x}", "segment 3 ('{x}')"),
        ("/tasks/T/\ud800", r"segment 3 ('\ud800')"),
        (f"/tasks/T/{NFD_E}", "segment 3"),
        ("/other/T/x", "segment 1 ('other')"),
        ("/Tasks/T/x", "segment 1 ('Tasks')"),
    ],
)
def test_f2_h3_h4_a_refusal_names_the_segment(path: str, segment: str) -> None:
    message = refusal(path)
    assert segment in message
    assert message.encode()  # can be logged, whatever the path held


@pytest.mark.parametrize("path", [None, True, 5, b"/tasks/T/x", ["/tasks/T/x"], {10**5000}])
def test_h5_only_text_is_a_path(path: object) -> None:
    assert "not text" in refusal(path)
    for check in (parse_namespace, check_segment, encode_segment, decode_segment, Template.parse):
        with pytest.raises(InvalidPathError, match="not text"):
            check(path)  # type: ignore[arg-type]


def test_a_str_subclass_becomes_plain_text() -> None:
    class Place(StrEnum):
        STATUS = "/tasks/T/status"

        def __str__(self) -> str:
            return "/tasks/other/status"

    path = parse(Place.STATUS)
    assert type(path.text) is str
    assert path.text == "/tasks/T/status"


def test_h4_percent_signs_and_case_are_kept() -> None:
    assert parse("/tasks/%2F/x").segments[1] == "%2F"
    assert parse("/tasks/t/x") != parse("/tasks/T/x")
    assert parse(f"/tasks/{NFC_E}/客户").segments[1:] == (NFC_E, "客户")


def test_lengths_are_limited_in_bytes_and_segments() -> None:
    full = "/tasks/T1" + "/x" * (MAX_SEGMENTS - 2)
    assert len(parse(full).segments) == MAX_SEGMENTS
    assert f"{MAX_SEGMENTS + 1} segments" in refusal(full + "/x")

    longest = "/tasks" + ("/" + "s" * 254) * 3 + "/" + "s" * 252
    assert len(parse(longest).text) == MAX_PATH_BYTES
    assert f"{MAX_PATH_BYTES + 1} bytes" in refusal(longest + "s")
    assert f"{MAX_PATH_BYTES + 1} bytes" in refusal(longest[:-1] + NFC_E)

    assert check_segment("s" * MAX_SEGMENT_BYTES)
    for segment in ("s" * (MAX_SEGMENT_BYTES + 1), NFC_E * 128):
        assert "256 bytes" in refusal(f"/tasks/T/{segment}")


def test_a_huge_path_makes_a_short_message() -> None:
    assert len(refusal("/tasks/T/" + "x" * 1_000_000)) < 400


def test_roots_are_configured() -> None:
    assert parse("/orders/O1/x", ["orders"]).root == "orders"
    with pytest.raises(InvalidPathError, match="Begin with one of: /orders"):
        parse("/tasks/T/x", ["orders"])
    with pytest.raises(InvalidPathError, match="Begin with one of: /orders"):
        parse_namespace("/tasks/T", ["orders"])


def test_a_namespace_has_exactly_two_segments() -> None:
    assert parse_namespace("/tasks/T1") == "/tasks/T1"
    for text in ("/tasks", "/tasks/T1/x", "/tasks/", "/tasks/T1/", "/tasks/*", "/other/T1", "tasks/T1", ""):
        with pytest.raises(InvalidPathError):
            parse_namespace(text)


# --- foreign ids ------------------------------------------------------------------------------------------------------


@thorough
@given(st.one_of(texts, awkward))
@example(".")
@example("..")
@example("~2F")
@example("~")
@example(NFD_E)
@example("\u212b\u0301")
@example("a\u0301\u0323")
@example("\u1100\u1161\u11a8")
@example("\u0301")
def test_h3_a_foreign_id_becomes_one_segment_and_comes_back(text: str) -> None:
    try:
        segment = encode_segment(text)
    except InvalidPathError:
        assert len(text.encode()) * 3 > MAX_SEGMENT_BYTES
        return
    assert check_segment(segment) == segment
    assert decode_segment(segment) == text


@thorough
@given(st.text(st.sampled_from("ab~27EF./"), max_size=12))
def test_a_segment_decodes_only_if_it_is_what_its_text_encodes_to(segment: str) -> None:
    try:
        text = decode_segment(segment)
    except InvalidPathError:
        return
    assert encode_segment(text) == segment


@pytest.mark.parametrize(
    ("text", "segment"),
    [
        ("INV-1_a.b:c@d%2F", "INV-1_a.b:c@d%2F"),
        ("客户-é", "客户-é"),
        ("INV/1 a", "INV~2F1~20a"),
        ("../U", "..~2FU"),
        (".", "~2E"),
        ("..", "~2E~2E"),
        ("...", "..."),
        ("a~b", "a~7Eb"),
        (NFD_E, "e~CC~81"),
        ("\u212b", "~E2~84~AB"),
        ("a\u200bb", "a~E2~80~8Bb"),
    ],
)
def test_h3_h4_ids_stay_readable(text: str, segment: str) -> None:
    assert encode_segment(text) == segment


@pytest.mark.parametrize(
    "segment", ["~", "~2", "~2f", "~41", "~C3", "~ED~A0~80", "a~b", "~2E.", "~2E~", "a/b", "~" * 255]
)
def test_no_two_segments_decode_to_one_id(segment: str) -> None:
    with pytest.raises(InvalidPathError):
        decode_segment(segment)


@pytest.mark.parametrize("text", ["", "\ud800", "a\udfffb"])
def test_f2_what_is_no_text_has_no_segment(text: str) -> None:
    with pytest.raises(InvalidPathError):
        encode_segment(text)


def test_an_encoded_id_must_fit_one_segment() -> None:
    assert len(encode_segment("/" * 85)) == MAX_SEGMENT_BYTES
    for text in ("/" * 86, "x" * 256, NFC_E * 128, "x" * 1_000_000):
        with pytest.raises(InvalidPathError, match="255 fit"):
            encode_segment(text)


# --- templates --------------------------------------------------------------------------------------------------------


def test_a_template_renders_whole_segments() -> None:
    template = Template.parse("/tasks/{taskId}/agents/{agentId}/results/{params.eventId}")
    assert template.names == {"taskId", "agentId", "params.eventId"}
    path = template.render({"taskId": "T1", "agentId": "a", "params.eventId": "E", "unused": "/"})
    assert path == parse("/tasks/T1/agents/a/results/E")


def test_the_dollar_syntax_renders_the_same_way() -> None:
    template = Template.parse("/tasks/${taskId}/deliveries/${deliveryId}", "${}")
    assert template.render({"taskId": "T1", "deliveryId": "D1"}).text == "/tasks/T1/deliveries/D1"


@pytest.mark.parametrize(
    "id", ["a/b", "../U/requests/1", ".", "..", "", " x", "x\n", "*", "**", "{x}", "${x}", "\0", NFD_E]
)
def test_h1_h3_no_rendered_id_leaves_its_segment(id: str) -> None:
    for text, syntax in (("/tasks/T/x/{id}", "{}"), ("/tasks/${id}/x", "${}")):
        template = Template.parse(text, syntax)  # type: ignore[arg-type]
        with pytest.raises(InvalidPathError, match="'id' is not exactly one segment"):
            template.render({"id": id})


@pytest.mark.parametrize("value", [None, True, 7, ["a"]])
def test_h5_a_rendered_id_is_text(value: object) -> None:
    with pytest.raises(InvalidPathError, match="not text"):
        Template.parse("/tasks/{id}/x").render({"id": value})  # type: ignore[dict-item]


@thorough
@given(awkward, texts)
def test_h3_rendering_never_leaves_the_namespace(first: str, second: str) -> None:
    template = Template.parse("/tasks/T1/x/{first}/{second}")
    try:
        path = template.render({"first": first, "second": second})
    except InvalidPathError:
        return
    assert path.segments == ("tasks", "T1", "x", first, second)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(InvalidPathError, match=r"'taskID'.*Known names: eventId, taskId\."):
        Template.parse("/tasks/{taskID}/x").render({"taskId": "T", "eventId": "E"})


def test_a_rendered_path_obeys_the_limit_in_bytes() -> None:
    names = "abcde"
    template = Template.parse("/tasks/" + "/".join(f"{{{name}}}" for name in names))
    with pytest.raises(InvalidPathError, match="bytes"):
        template.render(dict.fromkeys(names, "x" * 250))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("/tasks/{taskId/x", "unbalanced"),
        ("/tasks/taskId}/x", "unbalanced"),
        ("/tasks/{}/x", "not a placeholder"),
        ("/tasks/{1a}/x", "not a placeholder"),
        ("/tasks/{a..b}/x", "not a placeholder"),
        ("/tasks/{a.}/x", "not a placeholder"),
        ("/tasks/{a-b}/x", "not a placeholder"),
        ("/tasks/{é}/x", "not a placeholder"),
        ("/tasks/{a}\n/x", "mixes"),
        ("/tasks/T-{a}/x", "mixes"),
        ("/tasks/{a}{b}/x", "mixes"),
        ("/tasks/${a}/x", "other template syntax. Write {name}"),
        ("/tasks/{a}/*", "Wildcards"),
        ("/tasks/{a}/**", "Wildcards"),
        ("/tasks/{a}/ x", "holds ' '"),
        ("/tasks/{a}", "2 segments"),
        ("/tasks/{a}/", "is empty"),
        ("tasks/{a}/x", "does not begin"),
        ("/{root}/T/x", "not a root"),
        ("/task/{a}/x", "not a root"),
    ],
)
def test_a_malformed_template_is_refused_when_it_is_parsed(text: str, problem: str) -> None:
    with pytest.raises(InvalidPathError) as caught:
        Template.parse(text)
    assert problem in str(caught.value)


def test_the_dollar_syntax_refuses_bare_braces() -> None:
    for text in ("/tasks/{a}/x", "/tasks/$a/x", "/tasks/$/x", "/tasks/${a/x", "/tasks/x${a}/x"):
        with pytest.raises(InvalidPathError):
            Template.parse(text, "${}")


@pytest.mark.parametrize(
    ("one", "other", "collides"),
    [
        ("/tasks/{a}/x/{b}", "/tasks/{c}/x/{d}", True),
        ("/tasks/{a}/x/{b}", "/tasks/{a}/y/{b}", False),
        ("/tasks/{a}/x/y", "/tasks/{a}/x/{b}", True),
        ("/tasks/T1/x", "/tasks/T1/x", True),
        ("/tasks/T1/x", "/tasks/T2/x", False),
        ("/tasks/{a}/x", "/tasks/{a}/x/y", False),
        ("/tasks/{a}/{b}/y", "/tasks/{a}/x/{b}", True),
    ],
)
def test_collisions_are_told_segment_by_segment(one: str, other: str, *, collides: bool) -> None:
    assert Template.parse(one).may_collide(Template.parse(other)) is collides
    assert Template.parse(other).may_collide(Template.parse(one)) is collides


def test_templates_of_both_syntaxes_may_collide() -> None:
    assert Template.parse("/tasks/{a}/x").may_collide(Template.parse("/tasks/${b}/x", "${}"))


# --- who may write ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/tasks/T/agents/a/results/E",
        "/tasks/T/agents/a/errors/E",
        "/tasks/T/agents/a/steps/E/s",
        "/tasks/T/agents/a/interrupts/I",
        "/tasks/T/agents/a/interrupts/I/state",
        "/tasks/T/agents/a/interrupts/I/answer/x",
        "/tasks/T/agents/a/interrupts/answer",
        "/tasks/T/agents/a/results/I/answer",
        "/tasks/T/workflows/w/results/E",
        "/tasks/T/workflows/w/interrupts/I",
        "/tasks/T/executors/mail/t/results/E",
        "/tasks/T/executors/mail/t/interrupts/I",
        "/tasks/T/steps/s",
        "/tasks/T/batches/b/item",
        "/tasks/T/decisions/E",
        "/tasks/T/decision",
        "/threads/H/agents/a/results/E",
        "/threads/H/head",
        "/threads/H/runs/R",
        "/threads/H/state/thread/k",
        "/threads/H/state/interrupts/I/answer",
    ],
)
def test_owners_alone_write_here(path: str) -> None:
    assert reserved(parse(path))


@pytest.mark.parametrize(
    "path",
    [
        "/tasks/T/agents/a/interrupts/I/answer",
        "/tasks/T/workflows/w/interrupts/I/answer",
        "/tasks/T/executors/mail/t/interrupts/I/answer",
        "/threads/H/agents/a/interrupts/I/answer",
        "/tasks/T/agents/a",
        "/tasks/T/agents/a/profile",
        "/tasks/T/agents/results/x",
        "/tasks/T/agents/a/b/results/x",
        "/tasks/T/executors/mail/results/x",
        "/tasks/T/requests/results",
        "/tasks/T/requests/R/results/x",
        "/tasks/T/steps",
        "/tasks/T/decision/x",
        "/tasks/T/head",
        "/tasks/T/runs/R",
        "/tasks/T/state/k",
        "/threads/H/head/x",
        "/threads/H/topic",
    ],
)
def test_everybody_may_write_here(path: str) -> None:
    assert not reserved(parse(path))


def test_captures_cannot_be_changed() -> None:
    assert COLLECTION_CAPTURES["results"] == COLLECTION_CAPTURES["errors"] == "eventId"
    with pytest.raises(TypeError):
        COLLECTION_CAPTURES["tasks"] = "x"  # type: ignore[index]
