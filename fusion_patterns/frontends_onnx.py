"""ONNX files: made static and plain with ONNX's own tools, then handed to TVM's importer.

In order, all in memory:

1. the dimensions that were asked for are written into the graph's inputs;
2. ``Dropout(x)`` -> ``x`` and ``Sum(a, b, c)`` -> ``Add(Add(a, b), c)``: the importer keeps a dropout that
   no layout pass can take, and makes a stack of all terms out of a sum;
3. onnxruntime's basic level folds constants and shape arithmetic. Its fusions of batch norm and the like
   into convolutions stay off: :mod:`fusion_patterns.normalise.inference_form` does them for every format alike;
4. ``Upsample`` and the first form of ``Resize`` become the present ``Resize``, which alone the importer reads
   rightly: it takes their corners for centres;
5. TVM imports; weights are constants.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tvm

from fusion_patterns.errors import ModelError
from fusion_patterns.frontends import Shapes, check_name, check_shape, first_line, need, quiet

_LARGE = 1 << 16  # bytes from which on a tensor is a weight, which takes no part in shape arithmetic
_NOT_OURS_TO_FUSE = [
    "ConvAddFusion",
    "ConvBNFusion",
    "ConvMulFusion",
    "GemmActivationFusion",
    "MatMulAddFusion",
    "MatMulBNFusion",
]


def read(path: Path, shapes: Shapes, bind: Mapping[str, int]) -> tvm.IRModule:
    """Import the ONNX file *path*; see :func:`fusion_patterns.frontends.load_model`."""
    onnx = need("onnx", "onnx", str(path))
    try:
        model = onnx.load(str(path))
    except Exception as error:
        if "should be stored in" in str(error):
            raise ModelError(f"{path}: its weights lie in another file, which is missing") from error
        raise ModelError(f"{path}: can't be read as ONNX ({first_line(error)}); cut short?") from error
    return import_model(model, shapes, bind, where=str(path))


def import_model(
    model: Any, shapes: Shapes | None = None, bind: Mapping[str, int] | None = None, *, where: str = "model"
) -> tvm.IRModule:
    """Import an ``onnx.ModelProto``, which is left as it is.

    Raises :class:`ModelError`, each of one line that starts with *where*.
    """
    if not model.graph.node:
        raise ModelError(f"{where}: is no ONNX model, or its graph is empty")
    fixed = type(model)()
    fixed.CopyFrom(model)
    _fix_inputs(fixed, dict(shapes or {}), dict(bind or {}), where)
    _plain_ops(fixed)
    folded = _fold(fixed, where)
    _plain_resizes(folded)
    return _import(folded, where)


def inputs(model: Any) -> dict[str, list[int | str]]:
    """Name -> dimensions of each input that is no weight; an open one is a string, ``?`` without a name."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return {
        info.name: [_dimension(dim) for dim in info.type.tensor_type.shape.dim]
        for info in model.graph.input
        if info.name not in weights
    }


def _dimension(dim: Any) -> int | str:
    return int(dim.dim_value) if dim.dim_value > 0 else str(dim.dim_param or "?")


def _fix_inputs(model: Any, shapes: dict[str, Sequence[int | str]], bind: dict[str, int], where: str) -> None:
    """Write *shapes* and *bind* into the graph's inputs; what stays open may only be a leading batch."""
    _name_batches(model)
    held = inputs(model)
    for name in shapes:
        check_name(name, held, "input", where)
    shapes = {name: list(wanted) for name, wanted in shapes.items()}
    said = [*held.values(), *shapes.values()]
    symbols = {dim for dims in said for dim in dims if isinstance(dim, str) and dim != "?"}
    for name in bind:
        check_name(name, symbols, "symbolic dimension", where)
    shapes = {name: [bind.get(str(dim), dim) for dim in wanted] for name, wanted in shapes.items()}

    infos = {info.name: info.type.tensor_type for info in model.graph.input}
    for name, wanted in shapes.items():
        if infos[name].HasField("shape"):
            check_shape(name, held[name], wanted, where)
            # One symbol may stand in several inputs.
            bind |= {
                h: w
                for h, w in zip(held[name], wanted, strict=True)
                if isinstance(h, str) and h != "?" and isinstance(w, int) and h not in bind
            }
        infos[name].ClearField("shape")
        for size in wanted:
            _set_dimension(infos[name].shape.dim.add(), size)
    still_open = []
    for name in held.keys() - shapes.keys():
        for dim in infos[name].shape.dim:
            if _dimension(dim) in bind:
                _set_dimension(dim, bind[str(_dimension(dim))])
        dims = [_dimension(dim) for dim in infos[name].shape.dim]
        if not infos[name].HasField("shape") or any(map(_is_open, dims[1:])):
            still_open.append((name, dims))
    if still_open:
        told = ", ".join(f"{name} ({' x '.join(map(str, dims)) or 'any rank'})" for name, dims in still_open)
        example = f"--shape {still_open[0][0]}={_example(still_open[0][1])}"
        raise ModelError(f"{where}: the file leaves open the shape of {told}; say for instance {example}")
    # What the file says of the values in between was true for its own shapes only.
    del model.graph.value_info[:]
    for info in model.graph.output:
        info.type.tensor_type.ClearField("shape")


def _name_batches(model: Any) -> None:
    """Call ``batch`` what inputs have as an open first dimension without a name."""
    held = inputs(model)
    for info in model.graph.input:
        if held.get(info.name, [0])[:1] == ["?"]:
            _set_dimension(info.type.tensor_type.shape.dim[0], "batch")


def _is_open(dim: int | str) -> bool:
    return isinstance(dim, str)


def _set_dimension(dim: Any, size: int | str) -> None:
    dim.Clear()
    if isinstance(size, int):
        dim.dim_value = size
    else:
        dim.dim_param = size


def _example(dims: Sequence[int | str]) -> str:
    guess = [1, 3, 224, 224]
    shown = zip(dims or guess, guess, strict=False)
    return ",".join(str(dim if isinstance(dim, int) else usual) for dim, usual in shown)


def _plain_ops(model: Any) -> None:
    """Rewrite the operators that TVM's importer takes badly, in place."""
    from onnx import helper

    nodes = []
    for node in model.graph.node:
        if node.op_type == "Dropout" and node.domain in ("", "ai.onnx"):
            nodes.append(helper.make_node("Identity", node.input[:1], node.output[:1], name=node.name))
        elif node.op_type == "Sum" and node.domain in ("", "ai.onnx") and len(node.input) > 1:
            total = node.input[0]
            for i, term in enumerate(node.input[1:], 2):
                out = node.output[0] if i == len(node.input) else f"{node.output[0]}/sum_of_{i}"
                nodes.append(helper.make_node("Add", [total, term], [out], name=f"{node.name}/{i}"))
                total = out
        else:
            nodes.append(node)
    _replace_nodes(model, nodes)


def _replace_nodes(model: Any, nodes: list[Any]) -> None:
    """Make *nodes* the nodes of the graph; copied first, for clearing the graph clears those it has."""
    kept = [type(node).FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(kept)


def _plain_resizes(model: Any) -> None:
    """Say in today's words what ``Upsample`` and the first ``Resize`` mean: corners meet, rounded down."""
    from onnx import helper

    opset = max((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=1)
    nodes = []
    for node in model.graph.node:
        if node.op_type == "Upsample" or (node.op_type == "Resize" and opset == 10):
            attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            scales = node.input[1] if len(node.input) > 1 else f"{node.output[0]}/scales"
            if len(node.input) == 1:
                values = attributes["scales"]
                model.graph.initializer.append(helper.make_tensor(scales, 1, [len(values)], values))
            nodes.append(
                helper.make_node(
                    "Resize",
                    [node.input[0], "", scales],
                    node.output,
                    name=node.name,
                    mode=attributes.get("mode", b"nearest"),
                    coordinate_transformation_mode="asymmetric",
                    nearest_mode="floor",
                )
            )
        else:
            nodes.append(node)
    _replace_nodes(model, nodes)


def _fold(model: Any, where: str) -> Any:
    """*model* after onnxruntime's basic level; the same model where onnxruntime can't take it."""
    import onnx

    ort = need("onnxruntime", "onnx", where)
    weights = _take_out_weights(model)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    # Else it rounds the biases of quantised convolutions to integers.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    with tempfile.TemporaryDirectory(prefix="fusion-patterns-") as folder:
        folded = Path(folder) / "folded.onnx"
        options.optimized_model_filepath = str(folded)
        try:
            with quiet():
                ort.InferenceSession(
                    model.SerializeToString(),
                    options,
                    providers=["CPUExecutionProvider"],
                    disabled_optimizers=_NOT_OURS_TO_FUSE,
                )
            model = onnx.load(str(folded))
        except Exception:
            # An operator or opset that onnxruntime doesn't have may still be one that TVM has.
            pass
    _put_back(model, weights)
    return model


def _take_out_weights(model: Any) -> list[Any]:
    """Make inputs of the large initialisers of *model*, and give them: onnxruntime needs only their types."""
    from onnx import helper

    graph, declared = model.graph, {info.name for info in model.graph.input}
    large = [i for i, tensor in enumerate(graph.initializer) if tensor.ByteSize() >= _LARGE]
    weights = []
    for i in reversed(large):
        tensor = type(graph.initializer[i])()
        tensor.CopyFrom(graph.initializer[i])
        weights.append(tensor)
        if tensor.name not in declared:
            graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        del graph.initializer[i]
    return weights


def _put_back(model: Any, weights: list[Any]) -> None:
    """Make initialisers of those inputs again."""
    names = {tensor.name for tensor in weights}
    for i, info in reversed(list(enumerate(model.graph.input))):
        if info.name in names:
            del model.graph.input[i]
    model.graph.initializer.extend(weights)


def _import(model: Any, where: str) -> tvm.IRModule:
    from tvm.relax.frontend.onnx import from_onnx

    try:
        with quiet() as said:
            return from_onnx(model, keep_params_in_input=False, sanitize_input_names=False)
    except Exception as error:
        message = first_line(error)
        missing = re.search(r"not supported for frontend ONNX: (.*)", str(error))
        if missing:
            raise ModelError(f"{where}: TVM's ONNX importer has no {missing[1]}") from error
        at = re.search(r"Error converting operator (\w+)", said.getvalue())
        still_open = [(name, dims) for name, dims in inputs(model).items() if any(map(_is_open, dims))]
        hint = (
            f"; fix its sizes: --shape {still_open[0][0]}={_example(still_open[0][1])}" if still_open else ""
        )
        raise ModelError(
            f"{where}: TVM's ONNX importer stops{f' at {at[1]}' if at else ''}: {message}{hint}"
        ) from error
