"""Words of shell scripts: quotes, variables, lists, arithmetic."""

from pathlib import Path

import pytest

from areal.importers.script import script_words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A=1; B=$A x.y=$B", ["x.y=1"]),
        ("export A=1 B=2; x.y=${A}$B", ["x.y=12"]),
        ("x.y=1 \\\n  x.z=2\n", ["x.y=1", "x.z=2"]),
        ("x.y=1 # don't\nx.z=a#b", ["x.y=1", "x.z=a#b"]),
        ('D=${R:-"/v"}; P=${Q:-"$D/${E:-exp}"}; x.y=$P', ["x.y=/v/exp"]),
        ("x.y='${data.n}' x.z=\"\\${data.n}\"", ["x.y=${data.n}", "x.z=${data.n}"]),
        ("x.y=\"['$A', 'b']\" x.z=['a','b']", ["x.y=['$A', 'b']", "x.z=[a,b]"]),
        ("N=2; x.y=$((N * ${N} / 3)) x.z=$(((N + 1) * $N)) u.v=$((U + 1))", ["x.y=1", "x.z=6", "u.v=$((U + 1))"]),
        ('L=(x.y=1 # one\n "x.z=a b")\nL+=(u.v=3)\nrun "${L[@]}" "$@"', ["x.y=1", "x.z=a b", "u.v=3"]),
        ("UNUSED=(x.y=1)\nrun x.z=2", ["x.z=2"]),
        ('C="\n x.y=1\n x.z=2\n"\nrun $C', ["x.y=1", "x.z=2"]),
        ('E=; run $E x.y=1 "$E" x.z=${E:-7}', ["x.y=1", "x.z=7"]),
        ("cat <<EOF > f\nit's x.y=9\nEOF\nx.z=1", ["x.z=1"]),
        ("x.y=${M##*/} x.z=x_$(date '+%Y %m') u.v=`date`", ["x.y=$M##*/", "x.z=x_$(date '+%Y %m')", "u.v=`date`"]),
        ("if [ $# -lt 2 ]; then x.y=$1; fi 2>&1 | tee a.log", ["x.y=$1"]),
        ("x.y=$HOME/d ~/x.z=1", [f"x.y={Path.home()}/d"]),
        (
            "A=1 model_engine=megatron x.y=$A\nE=(model_engine=dp)\nrun ${E[@]}",
            ["model_engine=megatron", "x.y=1", "model_engine=dp"],
        ),
    ],
)
def test_words_are_those_of_a_shell(text, words):
    assert list(script_words(text)) == words


@pytest.mark.parametrize("text", ["x.y='a", 'x.y="a', "x.y=${A", "x.y=`a"])
def test_an_open_quote_or_bracket_is_an_error(text):
    with pytest.raises(ValueError, match="is not closed"):
        list(script_words(text))
