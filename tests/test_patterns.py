"""Patterns and the trie: which paths match, what they capture, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statelayer.errors import InvalidPathError
from statelayer.paths import MAX_SEGMENTS
from statelayer.subscriptions import Pattern, PatternTrie

ROOTS = ("tasks", "threads")


def parse(text: str) -> Pattern:
    return Pattern.parse(text, ROOTS)


def segments(path: str) -> tuple[str, ...]:
    return tuple(path[1:].split("/"))


@pytest.mark.parametrize(
    ("pattern", "path", "captures"),
    [
        ("/tasks/T1/stage", "/tasks/T1/stage", {}),
        ("/tasks/*/requests/*", "/tasks/T1/requests/R1", {"taskId": "T1", "requestId": "R1"}),
        ("/tasks/{task}/requests/{r_2}", "/tasks/T1/requests/R1", {"task": "T1", "r_2": "R1"}),
        ("/tasks/*/**", "/tasks/T1/a", {"taskId": "T1"}),
        ("/tasks/*/**", "/tasks/T1/a/b/c", {"taskId": "T1"}),
        ("/tasks/**", "/tasks/T1/a", {}),
        ("/**", "/threads/T/head", {}),
        ("/*/*/requests/*", "/threads/T/requests/R", {"requestId": "R"}),
        ("/{root}/{id}/x", "/tasks/T/x", {"root": "tasks", "id": "T"}),
        ("/threads/*/runs/*", "/threads/C/runs/9", {"threadId": "C", "runId": "9"}),
        ("/tasks/*/deliveries/*", "/tasks/T/deliveries/D", {"taskId": "T", "deliveryId": "D"}),
        ("/tasks/*/agents/*/results/*", "/tasks/T/agents/a/results/E", {"taskId": "T", "agentId": "a", "eventId": "E"}),
        ("/tasks/*/agents/*/errors/*", "/tasks/T/agents/a/errors/E", {"taskId": "T", "agentId": "a", "eventId": "E"}),
        ("/tasks/*/steps/*", "/tasks/T/steps/S", {"taskId": "T", "stepId": "S"}),
        ("/tasks/*/batches/*", "/tasks/T/batches/B", {"taskId": "T", "batchId": "B"}),
        ("/tasks/*/unknown/*", "/tasks/T/unknown/U", {"taskId": "T"}),
    ],
)
def test_a_match_captures(pattern: str, path: str, captures: dict[str, str]) -> None:
    assert parse(pattern).match(segments(path)) == captures
    assert parse(pattern).captures == captures.keys()


@pytest.mark.parametrize(
    ("pattern", "path", "index"),
    [
        ("/tasks/*/requests/*", "/threads/T1/requests/R1", 0),
        ("/tasks/T1/requests/*", "/tasks/T2/requests/R1", 1),
        ("/tasks/*/requests/*", "/tasks/T1/Requests/R1", 2),
        ("/tasks/*/requests/*", "/tasks/T1/requests", 3),
        ("/tasks/*/requests/*", "/tasks/T1/requests/R1/note", 4),
        ("/tasks/*/requests/**", "/tasks/T1/requests", 3),
    ],
)
def test_a_mismatch_names_the_segment(pattern: str, path: str, index: int) -> None:
    assert parse(pattern).mismatch(segments(path)) == index
    assert parse(pattern).match(segments(path)) is None


def test_of_implied_captures_with_one_name_the_first_holds() -> None:
    pattern = parse("/tasks/*/results/*/errors/*")
    assert pattern.match(segments("/tasks/T/results/E1/errors/E2")) == {"taskId": "T", "eventId": "E1"}


def test_a_written_capture_goes_before_an_implied_one() -> None:
    pattern = parse("/tasks/*/parents/{taskId}")
    assert pattern.match(segments("/tasks/T/parents/P")) == {"taskId": "P"}


def test_a_written_segment_named_like_a_known_collection_implies_nothing() -> None:
    assert parse("/tasks/{tasks}/{requests}/*").captures == {"tasks", "requests"}


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("tasks/*/x", "begins with '/'"),
        ("", "begins with '/'"),
        ("/", "segment 1 ('') is empty"),
        ("/tasks//x", "segment 2 ('') is empty"),
        ("/tasks/T/x/", "segment 4 ('') is empty"),
        ("/orders/*/x", "segment 1 ('orders') is not a root"),
        ("/tasks/T/a*b", "segment 3 ('a*b') is a wildcard only in part"),
        ("/tasks/T/***", "segment 3 ('***')"),
        ("/tasks/T/r-{id}", "segment 3 ('r-{id}') is a wildcard only in part"),
        ("/tasks/T/{a}{b}", "segment 3 ('{a}{b}')"),
        ("/tasks/T/{}", "segment 3 ('{}')"),
        ("/tasks/T/{1a}", "segment 3 ('{1a}')"),
        ("/tasks/T/{naïve}", "segment 3 ('{naïve}')"),
        ("/tasks/T/{params.a}", "segment 3 ('{params.a}')"),
        ("/tasks/T/${a}", "segment 3 ('${a}')"),
        ("/tasks/T/$x", "segment 3 ('$x') holds '$'"),
        ("/tasks/../x", "segment 2 ('..')"),
        ("/tasks/T/a b", "segment 3 ('a b') holds ' '"),
        ("/tasks/T/x\n", "segment 3"),
        ("/tasks/T/\ud800", "segment 3"),
        ("/tasks/**/x", "segment 2 ('**') is not the last"),
        ("/tasks/{id}/x/{id}", "segment 4 captures 'id' a second time"),
        ("/tasks/*", "ends at segment 2"),
        ("/*", "ends at segment 1"),
        ("/tasks" + "/*" * 32, "33 segments"),
        ("/tasks" + "/*" * 31 + "/**", "33 segments"),
        ("/tasks/T" + ("/" + "a" * 255) * 4, "bytes"),
    ],
)
def test_a_malformed_pattern_is_refused_naming_the_segment(pattern: str, problem: str) -> None:
    with pytest.raises(InvalidPathError) as refused:
        parse(pattern)
    assert problem in str(refused.value)


@pytest.mark.parametrize("pattern", [None, 7, b"/tasks/*/x", ["tasks"]])
def test_a_pattern_is_text(pattern: object) -> None:
    with pytest.raises(InvalidPathError, match="text"):
        Pattern.parse(pattern, ROOTS)  # type: ignore[arg-type]


def test_without_roots_only_the_form_is_checked() -> None:
    assert Pattern.parse("/orders/*/x").namespace is None


@pytest.mark.parametrize("size", [3, MAX_SEGMENTS])
def test_the_shortest_and_the_longest_path_can_be_named(size: int) -> None:
    pattern = parse("/tasks" + "/*" * (size - 1))
    assert pattern.match(("tasks", *"x" * (size - 1))) == {"taskId": "x"}


@pytest.mark.parametrize(
    ("pattern", "namespace"),
    [
        ("/tasks/T1/**", "/tasks/T1"),
        ("/tasks/T1/a/*", "/tasks/T1"),
        ("/tasks/*/a", None),
        ("/tasks/{id}/a", None),
        ("/*/T1/a", None),
        ("/tasks/**", None),
        ("/**", None),
    ],
)
def test_the_namespace_is_known_when_its_segments_are_literal(pattern: str, namespace: str | None) -> None:
    assert parse(pattern).namespace == namespace


def test_a_pattern_is_its_text() -> None:
    assert parse("/tasks/*/x") == parse("/tasks/*/x")
    assert len({parse("/tasks/*/x"), parse("/tasks/*/x"), parse("/tasks/{a}/x")}) == 2
    assert str(parse("/tasks/*/x")) == "/tasks/*/x"


# --- G7: no backtracking, literals are literal ------------------------------------------------------------------------


class CountingSegments(tuple[str, ...]):
    """Segments that count how often they are looked at."""

    looks = 0

    def __getitem__(self, index: object) -> str:  # type: ignore[override]
        self.looks += 1
        return super().__getitem__(index)  # type: ignore[no-any-return,call-overload]


def test_g7_a_match_looks_at_each_segment_once_and_never_into_it() -> None:
    pattern = parse("/tasks/*" + "/*" * 25 + "/end")
    path = CountingSegments(("tasks", "T", *("a" * 200 for _ in range(25)), "other"))
    assert sum(map(len, path)) > 5_000
    assert pattern.mismatch(path) == 27
    assert path.looks == len(path)


@pytest.mark.parametrize("literal", ["a.c", "(x)+", "[a-z]", "^x", "a|b", "x?", r"\d"])
def test_g7_metacharacters_of_regular_expressions_are_literal(literal: str) -> None:
    pattern = parse(f"/tasks/T/{literal}")
    assert pattern.match(("tasks", "T", literal)) == {}
    assert pattern.match(("tasks", "T", "abc")) is None
    assert pattern.match(("tasks", "T", "x")) is None


# --- the trie ---------------------------------------------------------------------------------------------------------

WORDS = ("tasks", "threads", "a", "b", "requests")
wildcards = st.sampled_from(["*", "{one}"])
pattern_texts = st.builds(
    lambda middle, tail: "/" + "/".join([*middle, *tail]),
    st.lists(st.sampled_from(WORDS) | wildcards, min_size=2, max_size=5),
    st.sampled_from([["**"], ["a"], ["*"]]),
).filter(lambda text: text.count("{one}") < 2)
paths = st.lists(st.sampled_from(WORDS), min_size=1, max_size=8)


@given(st.lists(pattern_texts, max_size=30), st.lists(paths, max_size=10), st.data())
def test_candidates_are_the_patterns_that_match(
    texts: list[str], visited: list[list[str]], data: st.DataObject
) -> None:
    patterns = {index: Pattern.parse(text) for index, text in enumerate(texts)}
    trie: PatternTrie[int] = PatternTrie()
    for index, pattern in patterns.items():
        trie.insert(pattern, index)
    gone = data.draw(st.sets(st.sampled_from(sorted(patterns)))) if patterns else set()
    for index in gone:
        trie.remove(patterns.pop(index), index)
    for path in visited:
        expected = [index for index, pattern in patterns.items() if pattern.match(path) is not None]
        assert sorted(trie.candidates(path)) == expected


@given(pattern_texts, paths)
def test_match_and_mismatch_agree(text: str, path: list[str]) -> None:
    pattern = Pattern.parse(text)
    mismatch = pattern.mismatch(path)
    assert (pattern.match(path) is None) is (mismatch is not None)
    if mismatch is not None:
        assert pattern.mismatch(path[:mismatch]) in {mismatch, None}


def test_an_item_is_inserted_once_and_removed_once() -> None:
    trie: PatternTrie[str] = PatternTrie()
    pattern = parse("/tasks/*/x")
    trie.insert(pattern, "intake")
    trie.insert(pattern, "intake")
    assert trie.candidates(("tasks", "T", "x")) == ["intake"]
    trie.remove(pattern, "intake")
    assert trie.candidates(("tasks", "T", "x")) == []
    with pytest.raises(KeyError):
        trie.remove(pattern, "intake")


def test_an_emptied_trie_holds_nothing() -> None:
    trie: PatternTrie[str] = PatternTrie()
    for text in ("/tasks/*/x", "/tasks/*/x/y", "/tasks/**"):
        trie.insert(parse(text), text)
    for text in ("/tasks/*/x", "/tasks/**", "/tasks/*/x/y"):
        trie.remove(parse(text), text)
    assert trie._root.empty


def test_an_event_visits_no_more_nodes_beside_ten_thousand_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    def visited(count: int) -> int:
        trie: PatternTrie[int] = PatternTrie()
        for index in range(count):
            trie.insert(parse(f"/tasks/*/kind-{index}/*"), index)
        steps = 0
        node_type = type(trie._root)
        step = node_type.step

        def counted(node: object, segment: str) -> object:
            nonlocal steps
            steps += 1
            return step(node, segment)  # type: ignore[arg-type]

        with monkeypatch.context() as patched:
            patched.setattr(node_type, "step", counted)
            assert trie.candidates(("tasks", "T", "kind-0", "x")) == [0]
        return steps

    assert visited(10_000) == visited(1)
