"""Whatever stands in params.yaml, it is read or refused, in one line that a terminal can show."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from conftest import ROOT
from generated import TREES, changed, refusal
from samebits.params import load_params, parse_params

DEFAULT = YAML(typ="safe").load((ROOT / "params.yaml").read_text())


@given(TREES | changed(DEFAULT))
@settings(max_examples=400)
def test_a_tree_is_params_or_refused(tree):
    if line := refusal(lambda: parse_params(tree)):
        assert line.isprintable()
        assert " hint: " in line
    else:
        params = parse_params(tree)
        assert parse_params(json.loads(params.model_dump_json())) == params


@given(st.text(max_size=60) | st.binary(max_size=60) | TREES.map(json.dumps) | changed(DEFAULT).map(json.dumps))
@settings(max_examples=200)
def test_a_file_is_params_or_refused(tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "generated.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode(errors="surrogatepass"))
    line = refusal(lambda: load_params(file))
    assert line == "" or (line.isprintable() and file.name in line)
