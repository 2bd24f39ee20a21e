"""Shell text as words: values as bash makes them, spelling as it was."""

import json
import subprocess

import pytest

from specq.shell_words import LITERAL, joined, quoted, split


def bash(script):
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize(
    "text",
    [
        "a\\ b 'c d'\"e f\" x\"\"y '' a#b \\# # c 'd",
        '"a\\"b\\$c\\d\\\\" \'a\\b\' 1\\2 "a\\\nb"',
        "$'a\\nb\\'c\\\\' $ $\"x\" a=b --o={a}",
        "a \\\n b \\\n\t'c\nd' ",
        "'#' --x='#' x=#y",
        "a=\\\nb 'c'\\\nd\\\n\"e\" f\\\n g\\\n\\\nh",
    ],
)
def test_values_are_those_of_bash(text):
    """Quotes, backslashes, ANSI-C strings, comments and lines that go on, where nothing is expanded."""
    assert "\0".join(split(text)) == bash(f"printf '%s\\0' {text}").rstrip("\0")
    assert split(joined(split(text))) == split(text) and "\n #" not in joined(split(text))


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a;b&&c|d&e>f 2>>g <<<h &>i 2>&1 >&-", "a ; b && c | d & e > f 2>> g <<< h &> i 2>&1 >&-".split()),
        ("(a);{ b; } <(c d) 3", ["(", "a", ")", ";", "{", "b", ";", "}", "<(c d)", "3"]),
        ("$(a \"$(b ')' \\) )\" c)d ${x:-`y z`} `a \\` b`", ["$(a \"$(b ')' \\) )\" c)d", "${x:-`y z`}", "`a \\` b`"]),
        ("x=(1 '2 )' ) y=3 --o={a,b} {1..2}", ["x=(1 '2 )' )", "y=3", "--o={a,b}", "{1..2}"]),
        ("a\nb &\nc\n--d\n| e > f\n(g\nh)\nthen\ni", "a ; b & c --d | e > f ; ( g ; h ) ; then i".split()),
        ("a \\  # why\n b\\\n c \\", ["a", "b", "c"]),
        ("# x\na \\\n  # it's\n b # 'y\nc", ["a", "b", ";", "c"]),
    ],
)
def test_operators_substitutions_and_lines(text, values):
    """A substitution is one word with what stands in it; joined again the words are the same."""
    assert split(text) == values and split(joined(split(text))) == values
    assert [w.operator for w in split(joined(split(text)))] == [w.operator for w in split(text)]


def test_a_word_over_two_lines_is_one():
    """As in bash, and spelt in one line; a pasted option or comment on the next line is none of it."""
    assert [w.raw for w in split("HF_TOKEN=\\\n'a b'\\\nc d\\\n--e\\\n#f\\\n")] == ["HF_TOKEN='a b'c", "d", "--e"]


@pytest.mark.parametrize(
    "text", ["a$X", '"$X"b', "$X\"b\"'$X'", "'$X'$X", '"\\$X$X"', "\\$X${X}", "$X\\b$'$X'", '$"$X"b']
)
def test_what_does_not_expand_is_marked(text):
    """A word respelt from its marked value is what bash makes of the word itself."""
    (word,) = split(text)
    assert bash(f"X=1; printf %s {quoted(word.marked)}") == bash(f"X=1; printf %s {text}")
    assert "X=" not in word and LITERAL not in word + quoted(word.marked)


def test_a_quoted_operator_is_none():
    assert [w.operator for w in split("a '&&' \\; \"|\" ;")] == [False, False, False, False, True]


@pytest.mark.parametrize(
    "word", ["a b", "it's", 'x"y', "`id`", "$(id)", "a;b", "", "${x", '{"a": "b\\n"}', "!x", "*", "A=$(id) $M"]
)
def test_words_that_are_made_are_quoted(word):
    """What bash makes of a quoted word is that word."""
    assert bash(f"M=1; printf %s {quoted(word)}") == word and split(quoted(word)) == [word]


def test_variables_of_words_that_are_made_are_expanded():
    made = json.dumps({"a": "$M/\\", "b": "${M}'"})
    assert bash(f"M='m 1'; printf %s {quoted(made)}") == json.dumps({"a": "m 1/\\", "b": "m 1'"})
    assert split(quoted(made)) == [made] and quoted("$M/x") == "$M/x" and quoted("A=$M,b") == "A=$M,b"
    assert quoted("A=$M b") == 'A="$M b"' and quoted("--o=a b") == "--o='a b'" and quoted("A=") == "A="


@pytest.mark.parametrize("text", ["'a", '"a', "$(a", "${a", "`a", "$'a", '"$(a"', "x=(a", "$(" * 100_000])
def test_what_is_not_closed_is_refused(text):
    with pytest.raises(ValueError, match="no closing"):
        split(text)
