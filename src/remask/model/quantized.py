"""Quantized weights: what they hold, how they are made, and their products with rows.

Attention's projections, dense feed-forwards and experts may be quantized. Embedding, output matrix, norms, biases and
routers never are: they take little memory, or decide on what follows. K/V and hidden states stay as they are.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from remask.checks import QUANTIZATIONS, Quantization
from remask.errors import ConfigError, UnknownNameError
from remask.model.arithmetic import Arithmetic
from remask.model.config import ModelConfig
from remask.model.cpu_kernels import (
    INT4_LARGEST,
    INT4_MIDDLE,
    INT8_LARGEST,
    TINY,
    int4_kernel,
    int4_product,
    int8_kernel,
    int8_product,
    int_mm_product,
    pack_int4,
    pack_int8,
    unpack_int8,
)
from remask.model.sizes import GROUP, GROUP_BYTES, PRODUCT_ROWS, check_matrix_sizes

FP8, FP8_LARGEST = torch.float8_e4m3fn, 448.0
FP8_CAPABILITY = (8, 9)  # of the first CUDA devices with products of fp8
_ENCODED = 2**18  # numbers that are encoded at a time
_FBGEMM_ROW_BYTES = 12  # a scale, a zero and the sum of a row's numbers, of 4 bytes each


@dataclass(frozen=True, slots=True)
class Codes:
    """Rows of quantized numbers, as checkpoints store them; with all experts in one they are [E, m, ...]."""

    values: Tensor  # [m, K], whole numbers (int8; int4: uint8 from 0 to 15) or fp8
    scales: Tensor  # float32 [m], or [m, K / 32] of int4
    zeros: Tensor | None = None  # float32 [m, K / 32] of int4: the number that the code `INT4_MIDDLE` stands for

    @property
    def constants(self) -> Tensor:
        """The scales; of int4 scales and zeros, [2, m, K / 32]."""
        return self.scales if self.zeros is None else torch.stack((self.scales, self.zeros))

    def experts(self) -> Iterator["Codes"]:
        """The codes of each expert."""
        for expert, values in enumerate(self.values):
            yield Codes(values, self.scales[expert], None if self.zeros is None else self.zeros[expert])

    def multiply(self, factor: float) -> "Codes":
        """The codes of the numbers times `factor`."""
        zeros = None if self.zeros is None else self.zeros * factor
        return Codes(self.values, self.scales * factor, zeros)


def encode(quantization: Quantization, values: Tensor) -> Codes:
    """The nearest codes to `values` [m, K]. Few rows are encoded at a time, so that temporaries stay in a cache."""
    parts = [_encode_rows(quantization, rows) for rows in torch.split(values, max(1, _ENCODED // values.shape[1]))]
    if len(parts) == 1:
        return parts[0]
    zeros = None if parts[0].zeros is None else torch.cat([part.zeros for part in parts if part.zeros is not None])
    return Codes(torch.cat([part.values for part in parts]), torch.cat([part.scales for part in parts]), zeros)


def _encode_rows(quantization: Quantization, values: Tensor) -> Codes:
    """The nearest codes to `values` [m, K], all at once. Int4 has a scale and a zero for each group."""
    if quantization == "int8":
        return _quantize_rows(values, torch.int8, INT8_LARGEST)
    if quantization == "fp8":
        return _quantize_rows(values, FP8, FP8_LARGEST)
    groups = values.float().view(len(values), -1, GROUP)
    low, high = groups.aminmax(dim=-1)
    scales = ((high - low) / INT4_LARGEST).clamp_min(TINY)
    zeros = low + INT4_MIDDLE * scales
    codes = ((groups - zeros[..., None]) / scales[..., None] + INT4_MIDDLE).round().clamp(0, INT4_LARGEST)
    return Codes(codes.to(torch.uint8).view_as(values), scales, zeros)


def _quantize_rows(x: Tensor, dtype: torch.dtype, largest: float) -> Codes:
    """Codes of `dtype` of the rows of `x` [n, K], scaled so that each row's largest magnitude is `largest`."""
    numbers = x.float()
    scales = (numbers.abs().amax(dim=-1) / largest).clamp_min(TINY)
    quotients = numbers / scales[:, None]
    return Codes((quotients if dtype.is_floating_point else quotients.round()).to(dtype), scales)


class QuantizedMatrix(Tensor):
    """A matrix [M, K], or one of each expert [E, M, K], that `torch.nn.functional.linear` takes as a weight.

    It supports no other operation of tensors than `linear` and indexing by rows or experts. `dtype` is that of the
    model.
    """

    quantization: ClassVar[Quantization]

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *_: Any) -> "QuantizedMatrix":
        """A wrapper of this shape; `__init__` sets the contents."""
        matrix: QuantizedMatrix = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        return matrix

    def parts(self) -> Mapping[str, Tensor]:
        """The tensors that the matrix consists of, by name."""
        raise NotImplementedError

    def restore(self, parts: Mapping[str, Tensor]) -> None:
        """Copy the `parts` of another matrix. Raises `ConfigError` if it was of another kind or shape."""
        raise NotImplementedError

    def product(self, x: Tensor) -> Tensor:
        """Rows `x` [N, K] times the transpose, [N, M], of the dtype of `x`. Kernels may quantize the rows as well."""
        raise NotImplementedError

    def unrounded_product(self, x: Tensor) -> Tensor:
        """As `product`, but the rows are not quantized: slower, and without their rounding errors."""
        raise NotImplementedError

    def rows(self, part: slice) -> "QuantizedMatrix":
        """Some of the rows of a matrix [M, K], without a copy."""
        raise NotImplementedError

    def expert(self, number: int) -> "QuantizedMatrix":
        """One of the matrices [E, M, K], without a copy."""
        raise NotImplementedError

    def store(self, rows: slice, codes: Codes) -> None:
        """Set `rows` of a matrix [M, K] to `codes` [m, K]."""
        raise NotImplementedError

    def write(self, rows: slice, values: Tensor) -> None:
        """Quantize `values` [m, K] into `rows` of a matrix [M, K]."""
        self.store(rows, encode(self.quantization, values.to(self.device)))

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes in memory."""
        return sum(part.nbytes for part in self.parts().values())

    def __iter__(self) -> Iterator["QuantizedMatrix"]:
        return map(self.expert, range(len(self)))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run `linear`, indexing, and properties of a tensor; any other operation fails in `__torch_dispatch__`."""
        if func is F.linear:
            return _linear(*args, **(kwargs or {}))
        if func is Tensor.__getitem__:
            matrix, index = args
            return matrix.rows(index) if isinstance(index, slice) else matrix.expert(index)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Raise `NotImplementedError`: there are no numbers for any other operation."""
        raise NotImplementedError(f"{func} of a quantized matrix")


class _Scaled(QuantizedMatrix):
    """Numbers of eight bits or fewer, and a scale for each row."""

    code_dtype: ClassVar[torch.dtype]

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,  # noqa: ARG002 - of `__new__`
        device: torch.device,
        values: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> None:
        """Wrap `values` and `scales` without a copy; without them, allocate them uninitialised."""
        rows = tuple(shape[:-1])
        size = (*rows, self.width(shape[-1]))
        self.codes = torch.empty(size, dtype=self.code_dtype, device=device) if values is None else values
        self.scales = torch.empty(rows, device=device) if scales is None else scales

    @staticmethod
    def width(columns: int) -> int:
        """Numbers of `code_dtype` that store a row of `columns` columns."""
        return columns

    def parts(self) -> Mapping[str, Tensor]:
        return {"values": self.codes, "scales": self.scales}

    def restore(self, parts: Mapping[str, Tensor]) -> None:
        _check_parts(parts, {name: (part.shape, part.dtype) for name, part in self.parts().items()})
        for name, part in self.parts().items():
            part.copy_(parts[name])

    def rows(self, part: slice) -> QuantizedMatrix:
        return self._cut(self.codes[part], self.scales[part])

    def expert(self, number: int) -> QuantizedMatrix:
        return self._cut(self.codes[number], self.scales[number])

    def store(self, rows: slice, codes: Codes) -> None:
        self.codes[rows], self.scales[rows] = codes.values, codes.scales

    def unrounded_product(self, x: Tensor) -> Tensor:
        return _wide_product(x, self.codes, self.scales)

    def _cut(self, values: Tensor, scales: Tensor) -> QuantizedMatrix:
        return type(self)((*values.shape[:-1], self.shape[-1]), self.dtype, values.device, values, scales)


class Int8Matrix(_Scaled):
    """Whole numbers from -127 to 127. Rows are quantized alike for a product, whose sums are exact."""

    quantization, code_dtype = "int8", torch.int8

    def product(self, x: Tensor) -> Tensor:
        return int_mm_product(x, self.codes, self.scales)


class Fp8Matrix(_Scaled):
    """Numbers with four bits of exponent and three of mantissa (e4m3), for devices that multiply them."""

    quantization, code_dtype = "fp8", FP8

    def product(self, x: Tensor) -> Tensor:
        """See the base class. Products are rounded to bfloat16, whatever the dtype of `x`."""
        rows = _quantize_rows(x, FP8, FP8_LARGEST)
        scale_a, scale_b = rows.scales[:, None], self.scales[None]
        out = torch._scaled_mm(rows.values, self.codes.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)
        return out.to(x.dtype)


class Int4Matrix(_Scaled):
    """Numbers of four bits, a step and an offset for each group of 32 columns, and a unit of these for each row."""

    quantization, code_dtype = "int4", torch.uint8

    @staticmethod
    def width(columns: int) -> int:
        return columns // GROUP * GROUP_BYTES

    def store(self, rows: slice, codes: Codes) -> None:
        assert codes.zeros is not None
        target, scales = self.codes[rows], self.scales[rows]
        row_count = max(1, _ENCODED // self.shape[-1])  # rows that are packed at a time
        for start in range(0, len(target), row_count):
            part = slice(start, start + row_count)
            target[part], scales[part] = pack_int4(codes.values[part], codes.scales[part], codes.zeros[part])

    def product(self, x: Tensor) -> Tensor:
        return int4_product(x, self.codes, self.scales, int4_kernel().name)

    def unrounded_product(self, x: Tensor) -> Tensor:
        return int4_product(x, self.codes, self.scales, "float32")


def _check_parts(parts: Mapping[str, Tensor], layout: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> None:
    """Raise `ConfigError` if the names, shapes and dtypes of `parts` are not those of `layout`."""
    actual = {name: (part.shape, part.dtype) for name, part in parts.items()}
    if actual != layout:
        raise ConfigError(f"a quantized matrix is made of {layout}, got {actual}")


def _wide_product(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    """Rows `x` [N, K] times the transpose of `values` [M, K] with a scale for each row: [N, M], of the dtype of `x`.

    bfloat16 holds numbers of eight bits exactly, and products are added in float32.
    """
    dtype = torch.float32 if x.dtype == torch.float16 else x.dtype
    return F.linear(x.to(dtype), values.to(dtype)).float().mul_(scales).to(x.dtype)


class UnroundedArithmetic(Arithmetic):
    """Multiplies quantized matrices with rows that are not rounded.

    Rounding turns the smallest differences between two passes into larger ones, which move predictions.
    """

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not isinstance(weight, QuantizedMatrix):
            return super().linear(x, weight, bias)
        out = weight.unrounded_product(x)
        return out if bias is None else out.add_(bias)

    def grouped_linear(self, x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        return self.grouped_linear_loop(x, weights, ends)


@dataclass(slots=True)
class _Packed:
    """Consecutive rows of a matrix, a chunk, in the order of FBGEMM's kernel."""

    matrix: Any = None  # of `pack_int8`; None: it was not written yet


class PackedInt8Matrix(QuantizedMatrix):
    """An `Int8Matrix` in the order of FBGEMM's kernel, in chunks of `chunk_rows` rows; it is cut only between them."""

    quantization = "int8"

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,  # noqa: ARG002 - of `__new__`
        device: torch.device,  # noqa: ARG002 - of `__new__`
        chunk_rows: Sequence[int],
        packed: Sequence[_Packed] | None = None,
    ) -> None:
        """Share the chunks `packed` of another matrix; without them, begin with chunks that are not written."""
        self.chunk_rows = tuple(chunk_rows)
        experts = shape[0] if len(shape) == 3 else 1
        self.packed = packed or [_Packed() for _ in range(experts * len(self.chunk_rows))]

    def rows(self, part: slice) -> QuantizedMatrix:
        """See the base class. Raises `NotImplementedError` if `part` begins or ends within a chunk."""
        chunks = self._chunks_in(part)
        chunk_rows, packed = self.chunk_rows[chunks], self.packed[chunks]
        return type(self)((sum(chunk_rows), self.shape[-1]), self.dtype, self.device, chunk_rows, packed)

    def expert(self, number: int) -> QuantizedMatrix:
        return self._of_expert(number, self.shape[1:])

    def _of_expert(self, number: int, shape: Sequence[int]) -> QuantizedMatrix:
        """The matrix [M, K] of expert `number`; of a matrix [M, K], whose only number is 0, that matrix itself."""
        count = len(self.chunk_rows)
        packed = self.packed[number * count : (number + 1) * count]
        return type(self)(shape, self.dtype, self.device, self.chunk_rows, packed)

    def store(self, rows: slice, codes: Codes) -> None:
        """See the base class. Raises `NotImplementedError` if `rows` are not whole chunks."""
        chunks = self._chunks_in(rows)
        sizes = list(self.chunk_rows[chunks])
        values, scales = torch.split(codes.values, sizes), torch.split(codes.scales, sizes)
        for chunk, chunk_values, chunk_scales in zip(self.packed[chunks], values, scales, strict=True):
            chunk.matrix = pack_int8(chunk_values, chunk_scales)

    def parts(self) -> Mapping[str, Tensor]:
        """Copies of values and scales, as the kernel has its own order in memory."""
        pairs = [unpack_int8(chunk.matrix) for chunk in self.packed]
        values, scales = map(torch.cat, zip(*pairs, strict=True))
        return {"values": values.view(self.shape), "scales": scales.view(self.shape[:-1])}

    def restore(self, parts: Mapping[str, Tensor]) -> None:
        rows = self.shape[:-1]
        _check_parts(parts, {"values": (self.shape, torch.int8), "scales": (rows, torch.float32)})
        values = parts["values"].reshape(-1, sum(self.chunk_rows), self.shape[-1])
        scales = parts["scales"].reshape(len(values), -1)
        for expert, codes in enumerate(map(Codes, values, scales)):
            self._of_expert(expert, self.shape[-2:]).store(slice(None), codes)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes in memory."""
        row_count = sum(self.chunk_rows) * (len(self.packed) // len(self.chunk_rows))
        return self.numel() + _FBGEMM_ROW_BYTES * row_count

    def product(self, x: Tensor) -> Tensor:
        return int8_product(x, [chunk.matrix for chunk in self.packed], int8_kernel().reduced)

    def unrounded_product(self, x: Tensor) -> Tensor:
        parts = [_wide_product(x, *unpack_int8(chunk.matrix)) for chunk in self.packed]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _chunks_in(self, part: slice) -> slice:
        """The chunks of `part` of the rows. Raises `NotImplementedError` if it begins or ends within one."""
        edges = [0, *accumulate(self.chunk_rows)]
        start, stop, _ = part.indices(edges[-1])
        try:
            return slice(edges.index(start), edges.index(stop))
        except ValueError:
            raise NotImplementedError(f"rows {start} to {stop} of an int8 matrix cut at {edges}") from None


def check_quantization(quantization: str | None, config: ModelConfig, device: torch.device) -> None:
    """Check that matrices of the sizes in `config`, those of one rank, can be quantized as `quantization` on `device`.

    Raises `UnknownNameError` if `quantization` is unknown, and `ConfigError` if device or sizes do not allow it. None
    is always allowed.
    """
    if quantization is None:
        return
    if quantization not in QUANTIZATIONS:
        raise UnknownNameError("quantization", quantization, QUANTIZATIONS)
    if quantization != "fp8":
        if device.type != "cpu":
            raise ConfigError(
                f"quantization={quantization!r} is for CPUs, and the model is on {device}: use 'fp8', or leave it out"
            )
    elif device.type != "cuda":
        raise ConfigError(f"quantization='fp8' needs a CUDA device, and the model is on {device}: use 'int8' or 'int4'")
    elif (capability := torch.cuda.get_device_capability(device)) < FP8_CAPABILITY:
        raise ConfigError(
            f"quantization='fp8' needs a device of compute capability {FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]} (Ada, "
            f"Hopper), and {device} has {capability[0]}.{capability[1]}: leave it out"
        )
    check_matrix_sizes(quantization, config)


def empty_matrix(
    quantization: Quantization,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    chunk_rows: Sequence[int],
) -> QuantizedMatrix:
    """An unwritten matrix [M, K], or [E, M, K]. It will be cut only between chunks of `chunk_rows` rows."""
    if quantization == "int4":
        return Int4Matrix(shape, dtype, device)
    # FBGEMM's kernel needs two columns, for the least and the largest number of `cpu_kernels.int8_product`.
    if quantization == "int8" and device.type == "cpu" and shape[-1] > 1 and int8_kernel().name == "fbgemm":
        return PackedInt8Matrix(shape, dtype, device, chunk_rows)
    return Int8Matrix(shape, dtype, device) if quantization == "int8" else Fp8Matrix(shape, dtype, device)


def kernel_description(quantization: Quantization | None, device: torch.device) -> str:
    """`quantization`, for the log; on a CPU with the kernel that computes it, which is measured at the first call."""
    if device.type != "cpu" or quantization is None:
        return str(quantization)
    return f"{quantization} ({int4_kernel() if quantization == 'int4' else int8_kernel()})"


def _linear(x: Tensor, matrix: QuantizedMatrix, bias: Tensor | None = None) -> Tensor:
    """`F.linear` with a quantized `matrix` [M, K]: [N, M]. Multiplies at most `PRODUCT_ROWS` rows at a time."""
    if 0 < len(x) <= PRODUCT_ROWS:
        out = matrix.product(x)
    else:
        out = x.new_empty((len(x), matrix.shape[0]))
        for start in range(0, len(x), PRODUCT_ROWS):
            out[start : start + PRODUCT_ROWS] = matrix.product(x[start : start + PRODUCT_ROWS])
    return out if bias is None else out.add_(bias)
